"""Known answers: A/A and the planted slowness; what a miss means, and what a missing one means."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from trial_events import REGISTERED, arm_rows, flat, trial, with_rows, without

from kvtrial.decision.verdict import ADOPT, INCONCLUSIVE, KEEP, Verdict, decide
from kvtrial.measure.plan import SamplingPlan

BASE = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K3=22.0)
RULES = REGISTERED["known_answers"]
N = RULES["blocks"]
#: Spread of eight that lie so far above and below: the standard error of their mean is by / sqrt(7).
SPREAD = 0.01
ERROR = SPREAD / math.sqrt(7)


def t(confidence: float) -> float:
    return float(scipy_stats.t.ppf(0.5 + confidence / 2, N - 1))


def around(ms: float) -> list[float]:
    return [ms * math.exp(SPREAD * (-1) ** block) for block in range(N)]


def run(**known: Sequence[float]) -> Verdict:
    return decide(trial(BASE, known=known), REGISTERED)


def answers(verdict: Verdict) -> dict[str, Any]:
    return {test["bottom"]: test for test in verdict.data["known_answers"]["tests"]}


def test_right_answers_stand_beside_the_verdict() -> None:
    verdict = run(first=[20.0] * N, second=around(20.0), planted=around(22.4))
    assert verdict.outcome == KEEP
    known = verdict.data["known_answers"]
    assert (known["candidate"], known["fault"]) == ("K1", None)
    for bottom, truth in (("second", 1.0), ("planted", 1.12)):
        own = answers(verdict)[bottom]
        assert (own["top"], own["truth"], own["n_blocks"]) == ("first", truth, N)
        assert own["ratio"] == pytest.approx(truth, rel=1e-9)
        for key, confidence in (("ci95", 0.95), ("ci_certain", 0.999)):
            half = t(confidence) * ERROR
            assert [math.log(b) for b in own[key]] == pytest.approx(
                [math.log(truth) - half, math.log(truth) + half], rel=1e-9
            )
        assert own["covers"] and own["covers_certainly"]


def test_constant_times_that_are_right_cover_whatever_their_rounding() -> None:
    verdict = run()
    assert all(own["covers"] and own["covers_certainly"] for own in answers(verdict).values())
    assert verdict.data["known_answers"]["fault"] is None


@pytest.mark.parametrize("arm", ["second", "planted"])
@pytest.mark.parametrize("side", [1, -1])
def test_only_an_interval_at_99_9_percent_that_misses_voids_the_method(arm: str, side: int) -> None:
    right = {"second": 20.0, "planted": 22.4}[arm]
    between = (t(0.95) + t(0.999)) / 2 * ERROR
    by_chance = run(**{"first": [20.0] * N, arm: around(right * math.exp(side * between))})
    own = answers(by_chance)[arm]
    assert (own["covers"], own["covers_certainly"]) == (False, True)
    assert by_chance.outcome == KEEP and by_chance.data["known_answers"]["fault"] is None
    beyond = t(0.999) * ERROR * 1.001
    wrong = run(**{"first": [20.0] * N, arm: around(right * math.exp(side * beyond))})
    own = answers(wrong)[arm]
    assert (own["covers"], own["covers_certainly"]) == (False, False)
    assert (wrong.outcome, wrong.store) == (INCONCLUSIVE, None)
    truth = {"second": "1.00", "planted": "1.12"}[arm]
    fault = f"a known answer was missed: K1 first over {arm} is {truth}, and its 99.9% interval is"
    assert wrong.data["language"]["reason"].startswith(fault)
    assert wrong.data["run"]["reason"] == wrong.data["known_answers"]["fault"]


def test_a_planted_slowness_that_is_not_seen_voids_the_method() -> None:
    """The three arms are equal: the planted one was not slowed down, or the method does not see it."""
    verdict = run(first=[20.0] * N, planted=[20.0] * N)
    assert verdict.outcome == INCONCLUSIVE
    assert answers(verdict)["planted"]["ratio"] == 1.0


def test_slowing_down_is_a_longer_time_not_a_shorter_one() -> None:
    verdict = run(first=[20.0] * N, planted=[20.0 / 1.12] * N)
    assert verdict.outcome == INCONCLUSIVE


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"second": [20.0] * (N - 1)}, f"{N - 1} valid blocks; {N} are registered or needed"),
        ({"planted": []}, f"0 valid blocks; {N} are registered or needed"),
        ({"second": [20.0] * (N - 1) + [math.nan]}, "log ratios hold nan"),
        ({"second": [20.0] * (N - 1) + [0.0]}, "log ratios hold nan"),
    ],
)
def test_a_known_answer_that_was_not_measured_as_registered_decides_nothing(
    known: dict[str, list[float]], said: str
) -> None:
    verdict = run(**known)
    assert (verdict.outcome, verdict.store) == (INCONCLUSIVE, None)
    reason = verdict.data["language"]["reason"]
    assert reason.startswith("a known answer is not shown: K1 first over")
    assert said in reason
    (arm,) = known
    own = answers(verdict)[arm]
    assert own["ratio"] is own["ci95"] is own["covers"] is own["covers_certainly"] is None
    json.loads(verdict.to_json())


def test_void_blocks_of_it_do_not_count() -> None:
    events = without(trial(BASE), stage="aa", block=2)
    still = []
    for arm, ms in (("first", 20.0), ("second", 200.0), ("planted", 22.4)):
        own = arm_rows(arm, {0: ms}, stage="aa", block=2, context=4096)
        for found in own:
            if found["metric"] == "rotation/stood_still_s":
                found["value"] = 3.0
        still += own
    seven = decide(with_rows(events, still), REGISTERED)
    assert f"{N - 1} valid blocks" in seven.data["known_answers"]["fault"]
    again = [
        found
        for arm, ms in (("first", 20.0), ("second", 20.0), ("planted", 22.4))
        for found in arm_rows(arm, {0: ms}, stage="aa", block=2, context=4096, trial=1)
    ]
    verdict = decide(with_rows(events, [*still, *again]), REGISTERED)
    assert verdict.data["known_answers"]["fault"] is None
    assert verdict.data["validity"]["aa"] == {"4096x1x1": {"valid": N, "void": 1}}


def test_a_bound_past_the_largest_number_is_none_and_covers() -> None:
    """Two blocks far apart, as in a smoke run: at 99.9% the interval has no end that is a number."""
    few = {**REGISTERED, "known_answers": {**RULES, "blocks": 2}}
    arms = {"first": [20.0, 20.0], "second": [2.0, 200.0], "planted": [22.4, 22.4]}
    verdict = decide(trial(BASE, known=arms, registration=few), few)
    own = answers(verdict)["second"]
    assert own["ci_certain"] == [0.0, None]
    assert own["covers_certainly"]
    assert verdict.outcome == KEEP
    json.loads(verdict.to_json())


def test_a_fault_stops_an_adoption_too() -> None:
    fast = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K3=11.0)
    assert decide(trial(fast), REGISTERED).outcome == ADOPT
    wrong = decide(trial(fast, known={"second": [21.0] * N}), REGISTERED)
    assert wrong.outcome == INCONCLUSIVE
    assert wrong.data["error_rates"] is not None


def test_by_chance_it_misses_at_its_level() -> None:
    """Half a million A/A tables: one in twenty misses at 95%, one in a thousand voids the method."""
    logs = np.random.default_rng(6).normal(0, 0.02, (500_000, N))
    away = np.abs(logs.mean(axis=1)) / (logs.std(axis=1, ddof=1) / math.sqrt(N))
    plan = SamplingPlan.fixed(REGISTERED, N)
    for confidence in (0.95, 0.999):
        _, low, high = plan.bounds(logs, confidence)
        missed = ((low > 0) | (high < 0)).mean()
        p = 1 - confidence
        assert missed == pytest.approx(p, abs=4 * math.sqrt(p / len(logs)))
        assert missed == pytest.approx((away > t(confidence)).mean(), abs=1e-5)
