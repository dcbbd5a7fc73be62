"""Intervals from logarithms of block figures: pure functions of numbers.

The unit of replication is the block (fresh processes). Ratios are compared as logarithms; the mean log
ratio's exponential is the estimate. What is valid for a registered cell is its sampling plan's to say
(`kvtrial.measure.plan`); here is what needs no plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from kvtrial.measure.plan import SamplingPlan, t_quantile

Logs = npt.NDArray[np.float64]


class Unusable(ValueError):
    """Numbers from which no interval can be made; the kinds below say why."""


class InsufficientData(Unusable):
    """Too few blocks for an interval."""


class PairingError(Unusable):
    """The two arms were not measured in the same blocks."""


class NonFinite(Unusable):
    """A measurement is NaN, infinite, zero or negative where only a positive number has meaning."""


@dataclass(frozen=True)
class Interval:
    """An estimated ratio with its interval.

    ``low`` and ``high`` bound ``ratio`` at the confidence asked for; ``n`` counts blocks.
    """

    ratio: float
    low: float
    high: float
    n: int


def tokens_per_s(step_ms: Sequence[float] | Logs, tokens_per_step: int = 1) -> float:
    """Total tokens over total time; never the mean of rates. ``step_ms`` (n,) in milliseconds."""
    steps = np.asarray(step_ms, np.float64)
    if steps.size == 0:
        raise InsufficientData("no steps; tokens/s needs at least one")
    total = float(steps.sum())
    if not math.isfinite(total) or total <= 0 or (steps < 0).any():
        raise NonFinite(f"step times sum to {total} ms; each must be finite and not negative")
    return steps.size * tokens_per_step / (total / 1000.0)


def paired_log_ratios(numerator: Mapping[int, float], denominator: Mapping[int, float]) -> Logs:
    """log(numerator / denominator) by block, in block order.

    Parameters
    ----------
    numerator, denominator : mapping of block number to a positive number

    Raises
    ------
    PairingError
        A block is on one side only: pairs are never cut to the shorter side.
    NonFinite
        A value that has no logarithm.
    """
    if numerator.keys() != denominator.keys():
        odd = sorted(numerator.keys() ^ denominator.keys())
        raise PairingError(f"blocks {odd} have one arm only; pairs need both in the same block")
    blocks = sorted(numerator)
    for side in (numerator, denominator):
        for block in blocks:
            if not (math.isfinite(side[block]) and side[block] > 0):
                raise NonFinite(
                    f"block {block} has {side[block]}; only positive numbers have a ratio"
                )
    return np.array([math.log(numerator[b]) - math.log(denominator[b]) for b in blocks])


def check(log_ratios: npt.ArrayLike, min_blocks: int = 2) -> Logs:
    """Log ratios (n,) as an array, once it is known that an interval can be made of them."""
    values = np.asarray(log_ratios, np.float64)
    if values.ndim != 1 or values.size < max(2, min_blocks):
        raise InsufficientData(
            f"{values.size} valid blocks; {max(2, min_blocks)} are registered or needed"
        )
    if not np.isfinite(values).all():
        raise NonFinite(f"log ratios hold {values[~np.isfinite(values)][0]}; all must be finite")
    return values


def t_interval(log_ratios: npt.ArrayLike, confidence: float = 0.95) -> Interval:
    """Two-sided t interval of the mean log ratio, as ratios. Constant input gives [x, x]."""
    values = check(log_ratios)
    plan = SamplingPlan(first=values.size, most=values.size, confidence=confidence)
    mean, low, high = (math.exp(float(x)) for x in plan.bounds(values))
    return Interval(mean, low, high, values.size)


def welch_interval(top: npt.ArrayLike, bottom: npt.ArrayLike, confidence: float = 0.95) -> Interval:
    """Interval of exp(mean(top) - mean(bottom)) for logs of two sets of blocks that share none.

    For conditions that can't run in one process, such as one thread and all of them. The variances
    may differ (Welch's t interval); ``n`` counts the smaller set.
    """
    sides = [check(logs) for logs in (top, bottom)]
    difference = float(sides[0].mean() - sides[1].mean())
    shares = [float(side.var(ddof=1)) / side.size for side in sides]
    half = 0.0
    if (variance := sum(shares)) > 0:
        freedom = variance**2 / sum(v * v / (s.size - 1) for v, s in zip(shares, sides))
        half = t_quantile(freedom, confidence) * math.sqrt(variance)
    low, ratio, high = (math.exp(x) for x in (difference - half, difference, difference + half))
    return Interval(ratio, low, high, min(side.size for side in sides))


def _varying(log_ratios: npt.ArrayLike) -> Logs | None:
    """Checked log ratios of at least 3 blocks; None of fewer, or where they are constant."""
    values = check(log_ratios)
    interval = t_interval(values)
    return None if values.size < 3 or interval.low == interval.high else values


def drift_p(log_ratios: npt.ArrayLike, blocks: Sequence[int]) -> float | None:
    """Two-sided p of a slope over block order (t test of linear regression).

    Says whether the paired difference itself wandered during the run; reported, never used to void.
    None with fewer than 3 blocks or constant ratios, where a slope has no test.
    """
    values = _varying(log_ratios)
    if values is None:
        return None
    r = float(np.corrcoef(np.asarray(blocks, np.float64), values)[0, 1])
    freedom = values.size - 2
    if abs(r) >= 1.0:
        return 0.0
    return float(2 * special.stdtr(freedom, -abs(r) * math.sqrt(freedom / (1 - r * r))))


def lag1(log_ratios: npt.ArrayLike) -> float | None:
    """Autocorrelation of successive blocks, in their order: sum(d_i d_(i+1)) / sum(d_i^2), d from the
    mean.

    Intervals take blocks for independent, where it is about -1 / n; beyond 2 / sqrt(n) they cover too
    little. None with fewer than 3 blocks or constant ratios.
    """
    values = _varying(log_ratios)
    if values is None:
        return None
    apart = values - values.mean()
    return float((apart[:-1] * apart[1:]).sum() / (apart * apart).sum())
