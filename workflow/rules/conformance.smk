rule conformance:
    """Run the suite on every candidate, each in its own process: passed, failed, gaps."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        estimate=ESTIMATE,
        modules=modules("stages/conformance.py", "conformance"),
    output:
        events=RUN.events("conformance"),
        candidates=[RUN.conformance(name) for name in RUN.entrants],
    log:
        RUN.log("conformance"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "conformance: the suite over every candidate"
    shell:
        "python -m kvtrial.stages.conformance --run-dir {params.run_dir:q} --jobs {threads}"
        " 2>&1 | tee {log:q}"
