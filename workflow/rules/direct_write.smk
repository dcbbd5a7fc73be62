rule direct_write:
    """Time direct-to-cache projection against scratch and append."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        estimate=ESTIMATE,
        gguf=GGUF,
        workload=RUN.workload,
        conformance=ancient(RUN.events("conformance")),
    output:
        events=RUN.events("direct_write"),
    log:
        RUN.log("direct_write"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "direct_write: reserve and commit against append"
    shell:
        "python -m kvtrial.stages.direct_write --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"
