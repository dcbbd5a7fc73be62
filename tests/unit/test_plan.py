"""The sampling plan: how many blocks, which comes next, which interval; by hand, by scipy, by simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from trial_events import REGISTERED

from kvtrial.measure.plan import Hopeless, SamplingPlan, Seen, block_seed, cell_name, t_quantile

CELLS = {cell["context"]: cell for cell in REGISTERED["cells"] if cell["role"] != "extra"}
PRIMARY = SamplingPlan.of_cell(REGISTERED, CELLS[4096])
VETO = SamplingPlan.of_cell(REGISTERED, CELLS[512])
HALF_WIDTH = 0.015
T7 = float(scipy_stats.t.ppf(0.975, 7))  # 2.3646242515927844


def eight(deviation: float) -> npt.NDArray[np.float64]:
    """Eight logs of mean 0 whose standard deviation (n - 1) is as asked for."""
    return np.array([1.0, -1.0] * 4) * deviation * math.sqrt(7 / 8)


def test_the_registered_plan_is_the_specifications() -> None:
    assert (PRIMARY.first, PRIMARY.most, PRIMARY.half_width) == (8, 24, HALF_WIDTH)
    assert PRIMARY.pairs == (("K3", "K1"), ("K3", "K1T"), ("K2T", "K1"))
    assert (PRIMARY.confidence, PRIMARY.most_void) == (0.95, 8)
    assert (VETO.first, VETO.most) == (8, 8)  # the primary cell alone is extended
    (extra, *_) = [cell for cell in REGISTERED["cells"] if cell["role"] == "extra"]
    assert SamplingPlan.of_cell(REGISTERED, extra).most == 8
    fixed = SamplingPlan.fixed(REGISTERED, 6)
    assert (fixed.first, fixed.most, fixed.pairs, fixed.most_void) == (6, 6, (), 8)


# --------------------------------------------------------------------------------------------------
# How many


@pytest.mark.parametrize(
    ("deviation", "blocks"),
    [
        (0.0, 8),
        (0.001, 8),
        (0.0179, 8),  # (2.3646 * 0.0179 / 0.015)² = 7.96
        (0.018, 9),  # 8.05
        (0.0190, 9),  # 8.97
        (0.0192, 10),  # 9.16
        (0.0253, 16),  # 15.9
        (0.0310, 24),  # 23.88
        (0.0311, 24),  # 24.04: the cap
        (0.5, 24),
    ],
)
def test_wanted_by_hand(deviation: float, blocks: int) -> None:
    by_hand = min(max(math.ceil((T7 * deviation / HALF_WIDTH) ** 2), 8), 24)
    assert by_hand == blocks
    logs = eight(deviation)
    assert PRIMARY.wanted(logs[None]) == blocks
    # Only the spread matters: never the mean, nor the sign.
    assert PRIMARY.wanted(logs[None] + 0.5) == PRIMARY.wanted(-logs[None] - 3.0) == blocks
    assert VETO.wanted(logs[None]) == 8


def test_the_pair_that_needs_most_counts() -> None:
    pairs = np.stack([eight(0.001), eight(0.0253), eight(0.018)])
    assert PRIMARY.wanted(pairs) == 16
    assert PRIMARY.wanted(pairs[[0, 2]]) == 9
    assert PRIMARY.wanted(np.empty((0, 8))) == 8  # nobody's spread is known


def test_wanted_over_many_tables_is_that_of_each() -> None:
    logs = np.random.default_rng(1).normal(0, 0.02, (50, 3, 24))
    each = [int(PRIMARY.wanted(one)) for one in logs]
    assert PRIMARY.wanted(logs).tolist() == each
    assert len(set(each)) > 5


def test_blocks_beyond_the_first_have_no_say_in_their_number() -> None:
    logs = np.random.default_rng(18).normal(0, 0.02, (1, 24))
    changed = logs.copy()
    changed[:, 8:] = 9.0
    assert PRIMARY.wanted(logs) == PRIMARY.wanted(changed) == PRIMARY.wanted(logs[:, :8])


@given(
    st.lists(st.floats(-0.1, 0.1), min_size=8, max_size=8).filter(lambda x: np.std(x) > 1e-6),
    st.floats(-1, 1),
)
def test_a_constant_added_to_the_logs_changes_no_number(logs: list[float], by: float) -> None:
    own = np.array(logs)
    asked = (T7 * own.std(ddof=1) / HALF_WIDTH) ** 2
    if abs(asked - round(asked)) > 1e-6:  # where rounding of the sum does not decide
        assert PRIMARY.wanted(own[None]) == PRIMARY.wanted(own[None] + by)


# --------------------------------------------------------------------------------------------------
# Which interval


def test_bounds_of_the_first_blocks_are_scipys() -> None:
    logs = np.random.default_rng(1).normal(0.1, 0.03, 8)
    for confidence in (0.95, 0.999):
        theirs = scipy_stats.ttest_1samp(logs, 0).confidence_interval(confidence)
        mean, low, high = PRIMARY.bounds(logs, confidence)
        assert (float(low), float(high)) == pytest.approx(tuple(theirs), rel=1e-12)
        assert mean == pytest.approx(logs.mean(), rel=1e-14)
    assert PRIMARY.bounds(logs) == PRIMARY.bounds(logs, 0.95)


@pytest.mark.parametrize("n", [9, 16, 24])
@pytest.mark.parametrize("quiet_first", [True, False])
def test_bounds_after_an_extension_are_the_wider_of_the_two(n: int, quiet_first: bool) -> None:
    rng = np.random.default_rng(3)
    first, later = (0.005, 0.05) if quiet_first else (0.05, 0.005)
    logs = np.concatenate([rng.normal(0.1, first, 8), rng.normal(0.1, later, n - 8)])
    stein = T7 * logs[:8].std(ddof=1) / math.sqrt(n)
    plain = float(scipy_stats.t.ppf(0.975, n - 1)) * logs.std(ddof=1) / math.sqrt(n)
    assert (plain > stein) == quiet_first
    mean, low, high = PRIMARY.bounds(logs)
    assert mean - low == pytest.approx(max(stein, plain), rel=1e-12)
    assert high - mean == pytest.approx(max(stein, plain), rel=1e-12)


def test_values_that_are_equal_but_for_rounding_are_a_point() -> None:
    for logs in ([0.1] * 8, [0.1, 0.1 + 1e-17] * 4, [math.log(1.2)] * 24):
        own = np.array(logs)
        mean, low, high = PRIMARY.bounds(own)
        assert low == mean == high
    _, low, high = PRIMARY.bounds(np.array([0.1, 0.1001] * 4))
    assert low < 0.10005 < high


def test_bounds_over_many_tables_are_those_of_each() -> None:
    logs = np.random.default_rng(8).normal(0, 0.03, (5, 4, 12))
    logs[2, 1] = 0.07
    many = PRIMARY.bounds(logs)
    for place in np.ndindex(5, 4):
        each = PRIMARY.bounds(logs[place])
        assert [float(b[place]) for b in many] == pytest.approx([float(b) for b in each], rel=1e-14)


@pytest.mark.parametrize("n", [2, 6, 12])
def test_a_plan_of_another_number_gives_the_plain_interval(n: int) -> None:
    logs = np.random.default_rng(n).normal(0, 0.1, n)
    theirs = scipy_stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    for plan in (SamplingPlan.fixed(REGISTERED, n), SamplingPlan.fixed(REGISTERED, n + 3)):
        _, low, high = plan.bounds(logs)
        assert (float(low), float(high)) == pytest.approx(tuple(theirs), rel=1e-12)


@pytest.mark.parametrize(("freedom", "confidence"), [(7, 0.95), (23, 0.95), (7, 0.999), (1, 0.5)])
def test_the_quantile_is_scipys(freedom: int, confidence: float) -> None:
    theirs = scipy_stats.t.ppf(0.5 + confidence / 2, freedom)
    assert t_quantile(freedom, confidence) == pytest.approx(theirs, rel=1e-12)


# --------------------------------------------------------------------------------------------------
# Coverage, by simulation

RUNS = 100_000


def extended(plan: SamplingPlan, logs: npt.NDArray[np.float64]) -> tuple[Any, Any]:
    """Lower and upper bound of each of the runs (runs, most), whose own spread says how many count."""
    wanted = plan.wanted(logs[:, None])
    low, high = np.empty(len(logs)), np.empty(len(logs))
    for n in np.unique(wanted):
        own = wanted == n
        _, low[own], high[own] = plan.bounds(logs[own, :n])
    return low, high


@pytest.mark.parametrize("deviation", [0.012, 0.02, 0.025, 0.04])
def test_the_interval_covers_whatever_number_the_spread_asks_for(deviation: float) -> None:
    logs = np.random.default_rng(19).normal(0.1, deviation, (RUNS, 24))
    low, high = extended(PRIMARY, logs)
    error = math.sqrt(0.95 * 0.05 / RUNS)
    covered = ((low <= 0.1) & (high >= 0.1)).mean()
    assert 0.95 - 3 * error <= covered <= 0.975  # the wider of two intervals, but not by much
    tail = math.sqrt(0.025 * 0.975 / RUNS)
    assert (low > 0.1).mean() <= 0.025 + 3 * tail
    assert (high < 0.1).mean() <= 0.025 + 3 * tail


def test_the_plain_interval_would_cover_too_little() -> None:
    """Why the interval is Stein's too: a plan that does not know of its first blocks misses more often."""
    logs = np.random.default_rng(20).normal(0.1, 0.02, (RUNS, 24))
    wanted = PRIMARY.wanted(logs[:, None])
    covered = 0
    for n in np.unique(wanted):
        _, low, high = SamplingPlan.fixed(REGISTERED, int(n)).bounds(logs[wanted == n, :n])
        covered += int(((low <= 0.1) & (high >= 0.1)).sum())
    assert covered / RUNS < 0.95 - 4 * math.sqrt(0.95 * 0.05 / RUNS)


# --------------------------------------------------------------------------------------------------
# Which comes next, and when it is lost


@pytest.mark.parametrize(("void", "lost"), [(0, False), (8, False), (9, True), (100, True)])
def test_a_cell_is_lost_past_the_registered_void_runs(void: int, lost: bool) -> None:
    assert bool(PRIMARY.lost(void)) == lost
    assert PRIMARY.lost([void, 0]).tolist() == [lost, False]
    # The cap comes first, whatever there is already.
    found = PRIMARY.next(Seen(range(8), void))
    if lost:
        assert isinstance(found, Hopeless)
        assert f"{void} runs of its blocks were void; at most 8" in found.reason
        assert found.again and found.remedy
    else:
        assert found is None


NARROW, WIDE = eight(0.001), eight(0.5)


@pytest.mark.parametrize(
    ("valid", "logs", "comes"),
    [
        ([], [], 0),
        ([0], [], 1),
        ([0, 1, 3], [], 2),  # one that was void, or that a kill left out
        ([1, 2], [], 0),
        ([0, 1, 2, 3, 4, 5, 6], [], 7),
        ([*range(8)], [], None),  # no pair was measured: nothing asks for more
        ([*range(8)], [NARROW], None),
        ([*range(8)], [WIDE], 8),
        ([*range(8)], [NARROW, WIDE], 8),
        ([*range(8)], [eight(0.0192)], 8),
        ([*range(9)], [np.append(eight(0.0192), 0.0)], 9),
        ([*range(10)], [np.append(eight(0.0192), [0.0, 9.0])], None),  # the tenth has no say
        ([*range(8), 9], [np.append(WIDE, 0.0)], 8),
        ([*range(23)], [np.append(WIDE, [0.0] * 15)], 23),
        ([*range(24)], [np.append(WIDE, [0.0] * 16)], None),  # the cap is no failure
        ([0, 1, 2], [NARROW[:3]], 3),
    ],
)
def test_what_comes_next(valid: list[int], logs: list[Any], comes: int | None) -> None:
    assert PRIMARY.next(Seen(valid, 0, logs)) == comes


@pytest.mark.parametrize("valid", range(9))
def test_a_veto_cell_has_its_first_blocks_and_no_more(valid: int) -> None:
    expected = valid if valid < 8 else None
    assert VETO.next(Seen(range(valid), 0, [WIDE[:valid]] if valid else [])) == expected


def test_following_the_plan_ends_at_what_it_wanted() -> None:
    """Block by block, with void runs in between, as a stage asks."""
    logs = np.concatenate([eight(0.0253), np.random.default_rng(5).normal(0, 0.05, 16)])
    valid: list[int] = []
    void = 0
    while isinstance(number := PRIMARY.next(Seen(valid, void, [logs[: len(valid)]])), int):
        assert number == len(valid)
        if number % 4 == 1 and void <= number // 4:
            void += 1  # this run was void: the same block comes again
        else:
            valid.append(number)
    assert number is None
    assert len(valid) == PRIMARY.wanted(logs[None]) == PRIMARY.planned([logs])
    assert len(valid) == 16
    assert void > 0


@pytest.mark.parametrize("apart", [0.02, -0.02])
def test_how_many_more_blocks_would_tell(apart: float) -> None:
    logs = eight(0.03) + apart
    # Without the last step to a whole number: (t₈ s / apart)² - 8.
    by_hand = (float(scipy_stats.t.ppf(0.975, 8)) * 0.03 / 0.02) ** 2 - 8
    assert PRIMARY.more_blocks(logs, 0.0) == math.ceil(by_hand) == 4
    assert PRIMARY.more_blocks(logs - apart + 0.5, 0.5) is None  # on the edge
    assert PRIMARY.more_blocks(eight(0.001) + apart, 0.0) == 1  # it is told already
    assert PRIMARY.more_blocks(np.full(8, apart), 0.0) == 1


# --------------------------------------------------------------------------------------------------
# Names and seeds


def test_cells_are_named_by_what_they_are() -> None:
    cell = {"context": 4096, "sessions": 4, "threads": "all"}
    assert cell_name(cell) == "4096x4xall"
    assert cell_name({**cell, "threads": 1, "shape": "9q3kv"}) == "4096x4x1-9q3kv"


def test_each_block_of_each_cell_has_a_seed_of_its_own() -> None:
    seeds = [block_seed(7, cell, n) for cell in REGISTERED["cells"] for n in range(24)]
    assert len(set(seeds)) == len(seeds)
    assert (
        block_seed(7, CELLS[512], 3) == block_seed(7, CELLS[512], 3) != block_seed(8, CELLS[512], 3)
    )
    assert all(0 <= seed < 2**32 for seed in seeds)
