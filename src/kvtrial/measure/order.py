"""Who runs when: orders that give no candidate a better place.

Blocks come in pairs, the second with the first one's order mirrored, so that a drift over a block
cancels within the pair. Over pairs the candidates move through the places like the carriages of a
ring: after any number of blocks each has stood in each place equally often, to within one. Only the
middle place of an odd number of candidates, which mirroring leaves where it is, comes twice at a
time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


def mirrored_orders(names: Sequence[str], blocks: int, seed: int) -> list[list[str]]:
    """One order of ``names`` a block.

    Parameters
    ----------
    names : sequence of str
        The candidates, all different.
    blocks : int
        How many orders; block 2i + 1 mirrors block 2i.
    seed : int
        The same seed gives the same orders, on any machine.

    Returns
    -------
    list of list of str
    """
    n = len(names)
    if len(set(names)) != n:
        raise ValueError(f"candidates {list(names)} are not all different")
    if blocks < 0:
        raise ValueError(f"blocks is {blocks}; give 0 or more")
    # Positions on the ring: down the first half of the places, then down the second from its far
    # end. A stretch of neighbours then meets each place or its mirror image equally often.
    places = list(range((n + 1) // 2)) + [n - 1 - p for p in range(n // 2)]
    period = n if n % 2 else max(n // 2, 1)  # pairs after which every place has come equally often
    draw = random.Random(seed)
    orders: list[list[str]] = []
    ring: list[str] = []
    for pair in range((blocks + 1) // 2):
        if pair % period == 0:
            ring = sorted(names)
            draw.shuffle(ring)
        order = [""] * n
        for i, name in enumerate(ring):
            order[places[(i - pair) % n]] = name
        orders += [order, order[::-1]]
    return orders[:blocks]
