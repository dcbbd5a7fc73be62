rule model:
    """Fetch or make the model's file once and check its sha256; all runs share it."""
    output:
        gguf=RUN.gguf,
    log:
        RUN.log("model"),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        name=RUN.model,
    message:
        "model: {params.name}"
    shell:
        "python -m kvtrial.stages.model {params.name:q} --out {output.gguf:q} 2>&1 | tee {log:q}"
