"""The rotation's orders are balanced, its groups fit, and slow arms are known: pure functions."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrial.measure.rotation import (
    TooLarge,
    groups,
    orders,
    rounds_of,
    slow_arms,
    turn,
    williams,
)


@pytest.mark.parametrize("n", range(1, 15))
def test_a_square_is_balanced_in_places_and_in_successors(n: int) -> None:
    rows = williams(n)
    assert len(rows) == (n if n % 2 == 0 else 2 * n)
    assert all(sorted(row) == list(range(n)) for row in rows)
    places = Counter((place, arm) for row in rows for place, arm in enumerate(row))
    assert set(places.values()) == {len(rows) // n}
    assert len(places) == n * n
    followers = Counter(pair for row in rows for pair in pairwise(row))
    # Each arm follows each other one, and equally often.
    assert len(followers) == n * (n - 1)
    assert len(set(followers.values())) <= 1


def test_the_mirrored_rows_are_what_balances_an_odd_number() -> None:
    half = williams(5)[:5]
    assert len(Counter(pair for row in half for pair in pairwise(row))) < 5 * 4
    assert williams(5)[5:] == [row[::-1] for row in half]


def test_the_first_row_is_the_zigzag() -> None:
    assert williams(6)[0] == [0, 1, 5, 2, 4, 3]
    assert williams(6)[1] == [1, 2, 0, 3, 5, 4]


def balance(found: list[list[str]]) -> tuple[set[int], set[int]]:
    places = Counter((place, arm) for order in found for place, arm in enumerate(order))
    followers = Counter(pair for order in found for pair in pairwise(order))
    return set(places.values()), set(followers.values())


@pytest.mark.parametrize("n", range(1, 13))
@pytest.mark.parametrize("rounds", [1, 8, 64])
def test_orders_are_whole_cycles(n: int, rounds: int) -> None:
    arms = [f"K{i}" for i in range(n)]
    found = orders(arms, rounds, seed=7)
    cycle = n if n % 2 == 0 else 2 * n
    assert len(found) == rounds_of(n, rounds) == math.ceil(rounds / cycle) * cycle
    assert all(sorted(order) == sorted(arms) for order in found)
    for start in range(0, len(found), cycle):
        places, followers = balance(found[start : start + cycle])
        assert len(places) == 1 and len(followers) <= 1
    if n > 1:
        assert balance(found)[0] == {len(found) // n}


def test_a_penalty_on_a_place_or_on_a_predecessor_cancels() -> None:
    """Case F6: no candidate may owe its figure to its place, nor to who ran before it."""
    arms = [f"K{i}" for i in range(7)]
    found = orders(arms, 64, seed=3)
    mean = dict.fromkeys(arms, 0.0)
    for order in found:
        for place, arm in enumerate(order):
            mean[arm] += (0.05 if place == 0 else 0.01 * place) / len(found)
            # A neighbour leaves the caches as it does: each costs the next one something else.
            if place and order[place - 1] != "K0":
                mean[arm] += 0.02 / len(found)
    same = [mean[arm] for arm in arms if arm != "K0"]
    assert max(same) - min(same) < 1e-12


def test_the_seed_decides_and_the_order_of_names_does_not() -> None:
    names = ["K0", "K1", "K2", "K3"]
    assert orders(names, 64, 1) == orders(names[::-1], 64, 1)
    assert len({str(orders(names, 64, seed)) for seed in range(20)}) == 20
    # Arms are relabelled at every cycle: not one fixed succession for ever.
    found = orders(names, 64, 5)
    assert len({tuple(map(tuple, found[at : at + 4])) for at in range(0, 64, 4)}) > 4


def test_no_arms_and_arms_of_one_name() -> None:
    assert orders([], 64, 0) == []
    assert rounds_of(0, 64) == 64
    assert orders(["K1"], 3, 0) == [["K1"]] * 4  # a cycle of one arm is two rounds
    with pytest.raises(ValueError, match="not all different"):
        orders(["K0", "K0"], 2, 0)


# --------------------------------------------------------------------------------------------------
# Slow arms


def test_slow_is_more_than_so_many_times_the_reference() -> None:
    steps = {"K1": 18, "K3": 20, "K5T": 7, "K0": 46, "A1": 45, "A2": 180}
    assert slow_arms(steps, 2.5, "K1") == ["A2", "K0"]  # 45 is 2.5 times 18 exactly
    assert slow_arms(steps, 11, "K1") == []
    assert slow_arms({"K0": 500}, 2.5, "K0") == []
    assert slow_arms({}, 2.5, "K1") == []
    assert slow_arms({"K5T": 7, "K3": 17, "K0": 46}, 2.5, "K1") == ["K0"]  # K1 is out


def test_an_arm_of_fewer_bits_makes_no_slow_arms_of_the_others() -> None:
    """At 16,384 K5T takes 33 ms where K1 takes 85: K3 was measured in every eighth round of the veto cell."""
    assert slow_arms({"K5T": 33, "K1": 84, "K3": 87, "K0": 1800}, 2.5, "K1") == ["K0"]


def test_slow_arms_take_the_last_place_by_turns() -> None:
    arms = ["A1", "A2", "K0"]
    assert [turn(arms, n) for n in range(3)] == [
        ["A1", "A2", "K0"],
        ["A2", "K0", "A1"],
        ["K0", "A1", "A2"],
    ]
    assert turn(arms, 3) == arms
    assert turn([], 5) == []


# --------------------------------------------------------------------------------------------------
# Groups


ARMS = ["K0", "K1", "K2", "K3", "K1T"]
SIZES = {"K0": 10, "K1": 10, "K2": 5, "K3": 10, "K1T": 10}


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (45, [ARMS]),  # all fit, exactly
        (44, [["K0", "K1", "K2", "K3"], ["K1", "K3", "K1T"]]),
        (35, [["K0", "K1", "K2", "K3"], ["K1", "K3", "K1T"]]),
        (30, [["K0", "K1", "K3"], ["K1", "K2", "K3"], ["K1", "K3", "K1T"]]),  # exactly three
    ],
)
def test_groups_have_both_anchors_and_fit(room: int, expected: list[list[str]]) -> None:
    assert groups(ARMS, ["K1", "K3"], SIZES, room) == expected


def test_memory_for_less_than_the_anchors_and_one_arm_is_said() -> None:
    sizes = {name: size << 30 for name, size in SIZES.items()}
    with pytest.raises(TooLarge, match=r"K1 and K3 and K0 need 30.0 GiB .* 29.0 GiB are free"):
        groups(ARMS, ["K1", "K3"], sizes, 29 << 30)
    # For one arm only.
    with pytest.raises(TooLarge, match=r"10.0 GiB are free"):
        groups(ARMS, ["K1", "K3"], sizes, 10 << 30)
    with pytest.raises(TooLarge, match=r"K1 and K3 need 20.0 GiB"):
        groups(["K1", "K3"], ["K1", "K3"], sizes, 19 << 30)


def test_a_cell_of_one_arm_or_of_none() -> None:
    assert groups(["K0"], ["K1", "K3"], SIZES, 10) == [["K0"]]
    assert groups(["K1"], ["K1", "K3"], SIZES, 10) == [["K1"]]
    assert groups(["K1", "K3"], ["K1", "K3"], SIZES, 20) == [["K1", "K3"]]
    assert groups([], ["K1", "K3"], SIZES, 20) == []
    with pytest.raises(TooLarge, match="K0 need"):
        groups(["K0"], ["K1"], SIZES, 9)


def test_an_anchor_that_is_out_takes_no_room() -> None:
    assert groups(["K0", "K1", "K2"], ["K1", "K3"], SIZES, 20) == [["K0", "K1"], ["K1", "K2"]]


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    anchors=st.integers(0, 2),
    room=st.integers(1, 200),
)
def test_groups_hold_every_arm_once_and_never_more_than_the_room(
    sizes: list[int], anchors: int, room: int
) -> None:
    arms = [f"K{i}" for i in range(len(sizes))]
    needed = dict(zip(arms, sizes))
    fixed = arms[:anchors]
    least = sum(needed[name] for name in fixed)
    least += max((needed[name] for name in arms[anchors:]), default=0)
    if least > room:
        with pytest.raises(TooLarge):
            groups(arms, fixed, needed, room)
        return
    found = groups(arms, fixed, needed, room)
    assert all(sum(needed[name] for name in group) <= room for group in found)
    assert all(set(fixed[: len(arms)]) <= set(group) for group in found)
    others = [name for group in found for name in group if name not in fixed]
    assert sorted(others) == sorted(arms[anchors:])
    if sum(sizes) <= room:
        assert found == [arms]
