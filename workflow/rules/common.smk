import os

from snakemake.utils import validate

from kvtrial import build, paths, run

validate(config, "../schemas/config.schema.yaml")

run.prepare_environment()

RUN = run.plan(config, Path(os.path.relpath(paths.results_dir())))
PROTOCOL = ancient(RUN.dir / "protocol.json")  # its hash is in the folder's name


def modules(*names):
    """Python sources below src/kvtrial, files or whole folders: what a stage's outcome rests on."""
    found = []
    for name in names:
        path = Path("src/kvtrial") / name
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return found


def verdict_was_asked_for():
    """Whether this call's targets are the default or name the verdict."""
    targets = set(map(str, workflow.dag_settings.targets))
    return RUN.verdict.is_file() and (not targets or targets & {"all", "verdict"})
