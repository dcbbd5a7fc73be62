"""The figure of two arms in a block: one number from their steps, whatever groups they ran in.

Where two arms were open together, it is the log of one's total time over the other's, over the rounds that
both took part in. Where they share no group, it is formed through the anchor, within the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

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


def _of_totals(pairs: np.ndarray) -> float:
    top, bottom = pairs.sum(axis=0)
    return _log(bottom) - _log(top)


def _of_rounds(pairs: np.ndarray) -> float:
    if not (np.isfinite(pairs).all() and (pairs > 0).all()):
        return math.nan
    return float(np.median(np.log(pairs[:, 1]) - np.log(pairs[:, 0])))


def _log(value: float) -> float:
    return math.log(value) if math.isfinite(value) and value > 0 else math.nan
