rule adopt:
    """Let the runtime obey the verdict, and write it down for people."""
    input:
        verdict=RUN.verdict,
        modules=modules("show/templates", "stages/after/adopt.py"),
    output:
        note=RUN.dir / "adopted.json",
    log:
        RUN.log("adopt"),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        run_dir=RUN.dir,
        selection=paths.selection_file(),
        store=["--store", config["store"]] if config["store"] else [],
        force="--force" if config["force"] else "",
    message:
        "adopt: {RUN.run_id}"
    shell:
        "python -m kvtrial.stages.after.adopt --run-dir {params.run_dir:q}"
        " --selection {params.selection:q} {params.store:q} {params.force} 2>&1 | tee {log:q}"
