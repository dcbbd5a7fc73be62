"""The float64 oracle: attention as the textbook has it, and how far float32 may stray from it.

Slow and obviously right. Nothing here is shared with a kernel; nothing here is fast.

Error bound
-----------
`tolerance` gives an absolute bound per output element, computed from the inputs. With u = 2^-24,
the unit roundoff of float32, and g(m) = m u / (1 - m u), the classical bound of m roundings (Higham,
*Accuracy and Stability of Numerical Algorithms*, section 3.1), a store may be off the oracle by

1. *Storage.* A stored element x is off by its profile's `storage_bound`: nothing for FP32; the others
   derive theirs beside their record.
2. *Scores.* A dot of length D, in any order, times scale, which is rounded to float32 itself:
   g(D + 2) |scale| sum |q k|, and |scale| sum |q| dk for storage. Where scores are integer the query is
   rounded too, and is off by the profile's `query_bound`, dq: |scale| sum (|k| + dk) dq.
3. *Weights.* exp(s - max) takes a rounded difference, u (|s| + |max|), and an exponential good to
   `EXP_ULPS` units. Online softmax rescales once for each rise of the running maximum: one more
   exponential and product each. The differences telescope but for their roundings, 2 u |max| each.
4. *Sums.* Numerator and denominator are sums of N terms, g(N) each in any order, and one division.
5. *Underflow.* A weight under 2^-126 may be flushed: N 2^-126 max |v|.
6. *Rounded weights.* Where values are integer, the weights of at most `NEIGHBOURS` rows are rounded together. The
   profile's ``weights`` gives a: each row then moves the output by the largest w times the largest a of the rows
   that may be its neighbours.

With weights off by factors within exp(+-e_n), in numerator and denominator, the output moves by at
most sum p_n |v_n| (exp(e_n + max e) - 1). The largest e_n is taken over the rows that carry weight;
the others fall under 5.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.ndimage import maximum_filter1d

from kvtrial.contract import Profile

F64 = npt.NDArray[np.float64]

#: Units in the last place that an exponential may be off by.
EXP_ULPS = 4
#: Rows whose weights may be rounded together.
NEIGHBOURS = 32

_U = 2.0**-24


class Softmax(NamedTuple):
    """Attention of one query token in pieces; a head without a valid row is as in `Partial`."""

    max: F64  # (H_q,)
    sum: F64  # (H_q,)
    output: F64  # (H_q, D), not divided


def partial(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    scale: float,
    valid: npt.ArrayLike | None = None,
) -> Softmax:
    """Scores, their maximum, and the sums of weights and weighted values, one head after the other.

    Parameters
    ----------
    q : (H_q, D)
    k, v : (N, H_kv, D)
        Query head h reads KV head h // (H_q // H_kv).
    scale : float
    valid : bool (N,), optional
        Rows that take part; by default all.
    """
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, head_dim = q64.shape
    rows = np.arange(len(k64)) if valid is None else np.flatnonzero(np.asarray(valid, bool))
    group = heads // k64.shape[1]
    top = np.full(heads, -np.inf)
    total = np.zeros(heads)
    output = np.zeros((heads, head_dim))
    for head in range(heads):
        keys, values = k64[rows, head // group], v64[rows, head // group]
        if len(rows) == 0:
            continue
        scores = scale * (keys * q64[head]).sum(axis=1)
        top[head] = scores.max()
        # Scores of -inf weigh nothing, all of them too: see the contract.
        weights = np.exp(scores - (0.0 if np.isneginf(top[head]) else top[head]))
        total[head] = weights.sum()
        output[head] = (weights[:, None] * values).sum(axis=0)
    return Softmax(top, total, output)


def attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    scale: float,
    valid: npt.ArrayLike | None = None,
) -> F64:
    """Softmax attention of one query token: (H_q, D) float64, zeros where nothing weighs anything."""
    parts = partial(q, k, v, scale, valid)
    out = np.zeros_like(parts.output)
    for head in range(len(out)):
        if parts.sum[head] != 0:  # NaN stays
            out[head] = parts.output[head] / parts.sum[head]
    return out


def attention_block(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    scale: float,
    valid: npt.ArrayLike | None = None,
) -> F64:
    """Causal attention of q (n, H_q, D), the newest n of the N positions: (n, H_q, D) float64.

    Row i stands at position N - n + i and sees the valid rows up to it (the mask is aligned at the
    bottom right).
    """
    queries, keys, values = np.asarray(q), np.asarray(k), np.asarray(v)
    mask = np.ones(len(keys), bool) if valid is None else np.asarray(valid, bool)
    first = len(keys) - len(queries)
    return np.stack(
        [
            attention(row, keys[:end], values[:end], scale, mask[:end])
            for end, row in enumerate(queries, start=first + 1)
        ]
    )


def tolerance(
    profile: Profile,
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    scale: float,
    valid: npt.ArrayLike | None = None,
) -> F64:
    """Absolute bound (H_q, D) on |store - oracle|, derived at the head of this module.

    Parameters are those of `attention`, with k and v as they were given to the store.
    """
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, head_dim = q64.shape
    rows = np.arange(len(k64)) if valid is None else np.flatnonzero(np.asarray(valid, bool))
    bound = np.zeros((heads, head_dim))
    if len(rows) == 0:
        return bound
    q_error = profile.query_bound(q64)
    k_error, v_error = profile.storage_bound(k64[rows]), profile.storage_bound(v64[rows])
    group = heads // k64.shape[1]
    n = len(rows)
    for kv_head in range(heads // group):
        keys, values = k64[rows, kv_head], v64[rows, kv_head]
        dk, stored_value = (np.ascontiguousarray(e[:, kv_head]) for e in (k_error, v_error))
        key_sizes, magnitude = np.abs(keys), np.abs(values) + stored_value
        moved = None if profile.weights is None else _largest_nearby(profile.weights(values))
        for head in range(kv_head * group, (kv_head + 1) * group):
            scores = scale * _rows_times(keys, q64[head])
            top = scores.max()
            if np.isneginf(top):  # exact zeros
                continue
            products = _rows_times(key_sizes, np.abs(q64[head]))
            stored = _rows_times(dk, np.abs(q64[head]))
            if q_error[head].any():  # a key of inf times 0 would be NaN
                stored += _rows_times(key_sizes + dk, q_error[head])
            score_error = abs(scale) * (_gamma(head_dim + 2) * (products + stored) + stored)
            running = np.maximum.accumulate(scores)
            rises = 1 + np.count_nonzero(np.diff(running))
            exponent_error = score_error + _U * (np.abs(scores) + abs(top))
            rescaling = rises * (2 * EXP_ULPS * _U + _U + 2 * _U * np.abs(running).max())
            weight_error = exponent_error + 2 * EXP_ULPS * _U + rescaling
            weights = np.exp(scores - top)
            weights /= weights.sum()
            # Rows without weight can't move the output, however wrong their scores: unless the error
            # itself could bring them back.
            heavy = scores + score_error > top - score_error.max() - 87
            worst = weight_error[heavy].max()
            factor = np.expm1(np.minimum(weight_error + worst, 700.0)) + 2 * _gamma(n) + 4 * _U
            bound[head] = (
                _weighted(weights * factor, magnitude)
                + _weighted(weights * (1 + factor), stored_value)
                + n * 2.0**-126 * magnitude.max(axis=0)
            )
            if moved is not None:
                rounded = weights * np.exp(np.minimum(weight_error + worst, 700.0))
                bound[head] += _weighted(_largest_nearby(rounded), moved)
    return bound


def _rows_times(rows: F64, x: F64) -> F64:
    """rows (N, D) times x (D,): (N,), without the products in memory."""
    out: F64 = np.einsum("nd,d->n", rows, x)
    return out


def _weighted(weights: F64, rows: F64) -> F64:
    """The sum of rows (N, D) by their weights (N,): (D,)."""
    out: F64 = np.einsum("n,nd->d", weights, rows)
    return out


def _largest_nearby(x: F64) -> F64:
    """Of each element of x (N, …), the largest among those of the rows less than `NEIGHBOURS` from its own."""
    return maximum_filter1d(x, 2 * NEIGHBOURS - 1, axis=0, mode="nearest")


def _gamma(roundings: int) -> float:
    return roundings * _U / (1 - roundings * _U)
