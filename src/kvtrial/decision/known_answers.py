"""Known answers: ratios that the method has to find, measured as any other.

One candidate is registered twice as it is, so that the ratio is 1 (A/A), and once with a planted slowness, so
that the ratio is known and not 1. An interval at the run's own confidence misses one in twenty times by chance;
only one at 99.9% that misses says that the method is at fault, and voids the verdict. So does a known answer
that was not measured as registered: nothing says then that the method finds one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvtrial.decision import stats
from kvtrial.decision.contrasts import Contrast, interval_of
from kvtrial.decision.validity import Judged
from kvtrial.measure import figures
from kvtrial.measure.aliases import FIRST, PLANTED, SECOND
from kvtrial.measure.plan import SamplingPlan
from kvtrial.registration import Protocol

#: At which a missed truth voids the method.
CERTAIN = 0.999


@dataclass(frozen=True)
class Test:
    """One known answer.

    Attributes
    ----------
    truth : float
        The ratio top / bottom that was made.
    found : Contrast
        What was measured of it.
    ci_certain : (low, high) or None
        Its interval at `CERTAIN`.
    covers, covers_certainly : bool or None
        Whether the interval holds the truth, and that at `CERTAIN`; None where there is none.
    """

    top: str
    bottom: str
    truth: float
    found: Contrast
    ci_certain: tuple[float | None, float | None] | None = None
    covers: bool | None = None
    covers_certainly: bool | None = None

    def fault(self, candidate: str) -> str | None:
        """Why the method can't be relied upon, or None."""
        named = f"{candidate} {self.top} over {self.bottom} is {self.truth:.2f}"
        if self.ci_certain is None:
            return f"a known answer is not shown: {named}; {self.found.problem}"
        if self.covers_certainly:
            return None
        low, high = (math.inf if bound is None else bound for bound in self.ci_certain)
        return (
            f"a known answer was missed: {named}, and its 99.9% interval is {low:.3f} to {high:.3f}"
        )

    def as_json(self) -> dict[str, Any]:
        """What verdict.json holds."""
        return {
            "top": self.top,
            "bottom": self.bottom,
            "truth": self.truth,
            **self.found.as_json(),
            "ci_certain": None if self.ci_certain is None else list(self.ci_certain),
            "covers": self.covers,
            "covers_certainly": self.covers_certainly,
        }


@dataclass(frozen=True)
class KnownAnswers:
    """What verdict.json says under ``known_answers``; ``fault`` is None or a reason in words."""

    candidate: str
    tests: tuple[Test, ...]
    fault: str | None

    def as_json(self) -> dict[str, Any]:
        """What verdict.json holds."""
        return {**vars(self), "tests": [test.as_json() for test in self.tests]}


def of_run(trials: Judged, protocol: Protocol) -> KnownAnswers:
    """The known answers of a run."""
    rules = protocol["known_answers"]
    rows = trials.valid_rows[trials.valid_rows["stage"] == "aa"]
    blocks = list(figures.blocks(rows).values())
    plan = SamplingPlan.fixed(protocol, rules["blocks"])
    truths = ((FIRST, SECOND, 1.0), (FIRST, PLANTED, 1.0 + rules["planted"]))
    slack = protocol["decision"]["relative_slack"]
    tests = tuple(_test(blocks, plan, slack, *one) for one in truths)
    faults = (test.fault(rules["candidate"]) for test in tests)
    return KnownAnswers(
        rules["candidate"], tests, next((fault for fault in faults if fault is not None), None)
    )


def _test(
    blocks: list[figures.Block],
    plan: SamplingPlan,
    slack: float,
    top: str,
    bottom: str,
    truth: float,
) -> Test:
    own = figures.log_speeds(blocks, top, bottom)
    try:
        logs = stats.check(own, plan.first)
    except stats.Unusable as problem:
        return Test(top, bottom, truth, Contrast(None, None, len(own), str(problem)))

    def covers(confidence: float | None = None) -> bool:
        _, low, high = (float(x) for x in plan.bounds(logs, confidence))
        return low - slack <= math.log(truth) <= high + slack

    return Test(
        top,
        bottom,
        truth,
        interval_of(logs, plan),
        interval_of(logs, plan, CERTAIN).ci95,
        covers(),
        covers(CERTAIN),
    )
