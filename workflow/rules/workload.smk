rule workload:
    """Prefill real text once per model and context; the snapshots are shared between runs."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        estimate=ESTIMATE,
        gguf=GGUF,
    output:
        workload=RUN.workload,
    log:
        RUN.log("workload"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
    message:
        "workload: snapshots of {RUN.model}"
    shell:
        "python -m kvtrial.stages.workload --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " 2>&1 | tee {log:q}"
