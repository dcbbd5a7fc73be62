rule m2:
    """Time whole decodes, paired by block."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        estimate=ESTIMATE,
        gguf=GGUF,
        workload=RUN.workload,
        conformance=ancient(RUN.events("conformance")),
        parity=ancient(RUN.events("parity")),
    output:
        events=RUN.events("m2"),
    log:
        RUN.log("m2"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "m2: whole decodes, all arms in rotation"
    shell:
        "python -m kvtrial.stages.m2 --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"
