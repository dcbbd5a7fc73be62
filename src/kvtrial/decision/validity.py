"""Which blocks count: each block's first run that is not void, of the first complete attempt.

How the arms compare has no say, and nothing is trimmed. When a block is void is `kvtrial.measure.void`'s to
say, how many of them a cell needs `kvtrial.measure.plan`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvtrial.measure.plan import cell_name
from kvtrial.measure.void import void_reason
from kvtrial.registration import Protocol

#: Stages whose blocks can be void.
STAGES = ("m1", "m2", "aa", "control", "direct_write")


@dataclass(frozen=True)
class Judged:
    """``valid_rows``: rows of blocks that count. ``broken``: cell of m2 → why it can't be decided.
    ``summary``: stage → cell → how many blocks are valid and how many runs were void."""

    valid_rows: pd.DataFrame
    broken: dict[str, str]
    summary: dict[str, Any]

    def void_rate(self, stage: str, cell: str) -> float:
        """Share of the runs of a cell's blocks that were void; 0 where none was made."""
        count = self.summary.get(stage, {}).get(cell, {"valid": 0, "void": 0})
        return float(count["void"] / max(1, count["valid"] + count["void"]))


def first_complete_attempts(events: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The rows that decide, and how many attempts each stage made.

    A stage's first complete attempt decides: a rerun until it pleases is not possible. Of a stage without one
    the last attempt is shown, and decides nothing.
    """
    kept, attempts = [], {}
    for stage, rows in events.groupby("stage", sort=True):
        complete = sorted(set(rows.loc[rows["metric"] == "attempt/complete", "attempt"]))
        every = sorted(set(rows["attempt"]))
        decides = complete[0] if complete else every[-1]
        kept.append(rows[rows["attempt"] == decides])
        attempts[str(stage)] = {
            "made": len(every),
            "complete": len(complete),
            "decided_by": int(decides),
        }
    return pd.concat(kept, ignore_index=True), attempts


def judge(events: pd.DataFrame, protocol: Protocol) -> Judged:
    """Keep each block's first run that is not void, and name the cells that can't be decided."""
    rows = events[events["stage"].isin(STAGES)]
    broken = {
        cell_name(row): str(row["text"])
        for metric in ("cell/skipped", "cell/lost")
        for _, row in rows[(rows["stage"] == "m2") & (rows["metric"] == metric)].iterrows()
    }
    summary: dict[str, Any] = {}
    kept: list[Any] = []
    keys = ["stage", "context", "sessions", "threads", "shape", "block"]
    for (stage, *cell, _), own in rows[rows["block"] >= 0].groupby(keys)["trial"]:
        name = cell_name(dict(zip(keys[1:], cell)))
        count = summary.setdefault(str(stage), {}).setdefault(name, {"valid": 0, "void": 0})
        for trial in sorted(set(own)):
            places = own.index[own == trial]
            if void_reason(rows.loc[places], protocol["void"]) is None:
                count["valid"] += 1
                kept.append(places)
                break
            count["void"] += 1
    valid: Any = np.concatenate(kept) if kept else []
    return Judged(rows.loc[valid].reset_index(drop=True), broken, summary)
