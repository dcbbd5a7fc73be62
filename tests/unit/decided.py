"""Verdicts on step times made by hand, and the arithmetic that they are compared with."""

from __future__ import annotations

import math
from typing import Any

from scipy import stats as scipy_stats
from trial_events import (
    BLOCKS,
    REGISTERED,
    trial,
)

from kvtrial.decision.verdict import (
    Verdict,
    decide,
)

LACKS = {"K0": "branch, holes, pool"}
BASE = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 22.0, "K2": 15.0}


def run(step_ms: dict, **kw) -> Verdict:  # type: ignore[no-untyped-def,type-arg]
    return decide(trial(step_ms, missing=LACKS, **kw), REGISTERED)


def answer(verdict: Verdict) -> tuple[Any, ...]:
    found = verdict.data["language"]
    return found["outcome"], found["kind"], found["adopted"]


def longer(arms: dict[str, dict[int, list[float]]], blocks: int) -> Any:
    """The same, but so many blocks in the primary cell."""
    return {n: {**own, 4096: (own[4096] * blocks)[:blocks]} for n, own in arms.items()}


def up_and_down(ms: float, by: float, blocks: int = BLOCKS) -> list[float]:
    """Step times whose logs lie above and below by turns; their mean log is that of ``ms``."""
    return [ms * math.exp(by * (-1) ** block) for block in range(blocks)]


def spread(by: float, n: int) -> float:
    """The standard deviation of n values that lie ``by`` above and below their mean."""
    return by * math.sqrt(n / (n - 1))


def t(freedom: int, confidence: float = 0.95) -> float:
    return float(scipy_stats.t.ppf(0.5 + confidence / 2, freedom))
