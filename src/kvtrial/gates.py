"""Which blocks are valid: judged from the probes and the registered limits, never from results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

#: probe metric -> (gate in the protocol, word for the reason, the better of two readings)
DRIFTS = {
    "probe/read_gb_per_s": ("bandwidth_drift", "read bandwidth", "max"),
    "probe/spin_ms": ("spin_drift", "spin time", "min"),
}


def cell_name(cell: Any) -> str:
    """``4096x1x1``: context, sessions, threads. Takes anything with those keys."""
    return f"{cell['context']}x{cell['sessions']}x{cell['threads']}"


@dataclass(frozen=True)
class Judged:
    """``valid_rows``: rows of valid blocks. ``broken``: cell → reason. ``summary``: for the verdict."""

    valid_rows: pd.DataFrame
    broken: dict[str, str]
    summary: dict[str, Any]

    def void_rate(self, stage: str, cell: str) -> float:
        """Share of the blocks run in a cell that were void; 0 where none was run."""
        count = self.summary.get(stage, {}).get(cell, {"valid": 0, "void": 0})
        return count["void"] / max(1, count["valid"] + count["void"])


def void_reason(block_rows: pd.DataFrame, limits: dict[str, Any]) -> str | None:
    """Why a block is void, or None. ``block_rows``: the rows of one trial of one block.

    Between two arms the machine is probed twice, after the one and before the next, moments apart:
    the better of the two is the reading there, so that a probe which was itself interrupted does
    not void a block. The move is that of the largest reading over the smallest.
    """
    for metric, (gate, word, better) in DRIFTS.items():
        rows = block_rows[block_rows["metric"] == metric]
        if rows.empty or rows["value"].isna().any() or (rows["value"] <= 0).any():
            return f"no usable {word} probe"
        readings = rows["value"].groupby(rows["place"] + rows["index"]).agg(better)
        drift = float(readings.max() / readings.min() - 1.0)
        if drift > limits[gate]:
            return f"{word} moved by {drift:.1%}; at most {limits[gate]:.0%} is allowed"
    steal = block_rows.loc[block_rows["metric"] == "probe/steal_fraction", "value"].dropna()
    if len(steal) and float(steal.max()) > limits["steal_fraction"]:
        return (
            f"steal time was {steal.max():.1%}; at most {limits['steal_fraction']:.0%} is allowed"
        )
    return None


def judge(events: pd.DataFrame, protocol: dict[str, Any]) -> Judged:
    """Keep each block's first valid trial, and name the cells where the cap was reached."""
    limits = protocol["gates"]
    rows = events[events["stage"].isin(["m1", "m2"])]
    valid: list[pd.DataFrame] = []
    broken: dict[str, str] = {}
    summary: dict[str, Any] = {}
    keys = ["stage", "context", "sessions", "threads", "block"]
    for (stage, context, sessions, threads, block), own in rows[rows["block"] >= 0].groupby(keys):
        name = cell_name({"context": context, "sessions": sessions, "threads": threads})
        count = summary.setdefault(str(stage), {}).setdefault(name, {"valid": 0, "void": 0})
        reason = None
        for _, trial in own.groupby("trial"):
            reason = void_reason(trial, limits)
            if reason is None:
                count["valid"] += 1
                valid.append(trial)
                break
            count["void"] += 1
        if reason is not None and stage == "m2":
            broken[name] = f"block {block} is void: {reason}"
    return Judged(pd.concat(valid, ignore_index=True) if valid else rows.iloc[0:0], broken, summary)
