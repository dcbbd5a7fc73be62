"""Which language: does a challenger replace the incumbents? And which of those stays.

The registration says who is which; as it comes, Rust challenges Cython.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from kvtrial.decision import labels, rule, stats
from kvtrial.decision.contrasts import Contrast, Layouts, Measured, interval_of
from kvtrial.decision.eligibility import Reasons
from kvtrial.measure.plan import Bounds
from kvtrial.registration import Cell, Decision, Protocol


class Outcome(enum.StrEnum):
    """What is answered; verdict.json holds the value."""

    ADOPT = "ADOPT"
    KEEP = "KEEP"
    INCONCLUSIVE = "INCONCLUSIVE"


ADOPT, KEEP, INCONCLUSIVE = Outcome


class Kept(enum.StrEnum):
    """Kinds of KEEP: what is known of the gain that would adopt."""

    RULED_OUT = "ruled out"
    NOT_SHOWN = "not shown"


RULED_OUT, NOT_SHOWN = Kept


@dataclass(frozen=True)
class Against:
    """The challenger's contrast with one incumbent in the primary cell."""

    incumbent: str
    layouts_differ: bool
    contrast: Contrast

    def as_json(self) -> dict[str, Any]:
        """What verdict.json holds."""
        return {
            "incumbent": self.incumbent,
            "layouts_differ": self.layouts_differ,
            **self.contrast.as_json(),
        }


@dataclass(frozen=True)
class Answer:
    """What verdict.json says under ``language``.

    Attributes
    ----------
    outcome : Outcome
    kind : Kept or None
        Of a KEEP for which a challenger was tested.
    adopted : str or None
        The FP32 store to run.
    reference : str or None
        The best eligible incumbent: the reference path.
    retired : tuple of str
        Not to be loaded as a runtime store any more.
    challenger : str or None
        The one that was tested.
    against : tuple of Against
        Its contrasts, one with every incumbent.
    equal : bool
        Challenger and reference are equal within the registered regression, by the whole interval.
    more_blocks : int or None
        Where it is not shown: about how many more blocks of the primary cell would tell.
    """

    outcome: Outcome
    reason: str
    kind: Kept | None = None
    adopted: str | None = None
    reference: str | None = None
    retired: tuple[str, ...] = ()
    challenger: str | None = None
    against: tuple[Against, ...] = ()
    equal: bool = False
    more_blocks: int | None = None

    def as_json(self) -> dict[str, Any]:
        """What verdict.json holds."""
        return {
            **vars(self),
            "retired": list(self.retired),
            "against": [one.as_json() for one in self.against],
        }


def decide(
    measured: Measured,
    reasons: Reasons,
    layouts: Layouts,
    protocol: Protocol,
    open_because: str | None,
) -> Answer:
    """The answer.

    Parameters
    ----------
    open_because : str or None
        Why nothing can be decided at all: stages, cells or known answers that are not as registered.
    """
    if open_because is not None:
        return Answer(INCONCLUSIVE, open_because)
    decision = protocol["decision"]
    incumbents = reasons.to_beat(decision["incumbents"])
    for name in incumbents:
        if doubts := reasons.doubts(name):
            return Answer(
                INCONCLUSIVE,
                f"{name}, which a challenger has to beat, is in doubt: {'; '.join(map(str, doubts))}",
            )
    try:
        stays = staying(measured, reasons, protocol)
    except stats.Unusable as problem:
        return Answer(INCONCLUSIVE, str(problem))
    if stays is None:
        return Answer(INCONCLUSIVE, "no FP32 incumbent is eligible to run")
    skipped = takewhile(lambda n: not reasons.eligible(n), decision["challengers"])
    said = [f"{name} is out ({'; '.join(map(str, reasons[name]))})" for name in skipped]
    kept = Answer(
        KEEP,
        "",
        adopted=stays,
        reference=stays,
        retired=tuple(n for n in decision["challengers"] if n in protocol["candidates"]),
    )
    challenger = reasons.first_eligible(decision["challengers"])
    if challenger is None:
        said.append(f"No challenger can win. {stays} stays")
        return replace(kept, reason=". ".join(said))
    try:
        tested = _test(challenger, incumbents, stays, measured, layouts, protocol)
    except stats.Unusable as problem:
        return Answer(INCONCLUSIVE, ". ".join([*said, str(problem)]), challenger=challenger)
    said.append(tested.reason)
    if tested.outcome == ADOPT:
        baseline = protocol["parity"]["baseline"]
        return replace(tested, reason=". ".join(said), reference=stays, retired=(baseline,))
    untested = decision["challengers"][decision["challengers"].index(challenger) + 1 :]
    if untested:
        said.append(
            f"{' and '.join(untested)} {'was' if len(untested) == 1 else 'were'} not tested: only the first "
            f"available challenger is, and that was {challenger}"
        )
    said.append(f"{stays} stays")
    return replace(
        tested,
        reason=". ".join(said),
        adopted=stays,
        reference=stays,
        retired=kept.retired,
    )


def staying(measured: Measured, reasons: Reasons, protocol: Protocol) -> str | None:
    """Which FP32 incumbent stays: the registered reference, unless another one is better by its interval.

    Another one has to be better than the reference in the primary cell by an interval that excludes 1, and to
    pass the vetoes: an answer by point estimates would flip with the noise. Where the reference can't stay, the
    first registered one that can is in its place.

    Raises
    ------
    kvtrial.decision.stats.Unusable
        A pair has too few blocks, or a time that means nothing.
    """
    decision = protocol["decision"]
    can_stay = [name for name in decision["incumbents"] if reasons.eligible(name)]
    if not can_stay:
        return None
    reference = decision["reference"] if decision["reference"] in can_stay else can_stay[0]
    better = {}
    for name in can_stay:
        if name == reference:
            continue
        cells = _bounds(name, [reference], measured, protocol)
        (_, primary), *vetoes = cells
        vetoed = [not rule.passes(role, own, decision).all() for role, own in vetoes]
        if primary.low[0] > decision["relative_slack"] and not any(vetoed):
            better[name] = float(primary.mean[0])
    return max(better, key=lambda n: better[n]) if better else reference


def _bounds(
    name: str, others: list[str], measured: Measured, protocol: Protocol
) -> list[tuple[str, Bounds]]:
    """Role and bounds over ``others`` of every judged cell."""
    found: list[tuple[str, Bounds]] = []
    for cell in rule.judged_cells(protocol):
        logs = np.stack([measured.logs(cell, name, other) for other in others])
        found.append((cell["role"], measured.plan(cell).bounds(logs)))
    return found


def _test(
    challenger: str,
    incumbents: list[str],
    stays: str,
    measured: Measured,
    layouts: Layouts,
    protocol: Protocol,
) -> Answer:
    """ADOPT or KEEP for one challenger, with what it rests on."""
    decision = protocol["decision"]
    cells = rule.judged_cells(protocol)
    bounds = _bounds(challenger, incumbents, measured, protocol)
    (_, primary), *vetoes = bounds
    plan = measured.plan(cells[0])
    logs = {name: measured.logs(cells[0], challenger, name) for name in incumbents}
    against = tuple(
        Against(name, layouts.differ(challenger, name), interval_of(own, plan))
        for name, own in logs.items()
    )
    tested = Answer(KEEP, "", challenger=challenger, against=against)
    edge = math.log1p(decision["adopt_lower_bound"])
    reached = edge - decision["relative_slack"]
    at_least = f"{1 + decision['adopt_lower_bound']:.2f}"
    allowed = f"{decision['veto_regression']:.0%}"
    veto_said = [
        f"at {cell['context']} it is {math.exp(own.mean[i]):.3f}x {name}"
        for cell, (role, own) in zip(cells[1:], vetoes)
        for i, name in enumerate(incumbents)
        if not rule.passes(role, own, decision)[i]
    ]
    if bool(rule.adopts(bounds, decision)):
        unclear = [
            f"at {cell['context']} the interval over {name} begins at {math.exp(own.low[i]):.3f}"
            for cell, (_, own) in zip(cells[1:], vetoes)
            for i, name in enumerate(incumbents)
            if own.low[i] < rule.worst_allowed(decision)
        ]
        reason = (
            f"{challenger} is faster than every FP32 incumbent ({', '.join(incumbents)}) by an interval "
            f"that begins at {at_least} or more at {cells[0]['context']}, and no other context is worse by "
            f"more than {allowed}"
        )
        return replace(
            tested, outcome=ADOPT, adopted=challenger, reason="; ".join([reason, *unclear])
        )
    worst = int(primary.low.argmin())
    name = incumbents[worst]
    note = labels.LAYOUTS_DIFFER if layouts.differ(challenger, name) else ""
    ratio, low, high = against[worst].contrast.said()
    said = [
        f"{challenger} runs at {ratio:.3f}x the speed of {name}{note} at {cells[0]['context']} "
        f"positions (95% interval {low:.3f} to {high:.3f}, {len(logs[name])} blocks)"
    ]
    out = [n for i, n in enumerate(incumbents) if primary.high[i] < reached]
    if out or veto_said:
        kind, more = RULED_OUT, None
        if out:
            over = "" if name in out else f" over {', '.join(out)}"
            said.append(f"a gain of {decision['adopt_lower_bound']:.0%}{over} is ruled out")
        if veto_said:
            said.append(f"it is worse by more than {allowed} elsewhere: {', '.join(veto_said)}")
    else:
        kind = NOT_SHOWN
        needs = [n for i, n in enumerate(incumbents) if primary.low[i] < reached]
        counts = [plan.more_blocks(logs[n], edge) for n in needs]
        known = [count for count in counts if count is not None]
        more = max(known) if len(known) == len(counts) else None
        said.append(
            f"whether it gains {decision['adopt_lower_bound']:.0%} is not shown: "
            + (f"about {more} more blocks would tell" if more else "it lies on the edge")
        )
    equal = _equal(measured, cells[0], challenger, stays, decision)
    if equal:
        said.append(f"{challenger} and {stays} are equal within {allowed}, by the whole interval")
    return replace(tested, kind=kind, more_blocks=more, equal=equal, reason="; ".join(said))


def _equal(measured: Measured, cell: Cell, challenger: str, stays: str, decision: Decision) -> bool:
    own = measured.plan(cell).bounds(measured.logs(cell, challenger, stays))
    within = math.log1p(decision["veto_regression"]) + decision["relative_slack"]
    return bool(own.low >= rule.worst_allowed(decision) and own.high <= within)
