"""Intervals against hand arithmetic, scipy, and simulation of their coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from kvtrial.decision import stats


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


@pytest.mark.parametrize("n", [3, 6, 12])
def test_drift_is_the_slope_test_of_a_regression(n: int) -> None:
    logs = np.random.default_rng(6).normal(0, 0.03, n)
    blocks = [b + (b > 1) for b in range(n)]  # block 2 is missing
    theirs = scipy_stats.linregress(blocks, logs).pvalue
    assert stats.drift_p(logs, blocks) == pytest.approx(theirs, rel=1e-9)
    assert stats.drift_p(blocks, blocks) == pytest.approx(0.0, abs=1e-6)


def test_lag1_by_hand() -> None:
    # From the mean 2: -1, 1, -1, 1; three products of -1 over a sum of four squares.
    assert stats.lag1([1.0, 3.0, 1.0, 3.0]) == pytest.approx(-3 / 4)
    assert stats.lag1([1.0, 1.0, 3.0, 3.0]) == pytest.approx(1 / 4)
    assert stats.lag1([0.1] * 6) is None and stats.lag1([0.1, 0.2]) is None
    draw = np.random.default_rng(1).standard_normal((2000, 12))
    for row in range(2000):  # an autocorrelation of 0.6, of which so few blocks show less
        for i in range(1, 12):
            draw[row, i] = 0.6 * draw[row, i - 1] + 0.8 * draw[row, i]
    assert 0.25 < np.mean([stats.lag1(row) for row in draw]) < 0.5


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


def test_welchs_interval_equals_scipys() -> None:
    rng = np.random.default_rng(9)
    top, bottom = rng.normal(0.3, 0.05, 6), rng.normal(0.1, 0.02, 12)
    theirs = scipy_stats.ttest_ind(top, bottom, equal_var=False).confidence_interval(0.95)
    got = stats.welch_interval(top, bottom)
    assert (math.log(got.low), math.log(got.high)) == pytest.approx(tuple(theirs), rel=1e-9)
    assert math.log(got.ratio) == pytest.approx(top.mean() - bottom.mean(), rel=1e-12)
    assert got.n == 6


def test_welchs_interval_of_constant_sides_is_a_point() -> None:
    got = stats.welch_interval([math.log(2.0)] * 3, [0.0] * 4)
    assert (got.low, got.ratio, got.high) == pytest.approx((2.0, 2.0, 2.0), rel=1e-12)


@pytest.mark.parametrize("blocks", [0, 1, 29])
def test_unequal_or_empty_sides_are_an_error_never_nan(blocks: int) -> None:
    """Case F4."""
    top = dict.fromkeys(range(30), 1.0)
    with pytest.raises(stats.PairingError):
        stats.paired_log_ratios(top, dict.fromkeys(range(blocks), 1.0))


def test_the_paired_interval_is_narrow_where_the_unpaired_is_wide() -> None:
    """Case F2: both arms share noise of a standard deviation of 10 on 100."""
    shared = np.random.default_rng(11).normal(100, 10, 12)
    slow, fast = dict(enumerate(shared)), dict(enumerate(0.9 * shared))
    paired = stats.t_interval(stats.paired_log_ratios(slow, fast))
    unpaired = stats.welch_interval(np.log(shared), np.log(0.9 * shared))
    assert paired.high - paired.low < 1e-12
    assert unpaired.high - unpaired.low > 0.1


def test_constant_ratios_give_a_point_not_nan() -> None:
    got = stats.t_interval([math.log(1.2)] * 6)
    assert (got.low, got.ratio, got.high) == pytest.approx((1.2, 1.2, 1.2), rel=1e-12)


@pytest.mark.parametrize(
    ("blocks", "needed", "said"),
    [(0, 2, 2), (1, 2, 2), (1, 0, 2), (7, 8, 8)],  # never fewer than two
)
def test_too_few_blocks(blocks: int, needed: int, said: int) -> None:
    with pytest.raises(stats.InsufficientData, match=f"{blocks} valid blocks; {said} are"):
        stats.check([0.1] * blocks, needed)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_ratio_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(stats.NonFinite, match=str(bad)):
        stats.check([0.1, bad, 0.2])
    assert stats.check([0.1, 0.2], 2).tolist() == [0.1, 0.2]


def test_the_t_interval_covers_at_its_nominal_rate() -> None:
    # 2,000 trials of 6 blocks: the share that covers has a standard error of 0.005.
    draws = np.random.default_rng(4).normal(0.1, 0.05, (2000, 6))
    intervals = [stats.t_interval(logs) for logs in draws]
    covered = np.mean([i.low <= math.exp(0.1) <= i.high for i in intervals])
    assert covered == pytest.approx(0.95, abs=4 * 0.005)


def test_a_bound_past_the_largest_number_is_infinite_never_an_error() -> None:
    """F3: one far outlier among steady blocks."""
    assert stats.ratio_of(709.0) == pytest.approx(math.exp(709.0))
    assert stats.ratio_of(710.0) == math.inf
    assert stats.ratio_of(-1000.0) == 0.0
    assert math.isnan(stats.ratio_of(math.nan))
    got = stats.t_interval([0.0, 10.0], confidence=0.999)
    assert (got.low, got.high) == (0.0, math.inf)
    outlier = [0.001, 0.0012, 0.0009, 0.0011, 0.001, 4.0]
    theirs = scipy_stats.ttest_1samp(outlier, 0).confidence_interval(0.95)
    assert math.log(stats.t_interval(outlier).high) == pytest.approx(theirs.high)
    assert stats.welch_interval([0.0, 9000.0], [0.0, 1.0]).high == math.inf


def test_drift_p_finds_a_drift_of_one_arm_and_is_uniform_without() -> None:
    rng = np.random.default_rng(12)
    flat = [stats.drift_p(row, range(12)) or 0.0 for row in rng.normal(0, 0.03, (1000, 12))]
    spread = math.sqrt(0.05 * 0.95 / 1e3)
    assert np.mean(np.array(flat) < 0.05) == pytest.approx(0.05, abs=3 * spread)
    tilted = rng.normal(0, 0.03, (200, 12)) + np.linspace(0, 0.15, 12)
    assert np.mean([(stats.drift_p(row, range(12)) or 0.0) < 0.05 for row in tilted]) > 0.8
    assert stats.drift_p([0.1, 0.2], [0, 1]) is None
    assert stats.drift_p([0.1] * 6, range(6)) is None
