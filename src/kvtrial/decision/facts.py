"""What a run knows of itself and of its candidates before anything is measured: the rows of stage ``run``."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from kvtrial.contract import InvalidArgument
from kvtrial.contract.arguments import shown

#: When a run was begun (UTC, ISO 8601), by which commit of kvtrial, on which host and kernel.
MEASURED = ("begun", "commit", "host", "kernel")


@dataclass(frozen=True)
class Run:
    """What is true of a whole run.

    Attributes
    ----------
    context_length : int or None
        Positions that the model was trained for, where its file says so.
    measured : dict
        Text by key of `MEASURED`, empty where it is not said.
    """

    run_id: str
    model: str
    machine: str
    shape: str
    synthetic: bool
    profile: str
    usable_cpus: int
    context_length: int | None
    measured: dict[str, str]


def of_run(events: pd.DataFrame) -> Run:
    """What stage ``run`` says of the whole run; what it may leave out is as it is by default.

    Raises
    ------
    InvalidArgument
        It does not say which run, model and machine the events are of.
    """
    texts = _texts(events)
    if missing := [key for key in ("run_id", "model", "machine") if not texts.get(f"run/{key}")]:
        raise InvalidArgument(
            f"events say no {', '.join(f'run/{key}' for key in missing)} in stage run: which run they are of "
            "is not known; give all rows of the run, as read_run returns them"
        )
    cpus = texts.get("run/usable_cpus", "1")
    if not cpus.isdecimal() or int(cpus) < 1:
        raise InvalidArgument(f"run/usable_cpus is {shown(cpus)}; allowed: 1 or more")
    return Run(
        run_id=texts["run/run_id"],
        model=texts["run/model"],
        machine=texts["run/machine"],
        shape=texts.get("run/shape", ""),
        synthetic=texts.get("run/synthetic", "") == "true",
        profile=texts.get("run/profile", "default"),
        usable_cpus=int(cpus),
        context_length=context_length(events),
        measured={key: texts.get(f"run/{key}", "") for key in MEASURED},
    )


def context_length(events: pd.DataFrame) -> int | None:
    """Positions that the run's model was trained for, or None where it is not said."""
    trained = _texts(events).get("run/context_length", "")
    return int(trained) if trained.isdecimal() else None


def _texts(events: pd.DataFrame) -> dict[str, str]:
    rows = events[events["stage"] == "run"]
    return {m: t for m, t in zip(rows["metric"], rows["text"]) if m.startswith("run/")}


def by_candidate(events: pd.DataFrame, metric: str) -> dict[str, str]:
    """Candidate → what is written of it: ``candidate/profile``, ``candidate/layout``, …"""
    rows = events[(events["stage"] == "run") & (events["metric"] == metric)]
    return dict(zip(rows["candidate"], rows["text"]))
