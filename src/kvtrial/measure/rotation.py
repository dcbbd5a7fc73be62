"""The rotation: all arms of a cell are open at once, and a round gives each of them one step.

What neighbours, clocks and hypervisors do to the machine lasts longer than a round. It meets all arms
alike and drops out of their ratio, where arms that ran one after the other, seconds apart, would each get
its own share of it. Within a round the order matters too: an arm finds the caches as the one before it
left them. So orders are rows of a Williams square: over a whole cycle each arm stands in each place
equally often, and follows each other arm equally often (Williams, Australian Journal of Scientific
Research A 2, 1949). Arms are relabelled at every cycle.

Pure functions; the loop that is timed is `kvtrial.measure.block.rotate`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence


class TooLarge(ValueError):
    """Arms that have to be open together don't fit into memory; the message has both sizes."""


def williams(n: int) -> list[list[int]]:
    """Rows of a Williams square of ``n`` treatments: n rows for even n, 2n for odd n.

    The first row is the zigzag 0, 1, n-1, 2, n-2, …; the others add 1 modulo n. For odd n each pair of
    neighbours is then balanced only together with the mirrored rows.
    """
    zigzag = [0] * n
    low, high = 1, n - 1
    for place in range(1, n):
        if place % 2:
            zigzag[place], low = low, low + 1
        else:
            zigzag[place], high = high, high - 1
    rows = [[(first + x) % n for x in zigzag] for first in range(n)]
    return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]


def orders(arms: Sequence[str], rounds: int, seed: int) -> list[list[str]]:
    """Who steps when: whole cycles of a Williams square, as many as ``rounds`` need.

    Parameters
    ----------
    arms : sequence of str
        All different.
    rounds : int
        At least so many; the last cycle is never cut.
    seed : int
        Relabels the arms and shuffles the rows of each cycle; the same seed gives the same orders.

    Returns
    -------
    list of list of str
        One order of all arms a round.
    """
    if len(set(arms)) != len(arms):
        raise ValueError(f"arms {list(arms)} are not all different")
    if not arms:
        return []
    square = williams(len(arms))
    draw = random.Random(seed)
    found: list[list[str]] = []
    for _ in range(math.ceil(rounds / len(square))):
        labels = sorted(arms)
        draw.shuffle(labels)
        found += [[labels[x] for x in row] for row in draw.sample(square, len(square))]
    return found


def rounds_of(arms: int, rounds: int) -> int:
    """How many rounds `orders` gives so many arms."""
    cycle = len(williams(arms)) if arms else 1
    return math.ceil(rounds / cycle) * cycle


def most_steps(arms: int, rounds: int, warmup: int, alone: int) -> int:
    """Tokens that a fast arm is fed at most, whichever of so many arms turn out to be slow.

    ``rounds`` are asked for, and whole cycles are run; ``warmup`` and ``alone`` are the steps before and after.
    """
    return warmup + max(rounds_of(fast, rounds) for fast in range(1, arms + 1)) + alone


def slow_arms(step_ns: Mapping[str, int], ratio: float, reference: str) -> list[str]:
    """Arms whose step takes more than ``ratio`` times the reference's, sorted.

    Not the fastest arm's: one of fewer bits leaves the reference itself far behind, and what is compared with it.
    Where the reference is out, the fastest one's.
    """
    if not step_ns:
        return []
    limit = ratio * step_ns.get(reference, min(step_ns.values()))
    return sorted(name for name, spent in step_ns.items() if spent > limit)


def turn(arms: Sequence[str], number: int) -> list[str]:
    """The arms with another one first each time."""
    first = number % len(arms) if arms else 0
    return [*arms[first:], *arms[:first]]


def groups(
    arms: Sequence[str], anchors: Sequence[str], needed: Mapping[str, int], room: int
) -> list[list[str]]:
    """Arms that are open together: one group where memory holds all, else several with the anchors in each.

    Parameters
    ----------
    arms : sequence of str
    anchors : sequence of str
        In every group, as far as they are among ``arms``: arms that share no group are compared through
        the first of them.
    needed : mapping
        Arm → bytes.
    room : int
        Bytes that all arms of a group may take.

    Raises
    ------
    TooLarge
        The anchors and one more arm do not fit.
    """
    fixed = [name for name in anchors if name in arms]
    others = [name for name in arms if name not in fixed]
    base = sum(needed[name] for name in fixed)
    largest = max((needed[name] for name in others), default=0)
    if base + largest > room:
        biggest = [name for name in others if needed[name] == largest][:1]
        raise TooLarge(
            f"{' and '.join([*fixed, *biggest])} need {(base + largest) / 2**30:.1f} GiB of memory "
            f"together, {room / 2**30:.1f} GiB are free"
        )
    found: list[list[str]] = []
    left = 0
    for name in others:
        if not found or needed[name] > left:
            found.append([])
            left = room - base
        found[-1].append(name)
        left -= needed[name]
    if not found and fixed:
        found = [[]]  # the anchors alone
    return [[name for name in arms if name in {*fixed, *group}] for group in found]
