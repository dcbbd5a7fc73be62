"""The sampling plan: which blocks a cell has, which comes next, and which interval is valid for them.

Stages, the estimate, the decision, the simulation of its error rates and ``kvtrial try`` ask this object and
nobody else; another design is another text of this module.

A cell has ``first`` blocks. Where ``most`` is larger (the primary cell) it is extended once, by the spread of
the first blocks and never by their mean: to as many as would make the interval of the registered pair that
needs most as narrow as registered. The interval then is the wider of two: with the spread of the first blocks
alone, which covers exactly whatever number they asked for (Stein, Annals of Mathematical Statistics 16, 1945),
and with that of all. A void block is run again, until ``most_void`` runs of the cell were void.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from kvtrial.registration import Cell, Protocol

Logs = npt.NDArray[np.float64]


def cell_name(cell: Mapping[str, Any]) -> str:
    """``4096x1x1``: context, sessions, threads; ``4096x1x1-14q2kv`` where a head shape is named."""
    name = f"{cell['context']}x{cell['sessions']}x{cell['threads']}"
    shape = cell.get("shape", "")
    return f"{name}-{shape}" if shape else name


class Bounds(NamedTuple):
    """Means and two-sided bounds of log ratios, float64 of equal shape."""

    mean: Logs
    low: Logs
    high: Logs


@dataclass(frozen=True)
class Seen:
    """What a cell has given so far.

    Attributes
    ----------
    valid : collection of int
        Numbers of the blocks that count.
    void : int
        Runs that were void, since the stage was last asked for.
    logs : sequence of array (blocks,), optional
        Log ratios of the registered pairs over the valid blocks in their order; a pair that was not measured
        is not there.
    """

    valid: Collection[int] = ()
    void: int = 0
    logs: Sequence[Logs] = ()


@dataclass(frozen=True)
class Hopeless:
    """A cell can't be decided any more. ``again``: the same command may go on once the cause is gone."""

    reason: str
    remedy: str
    again: bool


@dataclass(frozen=True)
class SamplingPlan:
    """The plan of one cell.

    Attributes
    ----------
    first, most : int
        Blocks; ``most`` is ``first`` where the cell is never extended.
    half_width : float
        Of the log ratio, that the extension is to reach.
    pairs : tuple of (str, str)
        Those whose spread is looked at, as (numerator, denominator) in tokens/s.
    confidence : float
        Two-sided, of the interval that decides.
    most_void : int
        Void runs past which the cell is given up.
    """

    first: int
    most: int
    half_width: float = math.inf
    pairs: tuple[tuple[str, str], ...] = ()
    confidence: float = 0.95
    most_void: int = 0

    @classmethod
    def of_cell(cls, protocol: Protocol, cell: Cell) -> SamplingPlan:
        """The plan of a registered cell of whole decodes: the primary one alone can be extended."""
        rules = protocol["sampling"]
        extended = cell.get("role") == "primary"
        return cls(
            first=rules["blocks"],
            most=rules["most"] if extended else rules["blocks"],
            half_width=rules["half_width"],
            pairs=tuple((top, bottom) for top, bottom in rules["pairs"]),
            confidence=protocol["decision"]["confidence"],
            most_void=protocol["void"]["most"],
        )

    @classmethod
    def fixed(cls, protocol: Protocol, blocks: int) -> SamplingPlan:
        """A plan of just so many blocks, for stages that register their own number."""
        return cls(
            first=blocks,
            most=blocks,
            confidence=protocol["decision"]["confidence"],
            most_void=protocol["void"]["most"],
        )

    def wanted(self, logs: Logs) -> npt.NDArray[np.int64]:
        """How many blocks there are to be.

        Parameters
        ----------
        logs : ndarray of float64, shape (..., pairs, at least first)
            Only the first ``first`` blocks are looked at, and of them the spread alone.

        Returns
        -------
        ndarray of int64, shape (...)
        """
        if self.most == self.first or logs.shape[-2] == 0:
            return np.full(logs.shape[:-2], self.first, np.int64)
        spread = logs[..., : self.first].std(axis=-1, ddof=1).max(axis=-1)
        asked = np.ceil(
            (t_quantile(self.first - 1, self.confidence) * spread / self.half_width) ** 2
        )
        return np.clip(asked, self.first, self.most).astype(np.int64)

    def lost(self, void: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether so many void runs are too many."""
        return np.asarray(np.asarray(void) > self.most_void)

    def next(self, seen: Seen) -> int | Hopeless | None:
        """The number of the block that comes next; None where the cell has all; or why it never will."""
        if self.lost(seen.void):
            return Hopeless(
                f"{seen.void} runs of its blocks were void; at most {self.most_void} are allowed",
                "stop what disturbs this machine, then give the same command again: it goes on where it was",
                again=True,
            )
        number = next(n for n in range(len(seen.valid) + 1) if n not in seen.valid)
        return number if number < self.planned(seen.logs) else None

    def planned(self, logs: Sequence[Logs]) -> int:
        """How many blocks there are to be, by what `Seen` holds; the first ones until they are all there."""
        own = [pair[: self.first] for pair in logs if len(pair) >= self.first]
        return int(self.wanted(np.stack(own) if own else np.empty((0, self.first))))

    def bounds(self, logs: Logs, confidence: float | None = None) -> Bounds:
        """Mean and interval over the last axis, of blocks in their order.

        Parameters
        ----------
        logs : ndarray of float64, shape (..., n), n >= 2, all finite
        confidence : float, optional
            Another than the plan's.

        Returns
        -------
        Bounds
            Of shape (...). Values that are equal up to the rounding of logarithms give [mean, mean].
        """
        confidence = confidence or self.confidence
        n = logs.shape[-1]
        half = _half_width(logs, n, confidence)
        if n > self.first >= 2:
            half = np.maximum(half, _half_width(logs[..., : self.first], n, confidence))
        mean = logs.mean(axis=-1)
        return Bounds(mean, mean - half, mean + half)

    def more_blocks(self, logs: Logs, edge: float) -> int | None:
        """About how many more blocks would tell these log ratios (n,) from ``edge``; None where they are on it.

        By the spread and the mean that were seen: for people, never for a decision.
        """
        n, apart = logs.shape[-1], abs(float(logs.mean()) - edge)
        spread = float(logs.std(ddof=1))
        if apart <= spread * 1e-6:
            return None
        return max(
            1, math.ceil((t_quantile(max(n - 1, 8), self.confidence) * spread / apart) ** 2) - n
        )


def _half_width(logs: Logs, n: int, confidence: float) -> Logs:
    """Half-width of the interval of a mean of ``n``, with the spread of ``logs`` (..., seen)."""
    seen = logs.shape[-1]
    constant = np.ptp(logs, axis=-1) <= 1e-12 * np.maximum(1.0, np.abs(logs).max(axis=-1))
    half = t_quantile(seen - 1, confidence) * logs.std(axis=-1, ddof=1) / math.sqrt(n)
    return np.where(constant, 0.0, half)


@functools.cache
def t_quantile(freedom: float, confidence: float) -> float:
    """What a t variable stays within, on both sides, with probability ``confidence``."""
    return float(special.stdtrit(freedom, 0.5 + confidence / 2))


def block_seed(seed: int, cell: Cell, number: int) -> int:
    """The seed of a block: of its orders, the order of its pages, and what is checked in it."""
    return (seed + zlib.crc32(cell_name(cell).encode()) + 1_000_003 * number) % 2**32
