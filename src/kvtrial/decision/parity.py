"""Greedy parity with the frozen baseline, judged from events alone.

The baseline (K0) picks the steps that count: on each prompt those before its own top-2 margin first
falls under twice the tolerance that the candidate's profile declares. There a candidate must give K0's
tokens, and every logit must stay within the tolerance while the two share a prefix. A first difference
where K0's margin is below that limit is a tie: listed, not held against the candidate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kvtrial.decision.contrasts import digits


def judge(events: pd.DataFrame, protocol: dict[str, Any]) -> dict[str, Any]:
    """What verdict.json says under ``parity``."""
    rules = protocol["parity"]
    rows = events[events["stage"] == "fp16_parity"]
    baseline = rules["baseline"]
    result: dict[str, Any] = {"baseline": baseline, "candidates": {}}
    base = _tables(rows, baseline)
    if base is None:
        result["problem"] = f"no tokens of {baseline}; parity is not shown"
    profiles = events[(events["stage"] == "run") & (events["metric"] == "candidate/profile")]
    profile_of = dict(zip(profiles["candidate"], profiles["text"]))
    for name in protocol["candidates"]:
        if name == baseline or name not in profile_of:
            continue
        tolerance = rules["logits_tolerance"][profile_of[name]]
        own = _tables(rows, name)
        if base is None or own is None:
            result["candidates"][name] = {"reasons": ["parity: not shown"]}
            continue
        result["candidates"][name] = _compare(base, own, tolerance, rules["min_steps"])
    return result


#: metric → prompt → step → value
_Tables = dict[str, dict[int, dict[int, float]]]


def _tables(rows: pd.DataFrame, name: str) -> _Tables | None:
    """The candidate's parity rows; None when it has no tokens."""
    own = rows[(rows["candidate"] == name) & rows["metric"].str.startswith("parity/")]
    tables: _Tables = {}
    for metric, prompt, step, value in zip(own["metric"], own["block"], own["index"], own["value"]):
        tables.setdefault(str(metric), {}).setdefault(int(prompt), {})[int(step)] = float(value)
    return tables if "parity/token" in tables else None


def _values(tables: _Tables, metric: str) -> list[float]:
    return [v for steps in tables.get(metric, {}).values() for v in steps.values()]


def _compare(base: _Tables, own: _Tables, tolerance: float, min_steps: int) -> dict[str, Any]:
    counted = 0
    whole_prompts = 0
    ties: list[str] = []
    mismatches: list[str] = []
    for prompt, tokens in sorted(base["parity/token"].items()):
        margins = base["parity/margin"][prompt]
        # `not >=` rather than `<`: a NaN margin counts as small.
        small = [s for s in tokens if not margins[s] >= 2 * tolerance]
        counted += sum(not small or s < min(small) for s in tokens)
        whole_prompts += not small
        theirs = own["parity/token"].get(prompt)
        if theirs is None:
            mismatches.append(f"prompt {prompt}: not run")
            continue
        for step, expected in sorted(tokens.items()):
            got = theirs.get(step, float("nan"))
            if got == expected:
                continue
            where = (
                f"prompt {prompt} step {step}: token {got:.0f} for {expected:.0f}, "
                f"margin {margins[step]:.4g}"
            )
            (ties if margins[step] < 2 * tolerance else mismatches).append(where)
            break  # past the first difference the two decode different texts
    # np.max rather than max: a NaN among them stays.
    largest = float(np.max(_values(own, "parity/max_abs_logit_difference") or [np.nan]))
    reasons = [f"parity: {m}" for m in mismatches]
    if not largest <= tolerance:
        reasons.append(
            f"parity: a logit differs by {largest:.4g}; declared tolerance {tolerance:g}"
        )
    if counted < min_steps:
        reasons.append(f"parity: {counted} steps count; at least {min_steps} are needed")
    summary: dict[str, Any] = {
        "tolerance": tolerance,
        "counted_steps": counted,
        "whole_prompts": whole_prompts,
        "ties": ties,
        "mismatches": mismatches,
        "max_abs_logit_difference": digits(largest),
        "reasons": reasons,
    }
    for metric, key in (("parity/kld", "mean_kld"), ("parity/top1_agrees", "top1_agreement")):
        values = _values(own, metric)
        if values:
            summary[key] = digits(sum(values) / len(values))
    return summary
