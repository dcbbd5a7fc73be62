rule m1:
    """Time one attention region, candidates interleaved."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        estimate=ESTIMATE,
        gguf=GGUF,
        workload=RUN.workload,
        conformance=ancient(RUN.events("conformance")),
    output:
        events=RUN.events("m1"),
    log:
        RUN.log("m1"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "m1: one attention region"
    shell:
        "python -m kvtrial.stages.m1 --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"
