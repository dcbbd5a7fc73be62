rule aa:
    """Time one candidate registered twice: its ratio is known to be 1."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        estimate=ESTIMATE,
        gguf=GGUF,
        workload=RUN.workload,
        conformance=ancient(RUN.events("conformance")),
        parity=ancient(RUN.events("parity")),
    output:
        events=RUN.events("aa"),
    log:
        RUN.log("aa"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "aa: the same twice"
    shell:
        "python -m kvtrial.stages.aa --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"
