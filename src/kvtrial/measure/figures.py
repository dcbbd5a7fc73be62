"""The figure of two arms in a block: one number from their steps, whatever groups they ran in.

Where two arms were open together, it is the log of one's total time over the other's, over the rounds that
both took part in. Where they share no group, it is formed through the anchor, within the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

#: Round → milliseconds of an arm's step in one group of a block.
Steps = Mapping[int, float]
#: A number of pairs (rounds, 2) of milliseconds.
_Figure = Callable[[np.ndarray], float]


def steps(
    rows: pd.DataFrame, metric: str = "m2/step_ms"
) -> dict[int, dict[tuple[int, str], Steps]]:
    """Block → (group, arm) → steps, from the rows of one cell's valid blocks."""
    own = rows[rows["metric"] == metric]
    found: dict[int, dict[tuple[int, str], Steps]] = {}
    for (block, group, arm), of_arm in own.groupby(["block", "group", "candidate"]):
        numbers = dict(zip(of_arm["index"].tolist(), of_arm["value"].tolist()))
        found.setdefault(int(block), {})[int(group), str(arm)] = numbers
    return found


class Block:
    """One block's steps.

    Parameters
    ----------
    steps : mapping
        (group, arm) → `Steps`.
    anchors : sequence of str
        Arms that are in every group; the first one that is there links arms that share none.
    """

    def __init__(self, steps: Mapping[tuple[int, str], Steps], anchors: Sequence[str] = ()) -> None:
        self._steps = steps
        self._anchors = anchors
        self.arms = {arm for _, arm in steps}
        self._known: dict[tuple[str, str, _Figure], float | None] = {}

    def log_speed(self, top: str, bottom: str) -> float | None:
        """log of the speed of ``top`` over that of ``bottom``: total time over total time, turned round.

        None where the block says nothing of the two.
        """
        return self._formed(top, bottom, _of_totals)

    def median_log_speed(self, top: str, bottom: str) -> float | None:
        """The median of the rounds' own log ratios: beside `log_speed`, it shows an arm with a tail."""
        return self._formed(top, bottom, _of_rounds)

    def all_steps(self, arm: str) -> list[float]:
        """Milliseconds of every timed step of an arm, in order of groups and rounds."""
        return [
            own[number]
            for (_, name), own in sorted(self._steps.items())
            if name == arm
            for number in sorted(own)
        ]

    def _formed(self, top: str, bottom: str, figure: _Figure) -> float | None:
        key = top, bottom, figure
        if key not in self._known:
            self._known[key] = self._form(*key)
        return self._known[key]

    def _form(self, top: str, bottom: str, figure: _Figure) -> float | None:
        direct = self._together(top, bottom, figure)
        if direct is not None:
            return direct
        for anchor in self._anchors:
            one, other = self._together(top, anchor, figure), self._together(anchor, bottom, figure)
            if one is not None and other is not None:
                return one + other
        return None

    def _together(self, top: str, bottom: str, figure: _Figure) -> float | None:
        pairs = []
        for group, arm in self._steps:
            if arm != top or (group, bottom) not in self._steps:
                continue
            ours, theirs = self._steps[group, top], self._steps[group, bottom]
            pairs += [(ours[n], theirs[n]) for n in sorted(ours.keys() & theirs.keys())]
        return figure(np.array(pairs, np.float64)) if pairs else None


def blocks(
    rows: pd.DataFrame, anchors: Sequence[str] = (), metric: str = "m2/step_ms"
) -> dict[int, Block]:
    """Block's number → its steps, ascending, from the rows of one cell's valid blocks."""
    return {number: Block(own, anchors) for number, own in sorted(steps(rows, metric).items())}


def log_speeds(blocks: Iterable[Block], top: str, bottom: str) -> list[float]:
    """`Block.log_speed` of those blocks that say something of the two, in their order."""
    return [log for block in blocks if (log := block.log_speed(top, bottom)) is not None]


def pair_logs(
    blocks: Sequence[Block], pairs: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], np.ndarray]:
    """Log ratios (blocks,) of those pairs that every block has, and whose times all mean something."""
    found = {pair: [block.log_speed(*pair) for block in blocks] for pair in pairs}
    return {
        pair: np.array(logs, np.float64)
        for pair, logs in found.items()
        if logs and all(log is not None and math.isfinite(log) for log in logs)
    }


def _of_totals(pairs: np.ndarray) -> float:
    if not _mean_something(pairs):
        return math.nan
    top, bottom = pairs.sum(axis=0)
    return math.log(bottom) - math.log(top)


def _of_rounds(pairs: np.ndarray) -> float:
    if not _mean_something(pairs):
        return math.nan
    return float(np.median(np.log(pairs[:, 1]) - np.log(pairs[:, 0])))


def _mean_something(pairs: np.ndarray) -> bool:
    """Whether each single time is a positive number: a sum would hide one that is not."""
    return bool(np.isfinite(pairs).all() and (pairs > 0).all())
