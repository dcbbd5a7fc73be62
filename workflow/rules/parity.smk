rule parity:
    """Compare every arm's logits with the baseline's, and what reduced precision costs, before anything is timed."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        estimate=ESTIMATE,
        gguf=GGUF,
        workload=RUN.workload,
        prompts=ancient(near(paths.config_file("prompts.yaml"))),
    output:
        events=RUN.events("parity"),
    log:
        RUN.log("parity"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "parity: logits against the baseline's, and what reduced precision costs"
    shell:
        "python -m kvtrial.stages.parity --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"


rule fp16_parity:
    """The plan's name of the target `parity`."""
    input:
        rules.parity.output,
