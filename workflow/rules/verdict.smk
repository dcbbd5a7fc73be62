rule verdict:
    """Apply the fixed rule to the raw events."""
    input:
        protocol=PROTOCOL,
        events=[RUN.events(stage) for stage in run.STAGES],
        modules=modules(
            "stages/verdict.py", "decide.py", "gates.py", "parity.py", "stats.py", "protocol.py"
        ),
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
        "python -m kvtrial.stages.verdict --run-dir {params.run_dir:q} 2>&1 | tee {log:q}"
