"""Numbers in and out of the hot stores: rounding, exp, attention, threads, far offsets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kvtrial.hot._kernels_simd import exp_for_tests
from kvtrial.hot._paged import PagedStore

from kvtrial import reference
from kvtrial.contract import NumericRange, StoreSpec
from kvtrial.hot import flat, paged
from kvtrial.hot.formats import row_format

ARMS = (flat.K0, flat.A1, paged.A2, paged.K1, paged.K1C, paged.K2, paged.K5, paged.K1T, paged.K2T)
ARMS += (paged.K5T, paged.K6, paged.K6N, paged.K7)
CANDIDATES = [arm for arm in ARMS if arm.not_built is None]
TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "q8_0": 6e-2, "int8rp": 6e-2}
TOLERANCE |= {"int4p": 0.8, "int4rp": 0.8, "int8r4rp": 0.8}


def softmax_attention(q, k, v, scale):
    """Plain float64 attention of q (H_q, D) over k, v (N, H_kv, D)."""
    group = len(q) // k.shape[1]
    out = np.zeros(q.shape)
    for head, row in enumerate(q.astype(np.float64)):
        scores = k[:, head // group].astype(np.float64) @ row * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ v[:, head // group]
    return out


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
@pytest.mark.parametrize("heads", [(9, 3), (14, 2), (5, 5), (16, 1)])
@pytest.mark.parametrize("head_dim", [1, 8, 59, 64, 100, 256])
def test_attention_is_softmax_attention(candidate, heads, head_dim):
    n = 133
    spec = StoreSpec(1, *heads, head_dim, page_tokens=32, budget_bytes=1 << 24)
    store = candidate.open(spec)
    session = store.open_session()
    k, v = normal(1, n, heads[1], head_dim), normal(2, n, heads[1], head_dim)
    q = normal(3, 6, heads[0], head_dim)
    session.append(0, np.arange(n), k, v)
    out = np.full_like(q, np.nan)
    scale = head_dim**-0.5
    session.attend(0, q[0], out[0], scale)
    allowed = TOLERANCE[candidate.profile.name]
    assert np.abs(out[0] - softmax_attention(q[0], k, v, scale)).max() < allowed
    session.attend_block(0, q, out, scale)
    for i in range(6):
        seen = n - 5 + i
        right = softmax_attention(q[i], k[:seen], v[:seen], scale)
        assert np.abs(out[i] - right).max() < allowed
    store.close()


def test_block_over_many_tiles():
    """More query rows and cached rows than one pair of matrix products takes."""
    n, rows = 700, 150
    store = paged.K1.open(StoreSpec(1, 6, 2, 40, budget_bytes=1 << 24))
    session = store.open_session()
    k, v, q = normal(1, n, 2, 40), normal(2, n, 2, 40), normal(3, rows, 6, 40)
    k[-1], v[-1] = np.nan, np.nan  # seen by the last query alone
    session.append(0, np.arange(n), k, v)
    out = np.zeros_like(q)
    session.attend_block(0, q, out, 0.2)
    for i in (0, 63, 64, 148):
        seen = n - rows + i + 1
        assert np.abs(out[i] - softmax_attention(q[i], k[:seen], v[:seen], 0.2)).max() < 2e-5
    assert np.isnan(out[-1]).all()


@pytest.mark.parametrize("name", ["K1", "K2", "K5", "K1T", "K2T", "K5T", "K6", "K7", "A2"])
def test_any_number_of_threads_gives_the_same_bits(name):
    n = 3000
    k, v, q = normal(1, n, 3, 64), normal(2, n, 3, 64), normal(3, 9, 64)
    shown = set()
    for threads in (1, 2, 3, 8):
        spec = StoreSpec(1, 9, 3, 64, budget_bytes=1 << 24, threads=threads)
        store = getattr(paged, name).open(spec)
        session = store.open_session()
        session.append(0, np.arange(n), k, v)
        out = np.zeros_like(q)
        for _ in range(3):
            session.attend(0, q, out, 0.125)
            shown.add(out.tobytes())
        store.close()
    assert len(shown) == 1


@pytest.mark.parametrize("arm", [paged.K2, paged.K2T], ids=lambda arm: arm.name)
def test_every_half_keeps_its_bits(arm):
    """All 65,536 patterns go in as float32 and come out as they went; NaN stays NaN."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    rows = halves.astype(np.float32).reshape(256, 1, 256)
    store = arm.open(StoreSpec(1, 1, 1, 256, budget_bytes=1 << 20))
    session = store.open_session()
    session.append(0, np.arange(256), rows, rows)
    back = session.read(0, np.arange(256))[0]
    # A signalling NaN comes back quiet.
    nan = np.isnan(rows)
    assert nan.sum() == 2046 and np.array_equal(np.isnan(back), nan)
    assert back[~nan].tobytes() == rows[~nan].tobytes()


@pytest.mark.parametrize("arm", [paged.K2, paged.K2T], ids=lambda arm: arm.name)
def test_halves_round_as_numpy_does(arm):
    """To nearest, ties to even: neighbours of every half, subnormals and the largest included."""
    halves = np.arange(31744, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = ((halves[:-1].astype(np.float64) + halves[1:]) / 2).astype(np.float32)
    near = np.concatenate(
        [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1e9))]
    )
    near = np.concatenate([near, -near, np.float32([2**-25, 65519.996, 1e-45])])
    near = np.resize(near, (-(-len(near) // 256), 1, 256))
    store = arm.open(StoreSpec(1, 1, 1, 256, budget_bytes=1 << 22))
    session = store.open_session()
    session.append(0, np.arange(len(near)), near, near)
    right = near.astype(np.float16).astype(np.float32)
    for rows in session.read(0, np.arange(len(near))):
        assert rows.tobytes() == right.tobytes()


def test_q8_steps_lose_less_than_the_plain_ones():
    """In no block more than max / 127 rounded to FP16 would, and an eighth less on the whole."""
    x = normal(9, 256, 1, 64)
    blocks = x.reshape(-1, 32).astype(np.float64)
    steps = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
    plain = ((np.rint(blocks / steps).clip(-127, 127) * steps - blocks) ** 2).sum(axis=1)
    store = paged.K5.open(StoreSpec(1, 1, 1, 64, budget_bytes=1 << 20))
    session = store.open_session()
    session.append(0, np.arange(256), x, x)
    back = session.read(0, np.arange(256))[0].reshape(-1, 32)
    ours = ((back - blocks) ** 2).sum(axis=1)
    assert (ours <= plain * (1 + 1e-4)).all()
    assert ours.sum() / plain.sum() < 0.9


@pytest.mark.parametrize("peak", [1.0, 1e4, 1e5])
def test_one_large_element_of_a_query_stays_inside_the_bound(peak):
    """K5 rounds a query by its largest element, which the bound left out: 1.6 times at 1e5."""
    q, k, v = normal(1, 2, 64), normal(2, 64, 1, 64), normal(3, 64, 1, 64)
    q[:, 5] = peak
    k[:, :, :32] = 0  # stored without an error, so nothing else covers the query's
    session = paged.K5.open(StoreSpec(1, 2, 1, 64, budget_bytes=1 << 20)).open_session()
    session.append(0, np.arange(64), k, v)
    out = np.zeros_like(q)
    session.attend(0, q, out, 0.125)
    error = np.abs(out - reference.attention(q, k, v, 0.125))
    assert (error <= reference.tolerance(paged.K5.profile, q, k, v, 0.125)).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_query_that_is_not_finite_shows_in_the_whole_head(value):
    """K5 rounds its queries: what can't be rounded must not come out as a number."""
    store = paged.K5.open(StoreSpec(1, 2, 1, 40, budget_bytes=1 << 20))
    session = store.open_session()
    rows = normal(4, 20, 1, 40)
    session.append(0, np.arange(20), rows, rows)
    q, out = normal(5, 2, 40), np.zeros((2, 40), np.float32)
    q[1, 33] = value
    session.attend(0, q, out, 0.2)
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@pytest.mark.parametrize("value", [65520.0, -65520.0, 7e4, 3e38])
@pytest.mark.parametrize("arm", [paged.K2, paged.K2T], ids=lambda arm: arm.name)
def test_halves_refuse_what_they_cannot_hold(arm, value):
    store = arm.open(StoreSpec(1, 1, 1, 8, budget_bytes=1 << 16))
    session = store.open_session()
    row = np.zeros((1, 1, 8), np.float32)
    bad = row.copy()
    bad[0, 0, 7] = value
    with pytest.raises(NumericRange, match="position 0"):
        session.append(0, [0], row, bad)
    assert session.length(0) == 0 and store.pages_free == store.pages_total


def test_exp_stays_within_an_ulp():
    """B25: and far below its peak it is 0, never a subnormal, which would be slow."""
    x = np.concatenate([np.linspace(-87.29, 0, 80_000), -np.logspace(-30, 1.9, 8_000)])
    x = np.ascontiguousarray(x, np.float32)
    out = np.empty_like(x)
    exp_for_tests(x, out)
    right = np.exp(x.astype(np.float64))
    ulp = np.spacing(right.astype(np.float32)).astype(np.float64)
    assert (np.abs(out - right) / ulp).max() <= 1
    ends = np.float32([0, -87.4, -1e6, -math.inf, math.nan, -103, -1e38, -0.0])
    out = np.empty_like(ends)
    exp_for_tests(ends, out)
    assert out[[0, 7]].tolist() == [1, 1] and not out[[1, 2, 3, 5, 6]].any() and np.isnan(out[4])


def test_padding_and_holes_may_hold_anything():
    """With NaN in every row and lane that has no content, nothing shows."""
    shapes = (("fp32", 59), ("fp32t", 59), ("fp16", 3), ("fp16t", 3), ("q8_0", 33))
    for format, head_dim in shapes:
        spec = StoreSpec(1, 4, 2, head_dim, budget_bytes=1 << 20)
        store = PagedStore(spec, format=row_format(format), debug_poison=True)
        session = store.open_session(True)
        k, v, q = normal(1, 50, 2, head_dim), normal(2, 50, 2, head_dim), normal(3, 4, head_dim)
        session.append(0, np.arange(50), k, v)
        session.invalidate(0, [0, 17, 49])
        kept = np.setdiff1d(np.arange(50), [0, 17, 49])
        out = np.zeros_like(q)
        session.attend(0, q, out, 0.3)
        right = softmax_attention(q, k[kept], v[kept], 0.3)
        assert np.abs(out - right).max() < TOLERANCE[format.rstrip("t")]
