rule report:
    """One self-contained page with the verdict, the figures and the tables."""
    input:
        verdict=RUN.verdict,
        manifest=RUN.manifest,
        peers=if_there(RUN.peers),
        modules=modules("stages/report.py", "report.py", "plots"),
        template="src/kvtrial/templates/report.html",
    output:
        page=RUN.report,
    log:
        RUN.log("report"),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        run_dir=RUN.dir,
    message:
        "report: {output.page}"
    shell:
        "python -m kvtrial.stages.report --run-dir {params.run_dir:q} 2>&1 | tee {log:q}"
