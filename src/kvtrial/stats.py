"""Intervals for paired block ratios: pure functions of numbers.

The unit of replication is the block (a fresh process). Ratios are compared as logarithms; the mean
log ratio's exponential is the estimate. Two-sided t intervals decide; bootstrap intervals stand beside
them for show, since a bootstrap of 6 to 12 blocks covers too little.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats as scipy_stats


class InsufficientData(ValueError):
    """Too few blocks for an interval."""


class PairingError(ValueError):
    """The two arms were not measured in the same blocks."""


class NonFinite(ValueError):
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


def tokens_per_s(
    step_ms: Sequence[float] | npt.NDArray[np.float64], tokens_per_step: int = 1
) -> float:
    """Total tokens over total time; never the mean of rates. ``step_ms`` (n,) in milliseconds."""
    steps = np.asarray(step_ms, np.float64)
    if steps.size == 0:
        raise InsufficientData("no steps; tokens/s needs at least one")
    total = float(steps.sum())
    if not math.isfinite(total) or total <= 0 or (steps < 0).any():
        raise NonFinite(f"step times sum to {total} ms; each must be finite and not negative")
    return steps.size * tokens_per_step / (total / 1000.0)


def paired_log_ratios(
    numerator: Mapping[int, float], denominator: Mapping[int, float]
) -> npt.NDArray[np.float64]:
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


def _checked(log_ratios: npt.ArrayLike, min_blocks: int) -> npt.NDArray[np.float64]:
    values = np.asarray(log_ratios, np.float64)
    if values.ndim != 1 or values.size < max(2, min_blocks):
        raise InsufficientData(f"{values.size} blocks; at least {max(2, min_blocks)} are needed")
    if not np.isfinite(values).all():
        raise NonFinite(f"log ratios hold {values[~np.isfinite(values)][0]}; all must be finite")
    return values


def _constant(values: npt.NDArray[np.float64]) -> bool:
    """Equal up to the rounding of the logarithms themselves."""
    return bool(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())))


def t_interval(
    log_ratios: npt.ArrayLike, confidence: float = 0.95, min_blocks: int = 2
) -> Interval:
    """Two-sided t interval of the mean log ratio, as ratios. Constant input gives [x, x]."""
    values = _checked(log_ratios, min_blocks)
    mean = float(values.mean())
    if _constant(values):
        half = 0.0
    else:
        spread = float(values.std(ddof=1)) / math.sqrt(values.size)
        half = float(scipy_stats.t.ppf(0.5 + confidence / 2, values.size - 1)) * spread
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), values.size)


def bootstrap_interval(
    log_ratios: npt.ArrayLike,
    *,
    method: str = "BCa",
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Bootstrap over blocks, for show beside the t interval. ``method``: "percentile" or "BCa"."""
    values = _checked(log_ratios, 2)
    mean = float(values.mean())
    if _constant(values):
        return Interval(math.exp(mean), math.exp(mean), math.exp(mean), values.size)
    with warnings.catch_warnings():
        # BCa of three or four blocks can degenerate; the NaN bounds are then shown as missing.
        warnings.simplefilter("ignore", scipy_stats.DegenerateDataWarning)
        result = scipy_stats.bootstrap(
            (values,),
            np.mean,
            method=method,
            confidence_level=confidence,
            n_resamples=resamples,
            rng=np.random.default_rng(seed),
        )
    low, high = result.confidence_interval
    return Interval(math.exp(mean), math.exp(low), math.exp(high), values.size)
