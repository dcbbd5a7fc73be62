"""K1T, K2T and K3T, K transposed within the page: written, read, handed out, and attended to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvtrial import reference
from kvtrial.contract import Candidate, KVStore, StoreSpec
from kvtrial.hot import native, paged
from kvtrial.hot.formats import RowFormat
from kvtrial.hot.formats.fp16 import FP16T
from kvtrial.hot.formats.fp32 import FP32T


@dataclass(frozen=True)
class Arm:
    """An arm, the one that its rows are held against, and how far its attention may be off the oracle's
    of what it stores."""

    candidate: Candidate
    beside: Candidate
    atol: float

    def open_poisoned(self, spec: StoreSpec) -> KVStore:
        """A store whose rows without content are NaN."""
        if self.candidate is native.K3T:
            from kvtrial.hot._rust import RustStore as Store
        else:
            from kvtrial.hot._paged import PagedStore as Store
        store: KVStore = Store(spec, format=self.format, debug_poison=True)
        return store

    @property
    def format(self) -> RowFormat:
        return FP16T if self.candidate is paged.K2T else FP32T

    @property
    def element(self) -> Any:
        return np.float16 if self.candidate is paged.K2T else np.float32

    def kept(self, rows: Any) -> Any:
        """Rows as they are stored, in float32."""
        return rows.astype(self.element).astype(np.float32)


K1T = Arm(paged.K1T, paged.K1, 2e-5)
K2T = Arm(paged.K2T, paged.K2, 2e-5)
K3T = Arm(native.K3T, paged.K1T, 3e-6)
rust = pytest.mark.skipif(
    native.K3T.not_built is not None, reason=f"K3T is not built: {native.K3T.not_built}"
)
writable = pytest.mark.parametrize(
    "arm", [pytest.param(K1T, id="K1T"), pytest.param(K3T, id="K3T", marks=rust)]
)
every = pytest.mark.parametrize(
    "arm",
    [
        pytest.param(K1T, id="K1T"),
        pytest.param(K2T, id="K2T"),
        pytest.param(K3T, id="K3T", marks=rust),
    ],
)


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("arm", [K1T, K2T], ids=lambda arm: arm.candidate.name)
def test_a_page_is_k_by_element_and_v_by_row(arm: Arm) -> None:
    store = arm.candidate.open(StoreSpec(1, 4, 2, 12, page_tokens=32, budget_bytes=1 << 18))
    session = store.open_session()
    k, v = normal(1, 32, 2, 12), normal(2, 32, 2, 12)
    session.append(0, np.arange(32), k, v)
    # 12 elements are padded to 16: K with rows behind its own, V with lanes behind its own.
    element = arm.element
    page = np.frombuffer(session.page_bytes(0, 0), element).reshape(2, 2, 512)
    for head in range(2):
        assert np.array_equal(page[head, 0].reshape(16, 32)[:12], k[:, head].T.astype(element))
        assert np.array_equal(page[head, 1].reshape(32, 16)[:, :12], v[:, head].astype(element))
    assert store.page_nbytes == page.nbytes
    assert store.page_format == f"{arm.format.name}/head-major/P32/H2/D12"


@rust
@pytest.mark.parametrize("page_tokens", [16, 32, 64])
def test_a_page_of_rust_is_that_of_its_cython_twin_byte_by_byte(page_tokens: int) -> None:
    spec = StoreSpec(1, 4, 2, 20, page_tokens=page_tokens, budget_bytes=1 << 18)
    ours, theirs = native.K3T.open(spec), paged.K1T.open(spec)
    assert ours.page_format == theirs.page_format
    assert (ours.row_bytes, ours.page_nbytes) == (theirs.row_bytes, theirs.page_nbytes)
    k, v = normal(1, page_tokens + 3, 2, 20), normal(2, page_tokens + 3, 2, 20)
    sessions = [store.open_session() for store in (ours, theirs)]
    for session in sessions:
        session.append(0, np.arange(len(k)), k, v)
    for index in range(2):
        one, other = (bytes(session.page_bytes(0, index)) for session in sessions)
        assert one == other
    # 20 elements are padded to 24: K with rows behind its own.
    page = np.frombuffer(sessions[0].page_bytes(0, 0), np.float32).reshape(2, 2, -1)
    for head in range(2):
        tile = page[head, 0].reshape(24, page_tokens)
        assert np.array_equal(tile[:20], k[:page_tokens, head].T)


@every
@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("group", range(1, 17))
def test_any_group_and_any_head_dim(arm: Arm, group: int, page_tokens: int) -> None:
    """With NaN in all padding, in holes, and behind the end: nothing of it shows."""
    n, hidden = 3 * page_tokens + 5, [0, 1, 7, page_tokens + 2, 3 * page_tokens + 4]
    kept = np.setdiff1d(np.arange(n), hidden)
    for head_dim in (1, 7, 8, 20, 31, 40, 59, 64, 256):
        spec = StoreSpec(1, 2 * group, 2, head_dim, page_tokens=page_tokens, budget_bytes=1 << 21)
        store = arm.open_poisoned(spec)
        session = store.open_session(True)
        k, v = normal(1, n, 2, head_dim), normal(2, n, 2, head_dim)
        q = normal(3, 2 * group, head_dim)
        k[hidden], v[hidden] = np.nan, np.inf
        session.append(0, np.arange(n), k, v)
        session.invalidate(0, hidden)
        out = np.full_like(q, np.nan)
        session.attend(0, q, out, head_dim**-0.5)
        k, v = arm.kept(k[kept]), arm.kept(v[kept])
        right = reference.attention(q, k, v, head_dim**-0.5)
        np.testing.assert_allclose(out, right, rtol=0, atol=arm.atol)
        rows = session.read(0, kept)
        assert np.array_equal(rows[0], k) and np.array_equal(rows[1], v)
        store.close()


@rust
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_a_causal_block_is_each_of_its_rows(group: int) -> None:
    """Up to eight rows of the group share a pass in Rust: more lanes than a band holds."""
    n, rows = 70, 19
    spec = StoreSpec(1, 2 * group, 2, 31, page_tokens=32, budget_bytes=1 << 20)
    session = native.K3T.open(spec).open_session()
    k, v, q = normal(1, n, 2, 31), normal(2, n, 2, 31), normal(3, rows, 2 * group, 31)
    session.append(0, np.arange(n), k, v)
    out = np.full_like(q, np.nan)
    session.attend_block(0, q, out, 0.2)
    np.testing.assert_allclose(out, reference.attention_block(q, k, v, 0.2), rtol=0, atol=K3T.atol)


@every
def test_a_valid_row_that_is_not_finite_shows_as_beside_it(arm: Arm) -> None:
    k, v, q = normal(1, 40, 2, 20), normal(2, 40, 2, 20), normal(3, 6, 20)
    k[7, 0, 3], v[9, 1, 5], v[11, 1, 19] = np.nan, np.inf, np.nan
    shown = []
    for candidate in (arm.beside, arm.candidate):
        session = candidate.open(StoreSpec(1, 6, 2, 20, budget_bytes=1 << 18)).open_session()
        session.append(0, np.arange(40), k, v)
        out = np.empty_like(q)
        session.attend(0, q, out, 0.2)
        shown.append(out)
    assert np.isnan(shown[1][:3]).all() and np.isfinite(shown[1][3:, :5]).all()
    assert np.isposinf(shown[1][3:, 5]).all() and np.isnan(shown[1][3:, 19]).all()
    assert np.allclose(*shown, rtol=1e-4, atol=1e-5, equal_nan=True)


@writable
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_views_are_the_rows_of_the_page(arm: Arm, page_tokens: int) -> None:
    """Elements of a K row lie a page's tokens apart; its neighbours are not touched."""
    spec = StoreSpec(1, 4, 2, 20, page_tokens=page_tokens, budget_bytes=1 << 18)
    direct, appended = (arm.candidate.open(spec).open_session() for _ in range(2))
    k, v = normal(1, 12, 2, 20), normal(2, 12, 2, 20)
    for session, rows in ((direct, 3), (appended, 12)):
        session.append(0, np.arange(rows), k[:rows], v[:rows])
    for start, stop in ((3, 4), (4, 9), (9, 12)):
        k_view, v_view = direct.reserve_slot(0, np.arange(start, stop))
        assert k_view.shape == v_view.shape == (stop - start, 2, 20)
        assert k_view.strides == (4, 2 * page_tokens * 96, 4 * page_tokens)
        assert v_view.strides == (96, 2 * page_tokens * 96, 4)
        k_view[...], v_view[...] = k[start:stop], v[start:stop]
        direct.commit_slot(0, np.arange(start, stop))
    assert bytes(direct.page_bytes(0, 0)) == bytes(appended.page_bytes(0, 0))
