rule estimate:
    """Say how long the trial is going to take, from a few seconds of every candidate."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        gguf=GGUF,
    output:
        estimate=RUN.estimate,
    log:
        RUN.log("estimate"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "estimate: how long it is going to take"
    shell:
        "python -m kvtrial.stages.estimate --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " --jobs {threads} 2>&1 | tee {log:q}"
