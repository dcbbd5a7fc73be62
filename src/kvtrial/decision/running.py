"""What to run: the FP32 arm, or a reduced profile whose quality is shown and that is faster."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvtrial.decision import rule, stats
from kvtrial.decision.contrasts import Layouts, Measured, digits, interval_of
from kvtrial.decision.eligibility import Reasons
from kvtrial.decision.language import Answer
from kvtrial.registration import Protocol

_GIB = 2**30


def decide(
    measured: Measured,
    reasons: Reasons,
    quality: dict[str, Any],
    language: Answer,
    layouts: Layouts,
    profile_of: dict[str, str],
    protocol: Protocol,
    open_because: str | None,
) -> dict[str, Any]:
    """What verdict.json says under ``run``.

    Asked whatever the language's outcome. Each profile is compared with the FP32 arm that the language's answer
    leaves (the registered reference where that is open), at a confidence that allows for their number.

    Returns
    -------
    dict
        ``store`` (None where nothing can be decided) and its ``profile``, ``fp32_store``, ``reason``,
        ``confidence``, and ``profiles``: one row for the FP32 arm and each registered profile.
    """
    decision = protocol["decision"]
    names = decision["profiles"]
    confidence = 1 - (1 - decision["confidence"]) / max(1, len(names))
    fp32: str = language.adopted or decision["reference"]
    base = {"confidence": digits(confidence), "fp32_store": fp32}
    rows, unknown = {}, []
    for name in [fp32, *names]:
        rows[name], problem = _row(
            name, fp32, measured, reasons, quality, layouts, profile_of, protocol, confidence
        )
        unknown += [problem] if problem is not None else []
    if open_because is None and (doubts := reasons.doubts(fp32)):
        open_because = f"{fp32} is in doubt: {'; '.join(map(str, doubts))}"
    if open_because is None and unknown:
        open_because = "; ".join(unknown)
    if open_because is not None:
        return {
            **base,
            "store": None,
            "profile": None,
            "reason": open_because,
            "profiles": list(rows.values()),
        }
    passing = {name: row for name, row in rows.items() if row["passes"]}
    chosen = _fewest_bytes(passing, measured, protocol, confidence) if passing else fp32
    rows[chosen]["chosen"] = True
    return {
        **base,
        "store": chosen,
        "profile": profile_of.get(chosen, "fp32"),
        "reason": _said(chosen, fp32, rows, names),
        "profiles": list(rows.values()),
    }


def _row(
    name: str,
    fp32: str,
    measured: Measured,
    reasons: Reasons,
    quality: dict[str, Any],
    layouts: Layouts,
    profile_of: dict[str, str],
    protocol: Protocol,
    confidence: float,
) -> tuple[dict[str, Any], str | None]:
    """A line of the profile table: speed, bytes, quality, and why it is not what to run.

    And why it is not known whether it is, where speed alone is what is missing.
    """
    decision = protocol["decision"]
    cells = rule.judged_cells(protocol)
    arms = {cell["context"]: measured.arm(cell, name) or {} for cell in cells}
    row_bytes = arms[cells[0]["context"]].get("row_bytes")
    evidence = quality.get(
        name, {"shown": False, "reasons": ["quality: no evidence"], "contexts": []}
    )
    row: dict[str, Any] = {
        "candidate": name,
        "profile": profile_of.get(name, "fp32"),
        "layouts_differ": name != fp32 and layouts.differ(name, fp32),
        "tokens_per_s": {str(c): arm.get("tokens_per_s") for c, arm in sorted(arms.items())},
        "bytes_per_token": row_bytes,
        "tokens_per_gib": int(_GIB // row_bytes) if row_bytes else None,
        "quality": evidence["contexts"] if name != fp32 else [],
        "against_fp32": None,
        "passes": False,
        "chosen": False,
        "why_not": [],
    }
    if name == fp32:
        try:
            for cell in cells:
                measured.logs(cell, name, name)
        except stats.Unusable as problem:
            return row, str(problem)
        return row, None
    why = [str(reason) for reason in reasons[name]]
    if not evidence["shown"]:
        why += evidence["reasons"] or ["quality: not shown"]
    try:
        bounds, shown = [], {}
        for cell in cells:
            logs = measured.logs(cell, name, fp32)
            plan = measured.plan(cell)
            bounds.append((cell["role"], plan.bounds(logs[None, :], confidence)))
            shown[str(cell["context"])] = interval_of(logs, plan, confidence)
    except stats.Unusable as problem:
        return {**row, "why_not": [*why, f"speed: {problem}"]}, None if why else str(problem)
    row["against_fp32"] = shown
    for cell, (role, own) in zip(cells, bounds):
        if bool(rule.passes(role, own, decision, "run_lower_bound").all()):
            continue
        ratio, low = math.exp(float(own.mean[0])), math.exp(float(own.low[0]))
        needed = (
            f"an interval that begins at {1 + decision['run_lower_bound']:.2f} is needed"
            if role == "primary"
            else f"at most {decision['veto_regression']:.0%} slower is allowed"
        )
        why.append(f"speed: {ratio:.3f}x {fp32} at {cell['context']} (from {low:.3f}); {needed}")
    return {**row, "why_not": why, "passes": not why}, None


def _fewest_bytes(
    passing: dict[str, dict[str, Any]],
    measured: Measured,
    protocol: Protocol,
    confidence: float,
) -> str:
    """Of those that are tied with the fastest, the one with the fewest bytes; then the first registered."""
    decision = protocol["decision"]
    primary = rule.judged_cells(protocol)[0]
    context = str(primary["context"])
    fastest = max(passing, key=lambda n: passing[n]["against_fp32"][context]["ratio"])
    limit = math.log1p(-decision["tied_within"]) - decision["relative_slack"]
    tied = [fastest]
    for name in passing:
        if name == fastest:
            continue
        try:
            logs = measured.logs(primary, name, fastest)
        except stats.Unusable:
            continue
        if float(measured.plan(primary).bounds(np.asarray(logs), confidence).low) >= limit:
            tied.append(name)
    order = {name: place for place, name in enumerate(decision["profiles"])}
    return min(tied, key=lambda n: (passing[n]["bytes_per_token"] or math.inf, order[n]))


def _said(chosen: str, fp32: str, rows: dict[str, dict[str, Any]], names: list[str]) -> str:
    if chosen == fp32:
        why = "; ".join(f"{n}: {rows[n]['why_not'][0]}" for n in names if rows[n]["why_not"])
        return f"{fp32} in FP32: no reduced profile passes" + (f" ({why})" if why else "")
    row = rows[chosen]
    context, shown = next(iter(row["against_fp32"].items()))
    low, high = shown["ci95"]
    ours, theirs = row["bytes_per_token"], rows[fp32]["bytes_per_token"]
    share = f" with {ours / theirs:.0%} of its bytes" if ours and theirs else ""
    return (
        f"{chosen} ({row['profile']}) decodes {shown['ratio']:.2f}x as fast as {fp32} at {context} positions "
        f"({low:.2f} to {high:.2f}){share}, and its quality is shown"
    )
