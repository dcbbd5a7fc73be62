rule cold_tier:
    """Spill, restore, crash and reopen for both cold stores."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        gguf=GGUF,
        workload=RUN.workload,
        conformance=ancient(RUN.events("conformance")),
    output:
        events=RUN.events("cold_tier"),
    log:
        RUN.log("cold_tier"),
    # Before the stages that all wait for the same machine: alone at the end it would leave a core idle.
    priority: 1
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "cold_tier: spill and restore"
    shell:
        "python -m kvtrial.stages.cold_tier --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"
