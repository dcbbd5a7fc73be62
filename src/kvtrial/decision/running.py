"""What to run: the FP32 arm, or a reduced profile whose quality is shown and that is faster."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtrial.decision import rule, stats
from kvtrial.decision.contrasts import Contrast, Layouts, Measured, digits, interval_of
from kvtrial.decision.eligibility import Reasons
from kvtrial.decision.language import Answer as LanguageAnswer
from kvtrial.registration import Protocol

_GIB = 2**30


@dataclass(frozen=True)
class ProfileRow:
    """A line of the profile table: the FP32 arm, or what is stored otherwise.

    Attributes
    ----------
    tokens_per_s : dict
        By context, None where it was not measured.
    bytes_per_token, tokens_per_gib : number or None
        Of one layer's K and V rows, and how many of those a GiB holds.
    quality : list of dict
        The evidence by context; none for the FP32 arm.
    against_fp32 : dict of Contrast or None
        By context; None for the FP32 arm, and where there is no interval.
    passes, chosen : bool
    why_not : tuple of str
        Why it is not what to run.
    """

    candidate: str
    profile: str
    layouts_differ: bool
    tokens_per_s: dict[str, float | None]
    bytes_per_token: float | None
    tokens_per_gib: int | None
    quality: list[dict[str, Any]]
    against_fp32: dict[str, Contrast] | None = None
    passes: bool = False
    chosen: bool = False
    why_not: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """What verdict.json holds."""
        against = self.against_fp32
        return {
            **vars(self),
            "against_fp32": against and {c: shown.as_json() for c, shown in against.items()},
            "why_not": list(self.why_not),
        }


@dataclass(frozen=True)
class Answer:
    """What verdict.json says under ``run``; ``store`` is None where nothing can be decided."""

    confidence: float | None
    fp32_store: str
    store: str | None
    profile: str | None
    reason: str
    profiles: tuple[ProfileRow, ...]

    def as_json(self) -> dict[str, Any]:
        """What verdict.json holds."""
        return {**vars(self), "profiles": [row.as_json() for row in self.profiles]}


def decide(
    measured: Measured,
    reasons: Reasons,
    quality: dict[str, Any],
    language: LanguageAnswer,
    layouts: Layouts,
    profile_of: dict[str, str],
    protocol: Protocol,
    open_because: str | None,
) -> Answer:
    """The answer: one row for the FP32 arm and each registered profile.

    Asked whatever the language's outcome. Each profile is compared with the FP32 arm that the language's answer
    leaves (the registered reference where that is open), at a confidence that allows for their number.
    """
    decision = protocol["decision"]
    names = decision["profiles"]
    confidence = 1 - (1 - decision["confidence"]) / max(1, len(names))
    fp32: str = language.adopted or decision["reference"]
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
        return Answer(digits(confidence), fp32, None, None, open_because, tuple(rows.values()))
    passing = {name: row for name, row in rows.items() if row.passes}
    chosen = _fewest_bytes(passing, measured, protocol, confidence) if passing else fp32
    rows[chosen] = replace(rows[chosen], chosen=True)
    return Answer(
        confidence=digits(confidence),
        fp32_store=fp32,
        store=chosen,
        profile=profile_of.get(chosen, "fp32"),
        reason=_said(chosen, fp32, rows, names),
        profiles=tuple(rows.values()),
    )


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
) -> tuple[ProfileRow, str | None]:
    """A line of the profile table.

    And why it is not known whether it is, where speed alone is what is missing.
    """
    decision = protocol["decision"]
    cells = rule.judged_cells(protocol)
    arms = {cell["context"]: measured.arm(cell, name) or {} for cell in cells}
    row_bytes = arms[cells[0]["context"]].get("row_bytes")
    evidence = quality.get(
        name, {"shown": False, "reasons": ["quality: no evidence"], "contexts": []}
    )
    row = ProfileRow(
        candidate=name,
        profile=profile_of.get(name, "fp32"),
        layouts_differ=name != fp32 and layouts.differ(name, fp32),
        tokens_per_s={str(c): arm.get("tokens_per_s") for c, arm in sorted(arms.items())},
        bytes_per_token=row_bytes,
        tokens_per_gib=int(_GIB // row_bytes) if row_bytes else None,
        quality=evidence["contexts"] if name != fp32 else [],
    )
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
        slow = f"speed: {problem}"
        return replace(row, why_not=(*why, slow)), None if why else str(problem)
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
    return replace(row, against_fp32=shown, why_not=tuple(why), passes=not why), None


def _fewest_bytes(
    passing: dict[str, ProfileRow],
    measured: Measured,
    protocol: Protocol,
    confidence: float,
) -> str:
    """Of those that are tied with the fastest, the one with the fewest bytes; then the first registered."""
    decision = protocol["decision"]
    primary = rule.judged_cells(protocol)[0]
    context = str(primary["context"])
    fastest = max(passing, key=lambda n: (passing[n].against_fp32 or {})[context].said()[0])
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
    return min(tied, key=lambda n: (passing[n].bytes_per_token or math.inf, order[n]))


def _said(chosen: str, fp32: str, rows: dict[str, ProfileRow], names: list[str]) -> str:
    if chosen == fp32:
        causes: dict[str, list[str]] = {}
        for name in names:
            for why in rows[name].why_not[:1]:
                causes.setdefault(why.partition(":")[0], []).append(name)
        said = "; ".join(f"{cause}: {', '.join(failed)}" for cause, failed in causes.items())
        return f"{fp32} in FP32: no reduced profile passes" + (f" ({said})" if said else "")
    row = rows[chosen]
    context, shown = next(iter((row.against_fp32 or {}).items()))
    ratio, low, high = shown.said()
    ours, theirs = row.bytes_per_token, rows[fp32].bytes_per_token
    share = f" with {ours / theirs:.0%} of its bytes" if ours and theirs else ""
    return (
        f"{chosen} ({row.profile}) decodes {ratio:.2f}x as fast as {fp32} at {context} positions "
        f"({low:.2f} to {high:.2f}){share}, and its quality is shown"
    )
