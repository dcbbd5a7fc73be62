from kvtrial.measure.peers.programs import missing


rule peers:
    """Optional: llama.cpp, PyTorch, ONNX Runtime and OpenVINO beside ours, in one run."""
    input:
        protocol=PROTOCOL,
        facts=BUILD,
        gguf=GGUF,
        workload=RUN.workload,
        conformance=ancient(RUN.events("conformance")),
        module=modules("stages/peers.py"),
    output:
        comparison=RUN.peers,
    log:
        RUN.log("peers"),
    conda:
        "../../environment.yml"
    threads: workflow.cores
    resources:
        machine=1,
    params:
        run_dir=RUN.dir,
        contexts=config["peers"]["contexts"],
        cores=config["peers"]["threads"],
        blocks=config["peers"]["blocks"],
        without=list(missing()),  # what is installed since is compared by the next run
    message:
        "peers: other engines beside ours"
    shell:
        "python -m kvtrial.stages.peers --run-dir {params.run_dir:q} --gguf {input.gguf:q}"
        " --contexts {params.contexts} --threads {params.cores} --blocks {params.blocks}"
        " 2>&1 | tee {log:q}"
