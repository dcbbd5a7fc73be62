"""Where things lie: the checkout, the configuration, the data. Nothing here creates anything.

Away from a checkout the package brings config/, workflow/ and profiles/ with it; what a user writes (a
selection, models of their own) lies in their configuration folder and comes first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
#: Marks a results/ folder that ``kvtrial run`` has made away from a checkout.
RUN_HERE = ".kvtrial"


def checkout() -> Path | None:
    """The checkout that this package runs from, or None for an installed wheel."""
    root = PACKAGE.parent.parent
    return root if (root / "config" / "protocol.yaml").is_file() else None


def shipped() -> Path:
    """What config/, workflow/ and profiles/ lie in: the checkout, else the package."""
    return checkout() or PACKAGE


def how_to(target: str = "verdict") -> str:
    """What a person types for a target of the pipeline: ``make`` in a checkout, else what a wheel brings."""
    if checkout():
        return f"make {target}"
    own = {
        "verdict": "kvtrial run",
        "ui": "kvtrial ui",
        "build": "make the wheel again and install it",
    }
    return own.get(target, f"kvtrial run {target}")


def user_dir(kind: str) -> Path:
    """The user's own folder for kvtrial; ``kind`` is "config" or "data"."""
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "kvtrial"
    variable, default = {
        "config": ("XDG_CONFIG_HOME", home / ".config"),
        "data": ("XDG_DATA_HOME", home / ".local" / "share"),
    }[kind]
    return Path(os.environ.get(variable) or default) / "kvtrial"


def config_dir() -> Path:
    """``$KVTRIAL_CONFIG``, else the checkout's config/, else the user's configuration folder."""
    if chosen := os.environ.get("KVTRIAL_CONFIG"):
        return Path(chosen)
    root = checkout()
    return root / "config" if root else user_dir("config")


def config_file(name: str) -> Path:
    """A file of the configuration: the one in `config_dir`, else the one that the package brings."""
    own = config_dir() / name
    return own if own.is_file() else shipped() / "config" / name


def selection_file() -> Path:
    """Where the adopted outcome is read: ``$KVTRIAL_SELECTION``, else `config_dir`/selection.yaml."""
    if chosen := os.environ.get("KVTRIAL_SELECTION"):
        return Path(chosen)
    return config_dir() / "selection.yaml"


def schema_dir() -> Path:
    """The schemas of protocol, models and verdict."""
    return shipped() / "workflow" / "schemas"


def results_dir() -> Path:
    """``$KVTRIAL_RESULTS``, else the checkout's results/, else results/ of the current folder where ``kvtrial run``
    has made one, else the user's data folder."""
    if chosen := os.environ.get("KVTRIAL_RESULTS"):
        return Path(chosen)
    if root := checkout():
        return root / "results"
    here = Path.cwd() / "results"
    return here if (here / RUN_HERE).is_file() else user_dir("data") / "results"


def scratch_dir(run_dir: Path) -> Path:
    """A run's cold stores while they are measured: below ``$KVTRIAL_SCRATCH``, else in the run's folder."""
    chosen = os.environ.get("KVTRIAL_SCRATCH")
    return (Path(chosen) / run_dir.name if chosen else run_dir) / "cold-scratch"
