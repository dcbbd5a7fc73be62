"""The hot tier's outcome: which store the runtime opens, and the reason in words."""

from __future__ import annotations

import math
from itertools import takewhile
from typing import Any

import numpy as np

from kvtrial.decision import eligibility, gates, labels, rule, stats
from kvtrial.decision.contrasts import Layouts, Measured, cell_key, contrast

ADOPT, KEEP, INCONCLUSIVE = "ADOPT", "KEEP", "INCONCLUSIVE"


def decide(
    measured: Measured,
    trials: gates.Judged,
    reasons: dict[str, list[str]],
    layouts: Layouts,
    protocol: dict[str, Any],
    mixed: str | None = None,
) -> dict[str, Any]:
    """What verdict.json says under ``hot``.

    Parameters
    ----------
    measured, trials
        From the rows of the run's valid blocks.
    reasons : dict
        Candidate → why it can't win.
    layouts : Layouts
        Which contrasts are of layouts too.
    protocol : dict
        The registered protocol.
    mixed : str, optional
        Why the events can't be one trial at all.
    """
    decision = protocol["decision"]
    cells = rule.judged_cells(protocol)
    result = {
        "contrasts": _contrasts(measured, layouts, protocol),
        "arms": [
            arm
            for cell in measured.cells
            for name in protocol["candidates"]
            if (arm := measured.arm(cell, name)) is not None
        ],
        "precision": _precision(measured, protocol),
    }

    def inconclusive(reason: str) -> dict[str, Any]:
        return {
            **result,
            "outcome": INCONCLUSIVE,
            "adopted": None,
            "reference": None,
            "retired": [],
            "reason": reason,
        }

    if mixed is not None:
        return inconclusive(mixed)
    for cell in cells:
        broken = trials.broken.get(gates.cell_name(cell))
        if broken:
            return inconclusive(f"gate broken at context {cell['context']}: {broken}")
    winners = [name for name in decision["incumbents"] if not reasons[name]]
    if not winners:
        listed = (f"{n} ({', '.join(reasons[n])})" for n in decision["incumbents"])
        return inconclusive("no eligible Cython FP32 arm: " + "; ".join(listed))
    rates: dict[str, float] = {}
    for name in winners:
        for cell in cells:
            blocks = measured.tokens_per_s(cell, name)
            if len(blocks) < decision["min_blocks"]:
                return inconclusive(
                    f"{name} has {len(blocks)} valid blocks at context {cell['context']}; "
                    f"{decision['min_blocks']} are needed"
                )
        rates[name] = float(np.mean(np.log(list(measured.tokens_per_s(cells[0], name).values()))))
        if not np.isfinite(rates[name]):
            return inconclusive(f"{name} has a time that is not a positive, finite number")
    best = max(winners, key=lambda n: rates[n])

    said = [
        f"{name} is out: {'; '.join(reasons[name])}"
        for name in takewhile(lambda n: reasons[n], decision["challengers"])
    ]
    challenger = rule.tested(decision["challengers"], reasons)
    if challenger is not None:
        comparators = eligibility.comparators(reasons, protocol)
        outcome, reason = _judge_challenger(challenger, comparators, measured, layouts, protocol)
        said.append(f"{challenger}: {reason}")
        if outcome == INCONCLUSIVE:
            return inconclusive(". ".join(said))
        if outcome == ADOPT:
            return {
                **result,
                "outcome": ADOPT,
                "adopted": challenger,
                "reference": "K1",
                "retired": [n for n in ("K0",) if n in protocol["candidates"]],
                "reason": ". ".join(said),
            }
        untested = decision["challengers"][decision["challengers"].index(challenger) + 1 :]
        if untested:
            said.append(
                f"{', '.join(untested)} not tested: the fixed sequence ends at {challenger}"
            )
    said.append(f"Cython stays, by its best arm {best}")
    return {
        **result,
        "outcome": KEEP,
        "adopted": best,
        "reference": best,
        "retired": [n for n in decision["challengers"] if n in protocol["candidates"]],
        "reason": ". ".join(said),
    }


def _contrasts(
    measured: Measured, layouts: Layouts, protocol: dict[str, Any]
) -> list[dict[str, Any]]:
    decision = protocol["decision"]
    return [
        {
            "challenger": challenger,
            "incumbent": incumbent,
            "layouts_differ": layouts.differ(challenger, incumbent),
            **cell_key(cell),
            **contrast(
                measured.tokens_per_s(cell, challenger),
                measured.tokens_per_s(cell, incumbent),
                protocol,
                cell["blocks"],
            ),
        }
        for challenger in [*decision["challengers"], *decision["profiles"]]
        for cell in measured.cells
        for incumbent in decision["incumbents"]
        if measured.tokens_per_s(cell, challenger) and measured.tokens_per_s(cell, incumbent)
    ]


def _precision(measured: Measured, protocol: dict[str, Any]) -> list[dict[str, Any]]:
    """How many blocks each cell with an open number asked for, and how many there are."""
    registered = protocol["decision"]["precision"]
    found = []
    for cell in measured.cells:
        if "max_blocks" not in cell:
            continue
        row = contrast(
            measured.tokens_per_s(cell, registered["to"]),
            measured.tokens_per_s(cell, registered["from"]),
            protocol,
            cell["blocks"],
        )
        half = None
        if row["ratio"] is not None:
            half = math.log(row["ci95"][1] / row["ci95"][0]) / 2
        found.append(
            {
                **cell_key(cell),
                **registered,
                "blocks": cell["blocks"],
                "max_blocks": cell["max_blocks"],
                "blocks_wanted": measured.blocks_wanted(cell),
                "n_blocks": row["n_blocks"],
                "half_width_seen": None if half is None else float(f"{half:.12g}"),
            }
        )
    return found


def _judge_challenger(
    challenger: str,
    comparators: list[str],
    measured: Measured,
    layouts: Layouts,
    protocol: dict[str, Any],
) -> tuple[str, str]:
    """ADOPT, KEEP or INCONCLUSIVE for one challenger, with the reason."""
    decision = protocol["decision"]
    cells = rule.judged_cells(protocol)
    try:
        logs = [measured.log_ratios(cell, challenger, comparators) for cell in cells]
    except stats.Unusable as problem:
        return INCONCLUSIVE, str(problem)
    judged = [rule.bounds(cell, own, decision) for cell, own in zip(cells, logs)]
    adopted = bool(rule.adopts(judged, decision))
    worst_allowed = f"{decision['veto_regression']:.0%}"
    at_least = f"{1 + decision['adopt_lower_bound']:.2f}"
    shortfalls: list[str] = []
    notes: list[str] = []
    for cell, (role, mean, low), own in zip(cells, judged, logs):
        passed = rule.passes(role, mean, low, decision)
        cleared = rule.passes(role, low, low, decision)
        for i, incumbent in enumerate(comparators):
            note = labels.LAYOUTS_DIFFER if layouts.differ(challenger, incumbent) else ""
            where = f"against {incumbent}{note} at {cell['context']}"
            ratio, bound = math.exp(mean[i]), math.exp(low[i])
            if role == "primary" and not passed[i]:
                shortfalls.append(
                    f"{where} the lower bound of its ratio is {bound:.4f} (estimate {ratio:.4f}, "
                    f"n = {own.shape[-1]}); at least {at_least} adopts"
                )
            elif not passed[i]:
                shortfalls.append(
                    f"vetoed {where}: ratio {ratio:.4f} is worse by more than {worst_allowed}"
                )
            elif not cleared[i]:
                notes.append(
                    f"passes the veto {where} with ratio {ratio:.4f}, whose interval from "
                    f"{bound:.4f} does not clear -{worst_allowed}"
                )
    if not adopted:
        return KEEP, shortfalls[0]
    reason = (
        f"the lower bound is at least {at_least} against every Cython FP32 arm "
        f"({', '.join(comparators)}), and no veto cell is worse by more than {worst_allowed}"
    )
    return ADOPT, "; ".join([reason, *notes])
