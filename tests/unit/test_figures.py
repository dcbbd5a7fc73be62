"""The figure of two arms in a block, by hand: common rounds, slow arms, groups, the median beside."""

from __future__ import annotations

import math

import pytest
from trial_events import REGISTERED, arm_rows, row

from kvtrial.decision.contrasts import Measured
from kvtrial.measure import figures
from kvtrial.measure.figures import Block, pair_logs
from kvtrial.run import events


def block(*groups: dict[str, dict[int, float]], anchors: tuple[str, ...] = ("K1", "K3")) -> Block:
    steps = {(n, arm): own for n, arms in enumerate(groups) for arm, own in arms.items()}
    return Block(steps, anchors)


def test_it_is_total_over_total() -> None:
    own = block({"K1": {0: 10.0, 1: 30.0}, "K3": {0: 5.0, 1: 5.0}})
    assert own.log_speed("K3", "K1") == pytest.approx(math.log(40 / 10))
    assert own.log_speed("K1", "K3") == pytest.approx(math.log(10 / 40))
    # The rounds' own ratios are 2 and 6; the median of their logs is that of their geometric mean.
    assert own.median_log_speed("K3", "K1") == pytest.approx(math.log(math.sqrt(12)))
    assert own.log_speed("K1", "K1") == 0.0


def test_only_rounds_that_both_took_part_in_count() -> None:
    """A step that was not timed, such as the first fast one after a slow arm, is in nobody's figure."""
    own = block({"K1": {0: 10.0, 1: 99.0, 2: 20.0}, "K3": {0: 5.0, 2: 20.0, 3: 77.0}})
    assert own.log_speed("K3", "K1") == pytest.approx(math.log(30 / 25))
    assert own.all_steps("K1") == [10.0, 99.0, 20.0]


def test_a_slow_arm_is_compared_over_its_own_rounds() -> None:
    fast = {n: 10.0 + n for n in range(16)}
    own = block({"K1": fast, "K3": fast, "K0": {7: 100.0, 15: 150.0}})
    assert own.log_speed("K1", "K0") == pytest.approx(math.log(250 / (17 + 25)))
    assert own.median_log_speed("K1", "K0") == pytest.approx(
        (math.log(100 / 17) + math.log(150 / 25)) / 2
    )
    assert own.log_speed("K3", "K1") == pytest.approx(0.0)


def test_no_common_round_is_no_figure() -> None:
    own = block({"K1": {0: 10.0}, "K0": {7: 100.0}}, anchors=())
    assert own.log_speed("K1", "K0") is None
    assert own.log_speed("K1", "K5") is None
    assert own.median_log_speed("K5", "K6") is None


GROUPS = (
    {"K1": {0: 10.0, 1: 12.0}, "K3": {0: 9.0, 1: 11.0}, "A2": {0: 40.0, 1: 60.0}},
    {"K1": {0: 20.0, 1: 24.0}, "K3": {0: 18.0, 1: 20.0}, "K2": {0: 11.0, 1: 11.0}},
)


def test_arms_that_share_no_group_are_linked_by_the_anchor_within_the_block() -> None:
    own = block(*GROUPS)
    by_hand = math.log(44 / 22) + math.log(100 / 22)  # K2 over K1 there, K1 over A2 here
    assert own.log_speed("K2", "A2") == pytest.approx(by_hand, rel=1e-12)
    assert own.log_speed("A2", "K2") == pytest.approx(-by_hand, rel=1e-12)
    # The machine was half as fast for the second group: a ratio of the two's own totals would be off.
    assert own.log_speed("K2", "A2") != pytest.approx(math.log(100 / 22))


def test_anchors_are_compared_over_all_groups() -> None:
    own = block(*GROUPS)
    assert own.log_speed("K3", "K1") == pytest.approx(math.log(66 / 58))
    assert own.all_steps("K1") == [10.0, 12.0, 20.0, 24.0]


def test_where_the_first_anchor_is_out_the_next_one_links() -> None:
    without_k1 = [{name: own for name, own in group.items() if name != "K1"} for group in GROUPS]
    own = block(*without_k1)
    assert own.log_speed("K2", "A2") == pytest.approx(math.log(38 / 22) + math.log(100 / 20))
    assert block(*without_k1, anchors=("K1",)).log_speed("K2", "A2") is None


def test_a_pair_that_shares_a_group_needs_no_anchor() -> None:
    assert block(*GROUPS).log_speed("K2", "K3") == pytest.approx(math.log(38 / 22))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_one_time_that_is_no_positive_number_is_no_number(bad: float) -> None:
    own = block({"K1": {0: 10.0, 1: 30.0, 2: 20.0}, "K3": {0: 5.0, 1: bad, 2: 5.0}})
    for figure in (own.log_speed, own.median_log_speed):
        assert math.isnan(figure("K3", "K1"))
        assert math.isnan(figure("K1", "K3"))
    # In a round that the other did not take part in, it is not theirs.
    apart = block({"K1": {0: 10.0}, "K3": {0: 5.0, 1: bad}})
    assert apart.log_speed("K3", "K1") == pytest.approx(math.log(2))


def test_pairs_that_every_block_has() -> None:
    whole, bare = block(*GROUPS), block(GROUPS[0])
    broken = block({"K1": {0: 1.0}, "K3": {0: math.nan}})
    pairs = (("K3", "K1"), ("K2", "K1"))
    assert set(pair_logs([whole, whole], pairs)) == set(pairs)
    assert set(pair_logs([whole, bare], pairs)) == {("K3", "K1")}
    assert pair_logs([whole, broken], pairs) == {}
    assert pair_logs([], pairs) == {}
    logs = pair_logs([whole, bare], pairs)["K3", "K1"]
    assert logs == pytest.approx([math.log(66 / 58), math.log(22 / 20)])


def test_steps_are_read_by_block_group_and_arm() -> None:
    rows = [
        *arm_rows("K1", {0: 10.0, 1: 12.0}, block=0, context=4096),
        *arm_rows("K3", {0: 9.0}, block=0, group=1, context=4096),
        *arm_rows("K1", {3: 7.0}, block=2, context=4096),
        row("m2", "m2/alone_step_ms", candidate="K1", block=0, value=1.0, context=4096),
    ]
    assert figures.steps(events.to_frame(rows)) == {
        0: {(0, "K1"): {0: 10.0, 1: 12.0}, (1, "K3"): {0: 9.0}},
        2: {(0, "K1"): {3: 7.0}},
    }


# --------------------------------------------------------------------------------------------------
# Over blocks


def measured(blocks: list[dict[str, dict[int, float]]]) -> tuple[Measured, dict[str, object]]:
    rows = [
        found
        for number, arms in enumerate(blocks)
        for name, steps in arms.items()
        for found in arm_rows(name, steps, block=number, context=4096)
    ]
    found = Measured(events.to_frame(rows), REGISTERED, "default", 1)
    return found, found.cells[0]


def test_the_median_stands_beside_and_names_the_arm_with_a_tail() -> None:
    """K3 is a quarter faster in every round but one, in which it takes three times as long."""
    steps = dict.fromkeys(range(16), 8.0)
    tailed = [
        {"K1": dict.fromkeys(range(16), 10.0), "K3": {**steps, 5: 24.0 + b / 10}} for b in range(8)
    ]
    found, cell = measured(tailed)
    contrast = found.contrast(cell, "K3", "K1")
    assert contrast.course.median_ratio == pytest.approx(1.25)
    low, high = contrast.ci95
    assert low < contrast.ratio < high < 1.25
    assert contrast.course.tail == "K3"
    assert found.contrast(cell, "K1", "K3").course.tail == "K3"


@pytest.mark.parametrize("k3", [8.0, 10.0])
def test_where_the_two_agree_nobody_has_a_tail(k3: float) -> None:
    quiet = [{"K1": {0: 10.0, 1: 11.0}, "K3": {0: k3, 1: k3 * 1.1}} for _ in range(8)]
    found, cell = measured(quiet)
    contrast = found.contrast(cell, "K3", "K1")
    assert contrast.course.tail is None
    assert contrast.course.median_ratio == pytest.approx(contrast.ratio)
