"""Known answers: ratios that the method has to find, measured as any other.

One candidate is registered twice as it is, so that the ratio is 1 (A/A), and once with a planted slowness, so
that the ratio is known and not 1. An interval at the run's own confidence misses one in twenty times by chance;
only one at 99.9% that misses says that the method is at fault, and voids the verdict.
"""

from __future__ import annotations

from typing import Any

from kvtrial.decision import stats
from kvtrial.decision.contrasts import interval_of
from kvtrial.decision.validity import Judged
from kvtrial.measure import figures
from kvtrial.measure.aliases import FIRST, PLANTED, SECOND
from kvtrial.measure.plan import SamplingPlan

#: At which a missed truth voids the method.
CERTAIN = 0.999


def of_run(trials: Judged, protocol: dict[str, Any]) -> dict[str, Any]:
    """What verdict.json says under ``known_answers``.

    Returns
    -------
    dict
        ``candidate``, ``tests``: for each the arms, the ``truth``, ``ratio``, ``ci95``, ``n_blocks``, whether the
        interval ``covers`` the truth and whether it does at `CERTAIN`; and ``fault``, None or a reason in words.
    """
    rules = protocol["known_answers"]
    rows = trials.valid_rows[trials.valid_rows["stage"] == "aa"]
    blocks = [figures.Block(own) for _, own in sorted(figures.steps(rows).items())]
    plan = SamplingPlan.fixed(protocol, rules["blocks"])
    truths = ((FIRST, SECOND, 1.0), (FIRST, PLANTED, 1.0 + rules["planted"]))
    tests = [_test(blocks, plan, top, bottom, truth) for top, bottom, truth in truths]
    missed = [test for test in tests if test["covers_certainly"] is False]
    fault = None
    if missed:
        worst = missed[0]
        low, high = worst["ci_certain"]
        fault = (
            f"a known answer was missed: {rules['candidate']} {worst['top']} over {worst['bottom']} is "
            f"{worst['truth']:.2f}, and its 99.9% interval is {low:.3f} to {high:.3f}"
        )
    return {"candidate": rules["candidate"], "tests": tests, "fault": fault}


def _test(
    blocks: list[figures.Block], plan: SamplingPlan, top: str, bottom: str, truth: float
) -> dict[str, Any]:
    named = {"top": top, "bottom": bottom, "truth": truth}
    own = [log for b in blocks if (log := b.log_speed(top, bottom)) is not None]
    try:
        logs = stats.check(own)
    except stats.Unusable as problem:
        nothing = dict.fromkeys(("ratio", "ci95", "ci_certain", "covers", "covers_certainly"))
        return {**named, **nothing, "n_blocks": len(own), "problem": str(problem)}
    usual, certain = interval_of(logs, plan), interval_of(logs, plan, CERTAIN)["ci95"]
    return {
        **named,
        **usual,
        "ci_certain": certain,
        "covers": _covers(usual["ci95"], truth),
        "covers_certainly": _covers(certain, truth),
    }


def _covers(interval: list[float], truth: float) -> bool:
    return interval[0] <= truth <= interval[1]
