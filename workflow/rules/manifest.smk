rule manifest:
    """Machine, versions, flags and hashes; the protocol as it is run."""
    input:
        facts=RUN.build,
        gguf=RUN.gguf,
        protocol=config["protocol"],
    output:
        manifest=RUN.manifest,
        protocol=RUN.protocol_json,
        events=RUN.events("run"),
    log:
        RUN.log("manifest"),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        run_dir=RUN.dir,
        model=RUN.model,
        profile=RUN.profile,
    message:
        "manifest: {RUN.run_id}"
    shell:
        "python -m kvtrial.stages.manifest --run-dir {params.run_dir:q} --protocol {input.protocol:q}"
        " --model {params.model:q} --gguf {input.gguf:q}"
        " --profile {params.profile:q} 2>&1 | tee {log:q}"
