rule control:
    """Measure the control candidate once, beside the pairs."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        gguf=GGUF,
        workload=RUN.workload,
        conformance=ancient(RUN.events("conformance")),
    output:
        events=RUN.events("control"),
    log:
        RUN.log("control"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "control: a general store, measured once"
    shell:
        "python -m kvtrial.stages.control --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"
