"""K1T: K transposed within the page, written, read, handed out, and attended to."""

from __future__ import annotations

import numpy as np
import pytest
from kvtrial.hot._paged import PagedStore

from kvtrial.contract import StoreSpec
from kvtrial.hot import paged


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def right_attention(q, k, v, scale):
    """Plain float64 attention of q (H_q, D) over k, v (N, H_kv, D)."""
    group = len(q) // k.shape[1]
    heads = np.arange(len(q)) // group
    scores = np.einsum("hd,nhd->hn", q.astype(np.float64), k[:, heads].astype(np.float64)) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("hn,nhd->hd", weights, v[:, heads].astype(np.float64))


def test_a_page_is_k_by_element_and_v_by_row():
    store = paged.K1T.open(StoreSpec(1, 4, 2, 12, page_tokens=32, budget_bytes=1 << 18))
    session = store.open_session()
    k, v = normal(1, 32, 2, 12), normal(2, 32, 2, 12)
    session.append(0, np.arange(32), k, v)
    # 12 elements are padded to 16: K with rows behind its own, V with lanes behind its own.
    page = np.frombuffer(session.page_bytes(0, 0), np.float32).reshape(2, 2, 512)
    for head in range(2):
        assert np.array_equal(page[head, 0].reshape(16, 32)[:12], k[:, head].T)
        assert np.array_equal(page[head, 1].reshape(32, 16)[:, :12], v[:, head])
    assert store.page_nbytes == page.nbytes
    assert store.page_format == "fp32t/head-major/P32/H2/D12"


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("group", range(1, 17))
def test_any_group_and_any_head_dim(group, page_tokens):
    """With NaN in all padding, in holes, and behind the end: nothing of it shows."""
    n, hidden = 3 * page_tokens + 5, [0, 1, 7, page_tokens + 2, 3 * page_tokens + 4]
    kept = np.setdiff1d(np.arange(n), hidden)
    for head_dim in (1, 7, 8, 20, 31, 40, 64, 256):
        spec = StoreSpec(1, 2 * group, 2, head_dim, page_tokens=page_tokens, budget_bytes=1 << 21)
        store = PagedStore(spec, format="fp32t", debug_poison=True)
        session = store.open_session(True)
        k, v = normal(1, n, 2, head_dim), normal(2, n, 2, head_dim)
        q = normal(3, 2 * group, head_dim)
        k[hidden], v[hidden] = np.nan, np.inf
        session.append(0, np.arange(n), k, v)
        session.invalidate(0, hidden)
        out = np.full_like(q, np.nan)
        session.attend(0, q, out, head_dim**-0.5)
        right = right_attention(q, k[kept], v[kept], head_dim**-0.5)
        assert np.abs(out - right).max() < 2e-5
        rows = session.read(0, kept)
        assert np.array_equal(rows[0], k[kept]) and np.array_equal(rows[1], v[kept])
        store.close()


def test_a_valid_row_that_is_not_finite_shows_as_in_k1():
    k, v, q = normal(1, 40, 2, 20), normal(2, 40, 2, 20), normal(3, 6, 20)
    k[7, 0, 3], v[9, 1, 5], v[11, 1, 19] = np.nan, np.inf, np.nan
    shown = []
    for candidate in (paged.K1, paged.K1T):
        session = candidate.open(StoreSpec(1, 6, 2, 20, budget_bytes=1 << 18)).open_session()
        session.append(0, np.arange(40), k, v)
        out = np.empty_like(q)
        session.attend(0, q, out, 0.2)
        shown.append(out)
    assert np.isnan(shown[1][:3]).all() and np.isfinite(shown[1][3:, :5]).all()
    assert np.isposinf(shown[1][3:, 5]).all() and np.isnan(shown[1][3:, 19]).all()
    assert np.allclose(*shown, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_views_are_the_rows_of_the_page(page_tokens):
    """Elements of a K row lie a page's tokens apart; its neighbours are not touched."""
    spec = StoreSpec(1, 4, 2, 20, page_tokens=page_tokens, budget_bytes=1 << 18)
    direct, appended = (paged.K1T.open(spec).open_session() for _ in range(2))
    k, v = normal(1, 12, 2, 20), normal(2, 12, 2, 20)
    for session, rows in ((direct, 3), (appended, 12)):
        session.append(0, np.arange(rows), k[:rows], v[:rows])
    for start, stop in ((3, 4), (4, 9), (9, 12)):
        views = direct.reserve_slot(0, np.arange(start, stop))
        assert views[0].shape == views[1].shape == (stop - start, 2, 20)
        assert views[0].strides == (4, 2 * page_tokens * 96, 4 * page_tokens)
        assert views[1].strides == (96, 2 * page_tokens * 96, 4)
        views[0][...], views[1][...] = k[start:stop], v[start:stop]
        direct.commit_slot(0, np.arange(start, stop))
    assert bytes(direct.page_bytes(0, 0)) == bytes(appended.page_bytes(0, 0))
