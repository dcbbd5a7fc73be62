# One trial a class of machine, each on a node of its own: the outer workflow of profiles/slurm and
# profiles/kubernetes. A job runs the whole inner workflow where it lands, since a run is named after the
# machine and the build that it measures.
from snakemake.utils import min_version, validate

min_version("9.13")


configfile: "config/fleet.yaml"


validate(config, "schemas/fleet.schema.yaml")


def of_machine(key, default=""):
    """A function of the wildcards: what config/fleet.yaml says of the machine."""
    return lambda wildcards: config["machines"][wildcards.machine].get(key, default)


rule all:
    input:
        expand("results/fleet/{machine}.json", machine=config["machines"]),


rule trial:
    """The whole trial on one class of machine; a job that is sent again goes on from its last block."""
    output:
        verdict="results/fleet/{machine}.json",
    log:
        "results/fleet/{machine}.log",
    threads: of_machine("cpus")
    resources:
        slurm_partition=of_machine("slurm_partition"),
        machine_type=of_machine("machine_type"),
    params:
        checkout=of_machine("checkout"),
        target=of_machine("target", "verdict"),
        model=of_machine("model"),
        scratch=of_machine("scratch", "${KVTRIAL_SCRATCH:-}"),
        results=lambda wildcards: f"{config['results']}/{wildcards.machine}",
    shell:
        "mkdir -p {params.results:q}"
        " && export KVTRIAL_RESULTS=$(cd {params.results:q} && pwd)"
        # A variable in it is the node's own, such as $TMPDIR.
        ' && export KVTRIAL_SCRATCH="{params.scratch}"'
        " && make -C {params.checkout:q} {params.target:q} MODEL={params.model:q} > {log:q} 2>&1"
        " && {{ {params.checkout:q}/.venv/bin/python -m kvtrial verdict --json"
        ' "$(cat "$KVTRIAL_RESULTS/shown")"'
        # Code 4 says INCONCLUSIVE, which is a result.
        " > {output.verdict:q} || [ $? -eq 4 ]; }}"
