rule verdict:
    """Apply the fixed rule to the raw events."""
    input:
        protocol=PROTOCOL,
        events=[RUN.events(stage) for stage in layout.STAGES],
        modules=modules("decision", "run/protocol.py", "stages/after/verdict.py"),
    output:
        verdict=RUN.verdict,
    log:
        RUN.log("verdict"),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        run_dir=RUN.dir,
    message:
        "verdict: the rule over all events"
    shell:
        "python -m kvtrial.stages.after.verdict --run-dir {params.run_dir:q} 2>&1 | tee {log:q}"


rule show:
    """Name the run whose verdict `make` prints when all is done, and print it for `kvtrial run`: without an
    output, so it always runs."""
    input:
        verdict=RUN.verdict,
    log:
        RUN.log("show"),
    conda:
        "../../environment.yml"
    threads: 1
    params:
        run_id=RUN.run_id,
        shown=near(paths.results_dir()) / "shown",
    message:
        "show: {params.run_id}"
    shell:
        "echo {params.run_id:q} > {params.shown:q} 2> {log:q}; "
        '[ -z "${{KVTRIAL_SHOW:-}}" ] || python -m kvtrial verdict {params.run_id:q} || [ $? -eq 4 ]'
