"""Intervals for paired block ratios: pure functions of numbers.

The unit of replication is the block (a fresh process). Ratios are compared as logarithms; the mean
log ratio's exponential is the estimate. Two-sided t intervals decide; bootstrap intervals stand beside
them for show, since a bootstrap of 6 to 12 blocks covers too little.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special


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


def check(log_ratios: npt.ArrayLike, min_blocks: int) -> npt.NDArray[np.float64]:
    """Log ratios (n,) as an array, once it is known that an interval can be made of them."""
    values = np.asarray(log_ratios, np.float64)
    if values.ndim != 1 or values.size < max(2, min_blocks):
        raise InsufficientData(f"{values.size} blocks; at least {max(2, min_blocks)} are needed")
    if not np.isfinite(values).all():
        raise NonFinite(f"log ratios hold {values[~np.isfinite(values)][0]}; all must be finite")
    return values


def t_bounds(
    logs: npt.NDArray[np.float64], confidence: float, first: int | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and two-sided t bounds over the last axis.

    Parameters
    ----------
    logs : ndarray of float64, shape (..., n)
        Log ratios by block, n >= 2, all finite.
    confidence : float
        0.95 for a 95% interval.
    first : int, optional
        How many of the blocks fixed the number of all, see `rule.blocks_wanted`. The interval
        is then the wider of two: with the spread of those alone, which covers exactly whatever number
        they asked for (Stein, Annals of Mathematical Statistics 16, 1945), and with that of all.

    Returns
    -------
    mean, low, high : ndarray of float64, shape (...)
        Logs. Values that are equal up to the rounding of the logarithms give [mean, mean].
    """
    n = logs.shape[-1]
    mean = logs.mean(axis=-1)
    half = _half_width(logs, n, confidence)
    if first is not None and first < n:
        half = np.maximum(half, _half_width(logs[..., :first], n, confidence))
    return mean, mean - half, mean + half


def _half_width(
    logs: npt.NDArray[np.float64], n: int, confidence: float
) -> npt.NDArray[np.float64]:
    """Half-width of the interval of a mean of ``n``, with the spread of ``logs`` (..., seen)."""
    seen = logs.shape[-1]
    constant = np.ptp(logs, axis=-1) <= 1e-12 * np.maximum(1.0, np.abs(logs).max(axis=-1))
    half = t_quantile(seen - 1, confidence) * logs.std(axis=-1, ddof=1) / math.sqrt(n)
    return np.where(constant, 0.0, half)


@functools.cache
def t_quantile(freedom: float, confidence: float) -> float:
    """What a t variable stays within, on both sides, with probability ``confidence``."""
    return float(special.stdtrit(freedom, 0.5 + confidence / 2))


def t_interval(
    log_ratios: npt.ArrayLike,
    confidence: float = 0.95,
    min_blocks: int = 2,
    first: int | None = None,
) -> Interval:
    """Two-sided t interval of the mean log ratio, as ratios. Constant input gives [x, x].

    ``first`` is that of `t_bounds`.
    """
    values = check(log_ratios, min_blocks)
    mean, low, high = (float(bound) for bound in t_bounds(values, confidence, first))
    return Interval(math.exp(mean), math.exp(low), math.exp(high), values.size)


def welch_interval(
    top: npt.ArrayLike, bottom: npt.ArrayLike, confidence: float = 0.95, min_blocks: int = 2
) -> Interval:
    """Interval of exp(mean(top) - mean(bottom)) for logs of two sets of blocks that share none.

    For conditions that can't run in one process, such as one thread and all of them. The variances
    may differ (Welch's t interval); ``n`` counts the smaller set.
    """
    sides = [check(logs, min_blocks) for logs in (top, bottom)]
    difference = float(sides[0].mean() - sides[1].mean())
    shares = [float(side.var(ddof=1)) / side.size for side in sides]
    half = 0.0
    if (variance := sum(shares)) > 0:
        freedom = variance**2 / sum(v * v / (s.size - 1) for v, s in zip(shares, sides))
        half = t_quantile(freedom, confidence) * math.sqrt(variance)
    low, ratio, high = (math.exp(x) for x in (difference - half, difference, difference + half))
    return Interval(ratio, low, high, min(side.size for side in sides))


def _varying(log_ratios: npt.ArrayLike) -> npt.NDArray[np.float64] | None:
    """Checked log ratios of at least 3 blocks; None of fewer, or where they are constant."""
    values = check(log_ratios, 2)
    _, low, high = t_bounds(values, 0.95)
    return None if values.size < 3 or low == high else values


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


#: methods of `bootstrap_intervals`
BOOTSTRAPS = ("percentile", "BCa", "studentised")


@functools.lru_cache(maxsize=8)
def _resamples(n: int, resamples: int, seed: int) -> npt.NDArray[np.int64]:
    """Indices (n, resamples), drawn as `scipy.stats.bootstrap` draws them."""
    drawn = np.random.default_rng(seed).integers(0, n, (resamples, n)).T.copy()
    drawn.setflags(write=False)
    return drawn


def bootstrap_intervals(
    log_ratios: npt.ArrayLike,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Bootstraps over blocks, for show beside the t interval; method → interval.

    The methods are those of `BOOTSTRAPS`; "studentised" is the bootstrap-t of Efron and Tibshirani, An
    Introduction to the Bootstrap, section 12.5. A bound is NaN where the method has none (BCa of
    blocks whose resampled means all lie on one side, a studentised resample of equal blocks so
    frequent that it is the quantile).
    """
    values = check(log_ratios, 2)
    mean, low, high = (float(bound) for bound in t_bounds(values, confidence))
    bounds = dict.fromkeys(BOOTSTRAPS, (low, high))
    if low < high:
        drawn = values[_resamples(values.size, resamples, seed)]
        means = drawn.mean(axis=0)
        tails = np.array([0.5 - confidence / 2, 0.5 + confidence / 2])
        bounds = {
            "percentile": _quantiles(means, tails),
            "BCa": _quantiles(means, _bca_tails(values, means, tails)),
            "studentised": _studentised(values, drawn, means, tails),
        }
    return {
        method: Interval(math.exp(mean), math.exp(low), math.exp(high), values.size)
        for method, (low, high) in bounds.items()
    }


def _quantiles(
    means: npt.NDArray[np.float64], tails: npt.NDArray[np.float64]
) -> tuple[float, float]:
    if not np.isfinite(tails).all():
        return math.nan, math.nan
    low, high = np.quantile(means, tails)
    return float(low), float(high)


def _studentised(
    values: npt.NDArray[np.float64],
    drawn: npt.NDArray[np.float64],
    means: npt.NDArray[np.float64],
    tails: npt.NDArray[np.float64],
) -> tuple[float, float]:
    # Resamples of one block alone have no spread: their t is infinite, which puts them in the tails.
    errors = drawn.std(axis=0, ddof=1)
    shift = means - values.mean()
    spread = errors > 1e-12 * np.abs(values).max()
    t = np.divide(shift, errors, out=np.copysign(np.full_like(shift, np.inf), shift), where=spread)
    # The order statistics themselves: between an infinite t and its neighbour nothing interpolates.
    upper, lower = np.quantile(t, tails[::-1], method="nearest")
    spread_of_all = float(values.std(ddof=1))
    bounds = values.mean() - spread_of_all * np.array([upper, lower])
    low, high = np.where(np.isfinite(bounds), bounds, np.nan)
    return float(low), float(high)


def _bca_tails(
    values: npt.NDArray[np.float64],
    means: npt.NDArray[np.float64],
    tails: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """The shares of the resampled means that bound the bias-corrected and accelerated interval."""
    # A resample that is a permutation of the blocks has their mean, but for the order of rounding.
    apart_by = means - values.mean()
    tied = np.abs(apart_by) <= 1e-12 * max(1.0, float(np.abs(values).max()))
    below = ((apart_by < 0) & ~tied).mean() + tied.mean() / 2
    if not 0 < below < 1:
        return np.full_like(tails, np.nan)
    bias = special.ndtri(below)
    left_out = (values.sum() - values) / (values.size - 1)  # jackknife means
    apart = left_out.mean() - left_out
    acceleration = (apart**3).sum() / (6 * (apart**2).sum() ** 1.5)
    z = bias + special.ndtri(tails)
    return special.ndtr(bias + z / (1 - acceleration * z))
