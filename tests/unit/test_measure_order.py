"""Case F6: no candidate may owe its figure to its place."""

from itertools import pairwise

import pytest
from kvtrial.measure.order import mirrored_orders


@pytest.mark.parametrize("n", range(1, 15))
def test_every_block_runs_everybody_and_the_next_one_is_mirrored(n):
    names = [f"c{i}" for i in range(n)]
    for blocks in range(0, 30):
        orders = mirrored_orders(names, blocks, seed=n)
        assert len(orders) == blocks
        assert all(sorted(o) == sorted(names) for o in orders)
        for first, second in zip(orders[0::2], orders[1::2]):
            assert second == first[::-1]


@pytest.mark.parametrize("n", range(2, 15))
@pytest.mark.parametrize("seed", [0, 1, 20260928])
def test_each_stands_in_each_place_equally_often_to_within_one(n, seed):
    names = [f"c{i}" for i in range(n)]
    middle = {n // 2} if n % 2 else set()
    for blocks in range(1, 61):
        orders = mirrored_orders(names, blocks, seed)
        for name in names:
            counts = {p: sum(o[p] == name for o in orders) for p in range(n)}
            outer = [c for p, c in counts.items() if p not in middle]
            assert max(outer) - min(outer) <= 1, (n, blocks, name, counts)
            assert max(counts.values()) - min(counts.values()) <= 2
        firsts = [o[0] for o in orders]
        assert max(map(firsts.count, names)) - min(map(firsts.count, names)) <= 1


def test_a_penalty_on_a_place_cancels():
    """+5% in the first place, or a drift along the block, changes no candidate's mean against
    another's."""
    names = [f"c{i}" for i in range(8)]
    orders = mirrored_orders(names, 24, seed=3)
    for cost in (lambda p: 1.05 if p == 0 else 1.0, lambda p: 1.0 + 0.01 * p):
        mean = {n: sum(cost(o.index(n)) for o in orders) / len(orders) for n in names}
        assert max(mean.values()) - min(mean.values()) < 1e-12


def test_the_seed_decides_and_the_order_of_names_does_not():
    names = ["K0", "K1", "K2", "K3"]
    assert mirrored_orders(names, 12, 1) == mirrored_orders(names[::-1], 12, 1)
    assert len({str(mirrored_orders(names, 12, s)) for s in range(20)}) > 10
    # Not one fixed succession for ever: each period draws again.
    orders = mirrored_orders([f"c{i}" for i in range(8)], 40, 5)
    followers = {(a, b) for o in orders for a, b in pairwise(o)}
    assert len(followers) > 8 * 3


def test_two_candidates_of_one_name_are_refused():
    with pytest.raises(ValueError, match="different"):
        mirrored_orders(["K0", "K0"], 2, 0)
    with pytest.raises(ValueError, match="-1"):
        mirrored_orders(["K0"], -1, 0)
