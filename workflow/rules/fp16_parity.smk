rule fp16_parity:
    """Compare every arm's tokens and logits with K0's before anything is timed."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        estimate=ESTIMATE,
        gguf=GGUF,
        prompts=ancient(near(paths.config_file("prompts.yaml"))),
    output:
        events=RUN.events("fp16_parity"),
    log:
        RUN.log("fp16_parity"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "fp16_parity: tokens and logits against K0"
    shell:
        "python -m kvtrial.stages.parity --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"
