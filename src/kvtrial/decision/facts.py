"""What a run knows of itself and of its candidates before anything is measured: the rows of stage ``run``."""

from __future__ import annotations

from typing import Any

import pandas as pd

#: When a run was begun (UTC, ISO 8601), by which commit of kvtrial, on which host and kernel.
MEASURED = ("begun", "commit", "host", "kernel")


def of_run(events: pd.DataFrame) -> dict[str, Any]:
    """What is true of the whole run; what its rows don't say is ``unknown``, or as it is by default.

    Returns
    -------
    dict
        ``run_id``, ``model``, ``machine``, ``shape``, ``synthetic``, ``profile``, ``usable_cpus``,
        ``context_length``: positions that the model was trained for, or None, and ``measured``: text by key of
        `MEASURED`, empty where it is not said.
    """
    rows = events[events["stage"] == "run"]
    texts = {m: t for m, t in zip(rows["metric"], rows["text"]) if m.startswith("run/")}
    trained = texts.get("run/context_length", "")
    return {
        "run_id": texts.get("run/run_id", "unknown"),
        "model": texts.get("run/model", "unknown"),
        "machine": texts.get("run/machine", "unknown"),
        "shape": texts.get("run/shape", ""),
        "synthetic": texts.get("run/synthetic", "") == "true",
        "profile": texts.get("run/profile", "default"),
        "usable_cpus": int(texts.get("run/usable_cpus", "1")),
        "context_length": int(trained) if trained.isdecimal() else None,
        "measured": {key: texts.get(f"run/{key}", "") for key in MEASURED},
    }


def by_candidate(events: pd.DataFrame, metric: str) -> dict[str, str]:
    """Candidate → what is written of it: ``candidate/profile``, ``candidate/layout``, …"""
    rows = events[(events["stage"] == "run") & (events["metric"] == metric)]
    return dict(zip(rows["candidate"], rows["text"]))
