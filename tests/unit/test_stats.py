"""Intervals against hand arithmetic, scipy, and simulation of their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from kvtrial import stats


def test_tokens_per_s_is_total_over_total_not_the_mean_of_rates() -> None:
    assert stats.tokens_per_s([1000.0, 100.0]) == pytest.approx(2 / 1.1, rel=1e-12)
    assert stats.tokens_per_s([1000.0, 100.0], tokens_per_step=4) == pytest.approx(
        8 / 1.1, rel=1e-12
    )


@pytest.mark.parametrize("steps", [[0.0, 0.0], [math.nan, 1.0], [math.inf], [-1.0, 5.0]])
def test_step_times_that_mean_nothing_are_refused(steps: list[float]) -> None:
    with pytest.raises(stats.NonFinite):
        stats.tokens_per_s(steps)


def test_no_steps_is_not_a_rate() -> None:
    with pytest.raises(stats.InsufficientData):
        stats.tokens_per_s([])


def test_t_interval_by_hand() -> None:
    # Logs 0.1, 0.2, 0.3: mean 0.2, sd 0.1, se 0.1/sqrt(3); t(0.975, 2) = 4.302652729911275.
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    got = stats.t_interval([0.1, 0.2, 0.3])
    assert got.n == 3
    assert got.ratio == pytest.approx(math.exp(0.2), rel=1e-12)
    assert got.low == pytest.approx(math.exp(0.2 - half), rel=1e-9)
    assert got.high == pytest.approx(math.exp(0.2 + half), rel=1e-9)


def test_t_interval_equals_scipys_one_sample_interval() -> None:
    logs = np.random.default_rng(1).normal(0.1, 0.03, 12)
    theirs = scipy_stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    got = stats.t_interval(logs)
    assert (math.log(got.low), math.log(got.high)) == pytest.approx(tuple(theirs), rel=1e-12)


@pytest.mark.parametrize("method", ["percentile", "BCa"])
def test_bootstrap_equals_scipys(method: str) -> None:
    logs = np.random.default_rng(2).normal(0.1, 0.03, 8)
    theirs = scipy_stats.bootstrap(
        (logs,), np.mean, method=method, n_resamples=10_000, rng=np.random.default_rng(7)
    ).confidence_interval
    got = stats.bootstrap_interval(logs, method=method, seed=7)
    assert (math.log(got.low), math.log(got.high)) == pytest.approx((theirs.low, theirs.high))


def test_constant_ratios_give_a_point_not_nan() -> None:
    logs = [math.log(1.2)] * 6
    for got in (stats.t_interval(logs), stats.bootstrap_interval(logs)):
        assert (got.low, got.ratio, got.high) == pytest.approx((1.2, 1.2, 1.2), rel=1e-12)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_blocks(n: int) -> None:
    with pytest.raises(stats.InsufficientData):
        stats.t_interval([0.1] * n, min_blocks=3)


def test_pairs_are_never_cut_to_the_shorter_side() -> None:
    with pytest.raises(stats.PairingError, match=r"\[2\]"):
        stats.paired_log_ratios({0: 1.0, 1: 1.0, 2: 1.0}, {0: 1.0, 1: 1.0})


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_value_without_a_logarithm_is_named(bad: float) -> None:
    with pytest.raises(stats.NonFinite, match="block 1"):
        stats.paired_log_ratios({0: 1.0, 1: bad}, {0: 1.0, 1: 1.0})


def test_pairing_removes_what_both_arms_share() -> None:
    rng = np.random.default_rng(3)
    machine = np.exp(rng.normal(0, 0.10, 12))
    slow = dict(enumerate(machine))
    fast = {b: 0.9 * v for b, v in slow.items()}
    paired = stats.t_interval(stats.paired_log_ratios(slow, fast))
    assert paired.high - paired.low < 1e-9
    shuffled = dict(zip(fast, rng.permutation(list(fast.values()))))
    wide = stats.t_interval(stats.paired_log_ratios(slow, shuffled))
    assert wide.high - wide.low > 0.05


def test_the_t_interval_covers_at_its_nominal_rate() -> None:
    # 4,000 trials of 6 blocks: the share that covers has a standard error of 0.0035.
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(4000):
        got = stats.t_interval(rng.normal(0.1, 0.05, 6))
        covered += got.low <= math.exp(0.1) <= got.high
    assert covered / 4000 == pytest.approx(0.95, abs=4 * 0.0035)
