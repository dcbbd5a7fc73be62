"""The oracle against hand-made values, and its bound against float32 arithmetic in bad orders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrial import reference
from kvtrial.contract import FP32, Profile
from kvtrial.hot.formats.fp16 import FP16
from kvtrial.hot.formats.q8_0 import Q8_0

FP16_ROWS, Q8_ROWS = FP16.profile, Q8_0.profile


def test_two_rows_by_hand() -> None:
    # Scores 0.5 * (2, 0) = (1, 0): weights e/(e+1) and 1/(e+1).
    q = [[1.0, 1.0]]
    k = [[[2.0, 0.0]], [[1.0, -1.0]]]
    v = [[[10.0, 0.0]], [[0.0, 20.0]]]
    w = 0.7310585786300049
    np.testing.assert_allclose(
        reference.attention(q, k, v, 0.5), [[10 * w, 20 * (1 - w)]], rtol=1e-15
    )


def test_parts_by_hand() -> None:
    q = [[1.0], [2.0]]
    k, v = [[[3.0]], [[1.0]]], [[[5.0]], [[7.0]]]
    part = reference.partial(q, k, v, 1.0)
    np.testing.assert_array_equal(part.max, [3.0, 6.0])
    np.testing.assert_allclose(part.sum, 1 + np.exp([-2.0, -4.0]), rtol=1e-15)
    np.testing.assert_allclose(part.output[:, 0], 5 + 7 * np.exp([-2.0, -4.0]), rtol=1e-15)


def test_query_heads_read_their_group() -> None:
    v = np.broadcast_to(np.arange(3.0)[None, :, None], (4, 3, 2))
    out = reference.attention(np.ones((6, 2)), np.ones((4, 3, 2)), v, 1.0)
    np.testing.assert_allclose(out[:, 0], [0, 0, 1, 1, 2, 2])


def test_invalid_rows_are_not_touched() -> None:
    k = np.ones((3, 1, 2))
    v = np.array([[[1.0, 2.0]], [[np.nan, np.inf]], [[3.0, 4.0]]])
    out = reference.attention(np.ones((1, 2)), k, v, 1.0, [True, False, True])
    np.testing.assert_allclose(out, [[2.0, 3.0]])
    nothing = reference.attention(np.ones((1, 2)), k, v, 1.0, [False] * 3)
    np.testing.assert_array_equal(nothing, [[0.0, 0.0]])
    np.testing.assert_array_equal(
        reference.tolerance(FP32, np.ones((1, 2)), k, v, 1.0, [False] * 3), [[0.0, 0.0]]
    )
    assert np.isneginf(reference.partial(np.ones((1, 2)), k, v, 1.0, [False] * 3).max).all()


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    q, v = np.ones((1, 1)), np.array([[[2.0]], [[3.0]]])
    low = np.full((2, 1, 1), -np.inf)
    part = reference.partial(q, low, v, 1.0)
    assert (part.max, part.sum, part.output) == (-np.inf, 0, 0)
    np.testing.assert_array_equal(reference.attention(q, low, v, 1.0), [[0.0]])
    np.testing.assert_array_equal(reference.tolerance(FP32, q, low, v, 1.0), [[0.0]])
    beside = np.array([[[-np.inf]], [[1.0]]])
    np.testing.assert_array_equal(reference.attention(q, beside, v, 1.0), [[3.0]])


def test_only_q8_queries_are_rounded_to_sixteen_bits() -> None:
    q = np.array([[1.0, -3.0, 0.25], [0.0, 0.0, 0.0]])
    steps = np.array([3.0, 0.0]) / 32767
    rounded = np.rint(q / np.where(steps, steps, 1)[:, None]) * steps[:, None]
    bound = Q8_ROWS.query_bound(q)
    assert (np.abs(rounded - q) <= bound).all()
    np.testing.assert_allclose(bound[0], 3 * 2.0**-16, rtol=0.02)
    assert not FP32.query_bound(q).any()
    assert not FP16_ROWS.query_bound(q).any()


def test_the_causal_mask_is_aligned_at_the_bottom_right() -> None:
    k = np.zeros((4, 1, 1))
    v = np.arange(1.0, 5.0).reshape(4, 1, 1)
    out = reference.attention_block(np.zeros((2, 1, 1)), k, v, 1.0)
    np.testing.assert_allclose(out[:, 0, 0], [(1 + 2 + 3) / 3, (1 + 2 + 3 + 4) / 4])


@pytest.mark.parametrize("profile", [FP32, FP16_ROWS, Q8_ROWS])
def test_storage_bound_holds_for_numpy_rounding(profile: Profile) -> None:
    x = np.random.default_rng(1).standard_normal((50, 70)).astype(np.float32)
    x[:10] *= np.float32(1e-6)
    x[10:20] *= np.float32(1e4)
    stored = _store(profile, x)
    assert (np.abs(stored - x.astype(np.float64)) <= profile.storage_bound(x)).all()


def test_storage_bound_is_not_generous() -> None:
    x = np.random.default_rng(1).standard_normal((500, 64)).astype(np.float32)
    for profile in (FP16_ROWS, Q8_ROWS):
        off = np.abs(_store(profile, x) - x.astype(np.float64))
        assert (off / profile.storage_bound(x)).max() > 0.8
    assert not FP32.storage_bound(x).any() and FP32.exact and not FP16_ROWS.exact


def _store(profile: Profile, x: np.ndarray) -> np.ndarray:
    """x as the profile keeps it, by NumPy alone, in float64."""
    if profile is FP32:
        return x.astype(np.float64)
    if profile is FP16_ROWS:
        return x.astype(np.float16).astype(np.float64)
    kept = np.empty(x.shape)
    for start in range(0, x.shape[-1], 32):
        block = x[..., start : start + 32]
        step = np.abs(block).max(axis=-1, keepdims=True) / np.float32(127)
        steps = np.divide(block, step, out=np.zeros_like(block), where=step > 0)
        kept[..., start : start + 32] = np.rint(steps) * step.astype(np.float16).astype(np.float64)
    return kept


def _online_float32(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, block: int
) -> np.ndarray:
    """Online softmax in float32, sums one term after the other: the worst order there is."""
    out = np.zeros(q.shape, np.float32)
    group = len(q) // k.shape[1]
    for head in range(len(q)):
        top, total = np.float32(-np.inf), np.float32(0)
        sums = np.zeros(q.shape[1], np.float32)
        for start in range(0, len(k), block):
            rows = range(start, min(start + block, len(k)))
            scores = []
            for n in rows:
                dot = np.float32(0)
                for a, b in zip(q[head], k[n, head // group], strict=True):
                    dot += a * b
                scores.append(dot * np.float32(scale))
            peak = max(top, *scores)
            shrink = np.exp(top - peak) if np.isfinite(top) else np.float32(0)
            total, sums, top = total * shrink, sums * shrink, peak
            for n, score in zip(rows, scores, strict=True):
                weight = np.exp(score - top)
                total += weight
                sums += weight * v[n, head // group]
        out[head] = sums / total
    return out


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 40),
    head_dim=st.sampled_from([1, 5, 32, 40]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    profile=st.sampled_from([FP32, FP16_ROWS, Q8_ROWS]),
    block=st.sampled_from([1, 7, 64]),
)
def test_the_bound_holds_for_online_softmax_in_float32(
    seed: int, n: int, head_dim: int, spread: float, profile: Profile, block: int
) -> None:
    random = np.random.default_rng(seed)
    q = (random.standard_normal((4, head_dim)) * spread).astype(np.float32)
    k, v = (random.standard_normal((2, n, 2, head_dim)) * spread).astype(np.float32)
    stored = [_store(profile, x).astype(np.float32) for x in (k, v)]
    got = _online_float32(q, *stored, 0.3, block)
    bound = reference.tolerance(profile, q, k, v, 0.3)
    assert (np.abs(got - reference.attention(q, k, v, 0.3)) <= bound).all()


@pytest.mark.parametrize("profile, limit", [(FP32, 2e-4), (FP16_ROWS, 2e-2), (Q8_ROWS, 0.3)])
def test_the_bound_is_tight_enough_to_catch_a_missing_row(profile: Profile, limit: float) -> None:
    random = np.random.default_rng(3)
    q = random.standard_normal((4, 64)).astype(np.float32)
    k, v = random.standard_normal((2, 100, 2, 64)).astype(np.float32)
    bound = reference.tolerance(profile, q, k, v, 0.125)
    assert bound.max() < limit
    if profile is not Q8_ROWS:
        for missing in range(100):
            valid = np.arange(100) != missing
            off = np.abs(
                reference.attention(q, k, v, 0.125, valid) - reference.attention(q, k, v, 0.125)
            )
            assert (off > bound).any()
