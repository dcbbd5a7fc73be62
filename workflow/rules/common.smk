import os
import sys

from snakemake.utils import validate

from kvtrial.engine.errors import ModelError
from kvtrial.host import build, paths
from kvtrial.run import layout, protocol
from kvtrial.run.ending import hand_on_sigterm

validate(config, "../schemas/config.schema.yaml")

layout.prepare_environment()


def near(path):
    """Relative where it lies below the working directory, so that messages stay short."""
    return Path(os.path.relpath(path)) if Path(path).is_relative_to(Path.cwd()) else Path(path)


try:
    RUN = layout.plan(config, near(paths.results_dir()))
except (ModelError, layout.ConfigError, protocol.ProtocolError) as error:
    # Its message alone: a stack of files says nothing to whoever named the model.
    sys.exit(f"kvtrial: {error}")

# What the run's name stands for never makes a finished stage of it run again.
PROTOCOL = ancient(RUN.protocol_json)
BUILD = ancient(RUN.build)
GGUF = ancient(RUN.gguf)
# Said once, before anything is measured.
ESTIMATE = ancient(RUN.estimate)


def modules(*names):
    """Sources below src/kvtrial, files or whole folders: what a stage's outcome rests on."""
    sources = []
    for name in names:
        path = near(paths.PACKAGE) / name
        inside = sorted(f for f in path.rglob("*.*") if f.suffix != ".pyc")
        sources += inside if path.is_dir() else [path]
    return sources


def built_from():
    """What the kernels are compiled from; an installed wheel has nothing to compile."""
    return [*build.native_sources(), Path("pyproject.toml")] if build.has_sources() else []


def if_there(path):
    """An optional target's outcome as an input: its file where that target was run."""
    return [path] if path.is_file() else []


def verdict_was_asked_for():
    """Whether this call's targets are the default or name the verdict."""
    targets = set(map(str, workflow.dag_settings.targets))
    return RUN.verdict.is_file() and (not targets or targets & {"all", "verdict"})
