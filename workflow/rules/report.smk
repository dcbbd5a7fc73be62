rule report:
    """One self-contained page with the verdict, the figures and the tables."""
    input:
        verdict=RUN.verdict,
        manifest=RUN.manifest,
        peers=if_there(RUN.peers),
        modules=modules("show", "stages/after/report.py"),
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
        "python -m kvtrial.stages.after.report --run-dir {params.run_dir:q} 2>&1 | tee {log:q}"
