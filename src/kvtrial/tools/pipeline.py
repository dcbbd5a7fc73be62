"""``kvtrial run``: the pipeline from a checkout or an installed wheel, by Snakemake.

In a checkout it is what `make verdict` does. Elsewhere the pipeline is the package's own, and the current folder
gets ``results/``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtrial.host import paths
from kvtrial.host.files import write_text
from kvtrial.tools import registering

#: What it may be asked for, and the rule that makes it; any other word is a rule of the pipeline.
VERDICT, SHOWN = "verdict", "show"


def command(
    targets: Sequence[str] = (),
    *,
    model: str | None = None,
    protocol: str | None = None,
    profile: str | None = None,
    cores: int = 1,
    dry_run: bool = False,
    forcerun: Sequence[str] = (),
    store: str | None = None,
    force: bool = False,
) -> list[str]:
    """The command line of Snakemake.

    Parameters
    ----------
    targets : sequence of str
        Rules of the pipeline; by default the verdict, which is shown.
    model : str, optional
        A name of `kvtrial models`, or the path of a file that ends in .gguf.
    protocol : str, optional
        A path, or ``smoke`` for config/protocol-smoke.yaml.
    profile : str, optional
        ``default`` or ``full``.
    forcerun : sequence of str
        Stages that are measured again, in an attempt of their own.
    store : str, optional
        Of `adopt`: an eligible arm in place of the one that the verdict names.
    force : bool
        Of `adopt`: take a verdict of random weights or of a smoke run as well.

    Raises
    ------
    ConfigError
        No such protocol.
    """
    home, root = paths.shipped(), folder()
    chosen = {
        "model": str(Path(model).resolve()) if model and model.endswith(".gguf") else model,
        "protocol": _protocol(protocol, root),
        "profile": profile,
        "store": store,
        "force": "true" if force else None,
    }
    if paths.checkout() is None and protocol is None:
        chosen["protocol"] = str(home / "config" / "protocol.yaml")
    given = [f"{key}={value}" for key, value in chosen.items() if value]
    return [
        # Targets first: options that take several words would take them too.
        *(sys.executable, "-m", "snakemake"),
        *([SHOWN if name == VERDICT else name for name in targets] or [SHOWN]),
        *("--cores", str(cores)),
        *("--snakefile", str(home / "workflow" / "Snakefile"), "--directory", str(root)),
        *("--workflow-profile", str(home / "profiles" / "default")),
        *("--configfile", str(home / "config" / "config.yaml")),
        # Which stage begins, warnings and errors; a dry run is asked for the reasons.
        *(["--dry-run"] if dry_run else ["--quiet", "host", "progress", "reason"]),
        *(["--forcerun", *forcerun] if forcerun else []),
        *(["--config", *given] if given else []),
    ]


def folder() -> Path:
    """Where the pipeline works: the checkout, else the current folder."""
    return paths.checkout() or Path.cwd()


def _protocol(asked: str | None, root: Path) -> str | None:
    """The registration's path, relative to the folder of the pipeline where it lies below it."""
    if asked is None:
        return None
    path = registering.path_of(asked).resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def run(arguments: Sequence[str]) -> None:
    """Become that command, with results in the current folder where there is no checkout."""
    variables = {
        **os.environ,
        "PYTHONUTF8": "1",
        "KVTRIAL_SHOW": "1",
    }  # rule show prints the verdict
    if paths.checkout() is None and "KVTRIAL_RESULTS" not in variables:
        results = folder() / "results"
        results.mkdir(exist_ok=True)
        write_text(results / paths.RUN_HERE, "made by kvtrial run\n")
        variables["KVTRIAL_RESULTS"] = str(results)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(arguments[0], list(arguments), variables)
