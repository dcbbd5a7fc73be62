"""Known answers: ratios that the method has to find, measured as any other.

One candidate is registered twice as it is, so that the ratio is 1 (A/A), and once with a planted slowness, so
that the ratio is known and not 1. An interval at the run's own confidence misses one in twenty times by chance;
only one at 99.9% that misses says that the method is at fault, and voids the verdict. So does a known answer
that was not measured as registered: nothing says then that the method finds one.
"""

from __future__ import annotations

import math
from typing import Any

from kvtrial.decision import stats
from kvtrial.decision.contrasts import interval_of
from kvtrial.decision.validity import Judged
from kvtrial.measure import figures
from kvtrial.measure.aliases import FIRST, PLANTED, SECOND
from kvtrial.measure.plan import SamplingPlan
from kvtrial.registration import Protocol

#: At which a missed truth voids the method.
CERTAIN = 0.999


def of_run(trials: Judged, protocol: Protocol) -> dict[str, Any]:
    """What verdict.json says under ``known_answers``.

    Returns
    -------
    dict
        ``candidate``, ``tests``: for each the arms, the ``truth``, ``ratio``, ``ci95``, ``n_blocks``, whether the
        interval ``covers`` the truth and whether it does at `CERTAIN`; and ``fault``, None or a reason in words.
    """
    rules = protocol["known_answers"]
    rows = trials.valid_rows[trials.valid_rows["stage"] == "aa"]
    blocks = list(figures.blocks(rows).values())
    plan = SamplingPlan.fixed(protocol, rules["blocks"])
    truths = ((FIRST, SECOND, 1.0), (FIRST, PLANTED, 1.0 + rules["planted"]))
    slack = protocol["decision"]["relative_slack"]
    tests = [_test(blocks, plan, slack, *one) for one in truths]
    faults = (_fault(test, rules["candidate"]) for test in tests)
    return {
        "candidate": rules["candidate"],
        "tests": tests,
        "fault": next((fault for fault in faults if fault is not None), None),
    }


def _fault(test: dict[str, Any], candidate: str) -> str | None:
    named = f"{candidate} {test['top']} over {test['bottom']} is {test['truth']:.2f}"
    if test["covers_certainly"] is None:
        return f"a known answer is not shown: {named}; {test['problem']}"
    if test["covers_certainly"]:
        return None
    low, high = (math.inf if bound is None else bound for bound in test["ci_certain"])
    return f"a known answer was missed: {named}, and its 99.9% interval is {low:.3f} to {high:.3f}"


def _test(
    blocks: list[figures.Block],
    plan: SamplingPlan,
    slack: float,
    top: str,
    bottom: str,
    truth: float,
) -> dict[str, Any]:
    named = {"top": top, "bottom": bottom, "truth": truth}
    own = figures.log_speeds(blocks, top, bottom)
    try:
        logs = stats.check(own, plan.first)
    except stats.Unusable as problem:
        nothing = dict.fromkeys(("ratio", "ci95", "ci_certain", "covers", "covers_certainly"))
        return {**named, **nothing, "n_blocks": len(own), "problem": str(problem)}

    def covers(confidence: float | None = None) -> bool:
        _, low, high = (float(x) for x in plan.bounds(logs, confidence))
        return low - slack <= math.log(truth) <= high + slack

    return {
        **named,
        **interval_of(logs, plan),
        "ci_certain": interval_of(logs, plan, CERTAIN)["ci95"],
        "covers": covers(),
        "covers_certainly": covers(CERTAIN),
    }
