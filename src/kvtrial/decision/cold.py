"""Which cold store: Z1 or Z2 by restore latency at equal durability; RocksDB is the index either way."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvtrial.decision.break_even import restore_against_recompute
from kvtrial.decision.contrasts import contrast, digits
from kvtrial.measure.plan import SamplingPlan
from kvtrial.registration import Protocol

STORES = ("Z1", "Z2")


def decide(events: pd.DataFrame, protocol: Protocol, attempts: dict[str, Any]) -> dict[str, Any]:
    """What verdict.json says under ``cold``."""
    everything = events[events["stage"] == "cold_tier"]
    prefix = protocol["cold"]["prefix_tokens"]
    rows = everything[everything["context"].isin([0, prefix])]
    figures: dict[str, dict[str, Any]] = {}
    measured = rows[rows["metric"].str.startswith("cold/")]
    for (name, metric), own in measured.groupby(["candidate", "metric"]):
        numbers = own["value"].dropna()
        if len(numbers):
            key = str(metric).removeprefix("cold/")
            figures.setdefault(str(name), {})[key] = digits(float(numbers.median()))
    decide_by = protocol["cold"]["decide_by"]
    result: dict[str, Any] = {
        "index": "RocksDB",
        "decided_by": decide_by,
        "figures": figures,
        **restore_against_recompute(everything, prefix),
    }

    def inconclusive(reason: str) -> dict[str, Any]:
        return {**result, "adopted": None, "reason": reason}

    if not attempts.get("cold_tier", {}).get("complete"):
        return inconclusive("stage cold_tier has no complete attempt")
    for name in STORES:
        own = rows[rows["candidate"] == name]
        crash = own[own["metric"] == "cold/crash_recovered"]
        if crash.empty:
            return inconclusive(f"{name}: no crash evidence; equal durability is not shown")
        broken = sorted(set(crash[crash["value"] != 1]["text"]))
        if broken:
            return inconclusive(f"{name} broke a promise after: {', '.join(broken)}")
    fsyncs = {name: set(_of(rows, name, "fsyncs_per_batch")["value"]) for name in STORES}
    if not all(fsyncs.values()):
        return inconclusive("fsyncs per batch were not counted; equal durability is not shown")
    if fsyncs["Z1"] != fsyncs["Z2"]:
        return inconclusive(f"fsyncs per batch differ: Z1 {fsyncs['Z1']}, Z2 {fsyncs['Z2']}")
    times = {
        name: {
            int(block): float(own.median())
            for block, own in _of(rows, name, decide_by).groupby("block")["value"]
        }
        for name in STORES
    }
    plan = SamplingPlan.fixed(protocol, protocol["cold"]["blocks"])
    ratio = contrast(times["Z1"], times["Z2"], plan)
    result["z1_over_z2"] = ratio.as_json()
    if ratio.problem is not None:
        return inconclusive(f"restore latency: {ratio.problem}")
    if ratio.n_blocks < plan.first:
        return inconclusive(f"{ratio.n_blocks} blocks; {plan.first} are registered")
    times_as_long, low, high = ratio.said()
    adopted = "Z2" if times_as_long >= 1 else "Z1"
    said = (
        f"Z1 takes {times_as_long:.2f} times Z2's time to restore {prefix:,} tokens, at equal durability "
        f"({low:.2f} to {high:.2f}, {ratio.n_blocks} blocks)"
    )
    if low <= 1 <= high:
        said += "; the interval includes 1, so this is close to a tie"
    return {**result, "adopted": adopted, "reason": said}


def _of(rows: pd.DataFrame, name: str, metric: str) -> pd.DataFrame:
    return rows[(rows["candidate"] == name) & (rows["metric"] == f"cold/{metric}")]
