rule build:
    """Compile the kernels and write down what they were built from."""
    input:
        sources=built_from(),
    output:
        facts=RUN.build,
    log:
        RUN.log("build"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    message:
        "build: kernels {RUN.build_id}"
    shell:
        "python -m kvtrial.stages.build --out {output.facts:q} 2>&1 | tee {log:q}"
