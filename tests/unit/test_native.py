"""K3 and K3T through the real boundary: numbers, typed errors, contained panics, memory that outlives close.

The contract as a whole is the conformance suite's; here is what only the native arm can get wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvtrial import contract
from kvtrial.contract import StoreSpec
from kvtrial.host import build
from kvtrial.host.build import ROOT
from kvtrial.hot import native, paged
from kvtrial.hot.formats import row_format
from kvtrial.measure import allocations

if native.K3.not_built is not None:
    pytest.skip(f"the Rust library is not there: {native.K3.not_built}", allow_module_level=True)

from kvtrial.hot import _rust


@pytest.fixture(params=["fp32", "fp32t"])
def form(request: pytest.FixtureRequest) -> Any:
    """How rows are stored: K as it was appended, or transposed within the page."""
    return request.param


#: A score over transposed K is one chain of head_dim additions; by rows it is eight short ones.
ATOL = {"fp32": 3e-6, "fp32t": 1e-5}


def open_store(*, form: str = "fp32", poison: bool = False, **changes: Any) -> Any:
    shape = {"layers": 2, "q_heads": 6, "kv_heads": 2, "head_dim": 59, "budget_bytes": 1 << 22}
    return _rust.RustStore(
        StoreSpec(**(shape | changes)), format=row_format(form), debug_poison=poison
    )


def rows(store: Any, n: int, seed: int = 0) -> Any:
    spec = store.spec
    shape = (2, n, spec.local_kv_heads, spec.head_dim)
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def fill(session: Any, start: int, stop: int, seed: int = 0) -> None:
    for layer in range(session.store.spec.layers):
        k, v = rows(session.store, stop - start, seed + layer)
        session.append(layer, np.arange(start, stop), k, v)


def softmax_attention(q: Any, k: Any, v: Any, scale: float) -> Any:
    """(H_q, D) in float64, one head at a time."""
    out = np.zeros(q.shape)
    group = len(q) // k.shape[1]
    for head in range(len(q)):
        scores = k[:, head // group].astype(np.float64) @ q[head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[:, head // group].astype(np.float64) / weights.sum()
    return out


# --- numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(9, 3), (14, 2), (4, 1), (16, 1), (3, 3)])
@pytest.mark.parametrize("head_dim", [1, 59, 64, 256])
def test_attention_is_the_softmax_of_all_rows(
    heads: tuple[int, int], head_dim: int, form: str
) -> None:
    for page_tokens, n in ((16, 1), (16, 333), (64, 130)):
        store = open_store(
            form=form,
            layers=1,
            q_heads=heads[0],
            kv_heads=heads[1],
            head_dim=head_dim,
            page_tokens=page_tokens,
        )
        session = store.open_session()
        k, v = rows(store, n)
        session.append(0, np.arange(n), k, v)
        q = np.random.default_rng(1).standard_normal((heads[0], head_dim), np.float32)
        out = np.full_like(q, np.nan)
        session.attend(0, q, out, 0.2)
        np.testing.assert_allclose(out, softmax_attention(q, k, v, 0.2), atol=ATOL[form])
        store.close()


def test_spans_and_holes_merge_to_one_softmax(form: str) -> None:
    store = open_store(
        form=form, layers=1, q_heads=14, kv_heads=2, head_dim=64, budget_bytes=1 << 24
    )
    session = store.open_session(position_holes_allowed=True)
    n = 3333  # four spans, the last of them short
    k, v = rows(store, n)
    session.append(0, np.arange(n), k, v)
    holes = np.r_[0, 16:32, 900:2100:2, 2100:3200, n - 2]
    session.invalidate(0, holes)
    kept = np.setdiff1d(np.arange(n), holes)
    q = np.random.default_rng(2).standard_normal((14, 64), np.float32)
    out = np.full_like(q, np.nan)
    session.attend(0, q, out, 0.3)
    np.testing.assert_allclose(out, softmax_attention(q, k[kept], v[kept], 0.3), atol=ATOL[form])
    parts = [session.attend_partial(0, q, 0.3, positions=p) for p in ((0, 1500), (1500, 1 << 40))]
    np.testing.assert_allclose(contract.merge(parts), out, atol=ATOL[form])


@pytest.mark.parametrize("n", [300, 5000])
def test_threads_share_the_work_and_change_no_bit(n: int, form: str) -> None:
    seen = set()
    for threads in (1, 2, 3):
        store = open_store(form=form, layers=1, budget_bytes=1 << 23, threads=threads)
        session = store.open_session()
        fill(session, 0, n)
        q = np.random.default_rng(5).standard_normal((9, 6, 59), np.float32)
        out, block = np.full_like(q[0], np.nan), np.full_like(q, np.nan)
        session.attend(0, q[0].copy(), out, 0.3)
        session.attend_block(0, q, block, 0.3)
        seen.add(out.tobytes() + block.tobytes())
        np.testing.assert_allclose(
            out, softmax_attention(q[0], *session.read(0, np.arange(n)), 0.3), atol=ATOL[form]
        )
    assert len(seen) == 1


def test_a_block_sees_no_later_row_even_if_it_holds_inf(form: str) -> None:
    store = open_store(form=form, layers=1)
    session = store.open_session()
    k, v = rows(store, 40)
    v[39] = np.inf
    session.append(0, np.arange(40), k, v)
    q = np.random.default_rng(3).standard_normal((21, 6, 59), np.float32)
    out = np.full_like(q, np.nan)
    session.attend_block(0, q, out, 0.3)
    for i in range(20):
        right = softmax_attention(q[i], k[: 20 + i], v[: 20 + i], 0.3)
        np.testing.assert_allclose(out[i], right, atol=ATOL[form])
    assert np.isposinf(out[20]).all()


def test_rows_without_content_never_show(form: str) -> None:
    """A poisoned pool, with NaN wherever nothing is stored, gives the clean pool's bits."""
    seen = []
    for poison in (False, True):
        store = open_store(form=form, poison=poison)
        session = store.open_session(position_holes_allowed=True)
        fill(session, 0, 37)
        branch = session.begin_branch()
        fill(branch, 40, 45, seed=7)
        branch.commit_prefix(6)
        session.rollback_tail(2)
        slot = session.reserve_slot(0, [41, 42])
        if poison:
            assert np.isnan(slot[0]).all() and np.isnan(slot[1]).all()
        slot[0][...], slot[1][...] = rows(store, 2, 9)
        session.commit_slot(0, [41, 42])
        q = np.random.default_rng(4).standard_normal((6, 59), np.float32)
        out = np.full_like(q, np.nan)
        session.attend(0, q, out, 0.3)
        assert np.isfinite(out).all()
        seen.append((out.tobytes(), session.read(0, np.flatnonzero(session.valid(0)))[0].tobytes()))
    assert seen[0] == seen[1]


class _Span(ctypes.Structure):
    """`kv_span` of native/kv_kernel.h."""

    _fields_: ClassVar = [
        ("pool", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in ("page_ids", "valid")],
        *[(name, ctypes.c_int64) for name in ("first_slot", "last_slot", "row_bytes")],
        *[
            (name, ctypes.c_int32)
            for name in ("page_tokens", "head_dim", "group", "kv_heads", "first_head", "last_head")
        ],
        ("scale", ctypes.c_float),
        *[(name, ctypes.c_void_p) for name in ("q", "max", "sum", "output")],
    ]


@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (7, 59), (16, 256)])
def test_the_kernel_reads_pages_that_another_owner_holds(group: int, head_dim: int) -> None:
    """K4's door: pages in any order, NaN in all padding and in every slot that is not valid."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = get(_rust.kernel_capsule(), b"kvtrial.kv_kernel")
    kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Span))(address)

    random = np.random.default_rng(8)
    kv_heads, tokens, stride = 2, 16, -(-head_dim // 8) * 8
    pool = np.full((5, kv_heads, 2, tokens, stride), np.nan, np.float32)
    ids = np.array([3, -1, 0, 4], np.int32)
    valid = np.array([0xFFFF, 0, 0xA5F0, 0x0003], np.uint64)
    slots = [s for s in range(64) if int(valid[s // 16]) >> s % 16 & 1]
    for s in slots:
        pool[ids[s // 16], :, :, s % 16, :head_dim] = random.standard_normal((2, 2, head_dim))
    q = random.standard_normal((kv_heads * group, head_dim), np.float32)
    top, total = np.full(len(q), 7, np.float32), np.full(len(q), 7, np.float32)
    out = np.full_like(q, 7)
    first, last = 5, 49
    span = _Span(
        *(pool.ctypes.data, pool[0].nbytes, ids.ctypes.data, valid.ctypes.data, first, last),
        *(4 * stride, tokens, head_dim, group, kv_heads, 1, 2, 0.3),
        *(a.ctypes.data for a in (q, top, total, out)),
    )
    assert kernel(ctypes.byref(span)) == 0
    seen = [s for s in slots if first <= s < last]
    k, v = (np.stack([pool[ids[s // 16], :, i, s % 16, :head_dim] for s in seen]) for i in (0, 1))
    right = softmax_attention(q, k, v, 0.3)
    np.testing.assert_allclose(out[group:] / total[group:, None], right[group:], atol=3e-6)
    scores = np.einsum("nd,hd->hn", k[:, 1], q[group:]).astype(np.float64) * 0.3
    np.testing.assert_allclose(top[group:], scores.max(axis=1), rtol=1e-5)
    assert (out[:group] == 7).all() and (top[:group] == 7).all(), "another head was written"


# --- sessions ---------------------------------------------------------------------------------------


def test_a_branch_that_gave_its_fork_page_back_still_commits_the_parents_rows(form: str) -> None:
    store = open_store(form=form, layers=1)
    session = store.open_session(position_holes_allowed=True)
    fill(session, 0, 21)
    k, v = rows(store, 21)
    branch = session.begin_branch()
    branch.invalidate(0, np.arange(16, 21))
    assert branch.page_table(0).page_ids.tolist() == [0]
    fill(branch, 21, 23, seed=5)
    branch.commit_prefix(2)
    assert session.valid(0).tolist() == [True] * 23
    for got, right in zip(session.read(0, np.arange(21)), (k, v), strict=True):
        np.testing.assert_array_equal(got, right)
    for got, right in zip(session.read(0, [21, 22]), rows(store, 2, 5), strict=True):
        np.testing.assert_array_equal(got, right)
    assert store.pages_free == store.pages_total - 2


def test_commit_and_rollback_move_pages_and_copy_none() -> None:
    store = open_store(layers=1)
    session = store.open_session()
    fill(session, 0, 32)
    branch = session.begin_branch()
    fill(branch, 32, 70)
    table = branch.page_table(0).page_ids.tolist()
    branch.commit_prefix(38)
    assert session.page_table(0).page_ids.tolist() == table
    session.rollback_tail(30)
    assert session.page_table(0).page_ids.tolist() == table[:3]
    assert store.reference_counts()[table].tolist() == [1, 1, 1, 0, 0]


def test_views_outlive_their_store() -> None:
    """The pool is unmapped with the last view into it, not by `close`."""
    store = open_store()
    session = store.open_session()
    whole = list(range(16))
    k, v = session.reserve_slot(0, whole)
    k[...] = 1.5
    session.commit_slot(0, whole)
    session.append(1, whole, *rows(store, 16))
    page = session.page_bytes(0, 0)
    store.close()
    del store
    with pytest.raises(contract.StaleOwner, match="store is closed"):
        session.length(0)
    del session
    assert k.base is not None and v.shape == (16, 2, 59)
    k[1] += 1
    assert np.frombuffer(page, np.float32)[:59].tolist() == [1.5] * 59
    assert np.frombuffer(page, np.float32)[64 : 64 + 59].tolist() == [2.5] * 59


# --- errors -----------------------------------------------------------------------------------------


def _refusals(store: Any, session: Any) -> dict[str, tuple[type, str, Callable[[], Any]]]:
    """Every code of the boundary that a caller can bring about: error, words, call."""
    k, v = rows(store, 2)
    q = np.zeros((6, 59), np.float32)
    stale = store.open_session()
    stale.close()
    many = rows(store, 4000)
    e = contract
    return {
        "layer": (e.InvalidArgument, r"layer is 2; allowed: 0 to 2", lambda: session.length(2)),
        "order": (
            e.InvalidArgument,
            r"position 5 follows 6",
            lambda: session.append(0, [6, 5], k, v),
        ),
        "position": (
            e.OutOfRange,
            r"position is 4; allowed: 5 to 65536 - 1",
            lambda: session.append(0, [4, 5], k, v),
        ),
        "no row": (e.OutOfRange, r"position is 5; allowed: 0 to 5", lambda: session.read(0, [5])),
        "hole": (
            e.HoleNotAllowed,
            r"position 5 would be a hole.*position_holes_allowed",
            lambda: session.append(0, [6, 7], k, v),
        ),
        "pages": (
            e.PoolExhausted,
            r"pages are needed and \d+ of \d+ are free",
            lambda: session.append(0, np.arange(5, 4005), *many),
        ),
        "stale": (
            e.StaleOwner,
            r"generation 1\) is closed.*generation 1",
            lambda: stale.append(0, [0], k[:1], v[:1]),
        ),
        "turn": (
            e.StepIncomplete,
            r"layer 1 would reach 7.*layer before it at 5",
            lambda: session.append(1, [5, 6], k, v),
        ),
        "no branch": (e.InvalidArgument, r"no branch", lambda: session.commit_prefix(0)),
        "count": (e.OutOfRange, r"6; allowed: 0 to 5", lambda: session.rollback_tail(6)),
        "late": (
            e.SlotCancelled,
            r"from 5 on",
            lambda: session.commit_slot(0, [5]),
        ),
        "no restore": (e.InvalidArgument, r"begin_restore first", session.finish_restore),
        "not empty": (
            e.InvalidArgument,
            r"rows up to 5",
            lambda: session.begin_restore(np.ones((2, 3), bool)),
        ),
        "page": (e.OutOfRange, r"index is 1; allowed: 0 to 1", lambda: session.page_bytes(0, 1)),
        "heads": (
            e.OutOfRange,
            r"kv_heads is \(0, 3\)",
            lambda: session.attend_partial(0, q, 1.0, kv_heads=(0, 3)),
        ),
        "block": (
            e.OutOfRange,
            r"count is 6; allowed: 0 to 5",
            lambda: session.attend_block(0, np.stack([q] * 6), np.stack([q] * 6), 1.0),
        ),
    }


def test_each_code_is_its_error_and_names_its_numbers() -> None:
    store = open_store(budget_bytes=1 << 20)
    session = store.open_session()
    fill(session, 0, 5)
    before = [x.tobytes() for layer in (0, 1) for x in session.read(layer, np.arange(5))]
    for name, (error, words, call) in _refusals(store, session).items():
        with pytest.raises(error, match=words):
            call()
            pytest.fail(f"{name}: nothing was raised")
        after = [x.tobytes() for layer in (0, 1) for x in session.read(layer, np.arange(5))]
        assert after == before, name
        assert store.pages_total - store.pages_free == 2, name


def test_codes_of_steps_and_branches() -> None:
    store = open_store()
    session = store.open_session()
    fill(session, 0, 5)
    branch = session.begin_branch()
    with pytest.raises(contract.BranchesOpen, match="1 branches are open"):
        session.close()
    with pytest.raises(contract.BranchesOpen):
        session.rollback_tail(1)
    fill(session, 5, 6)
    fill(branch, 5, 6)
    with pytest.raises(contract.BranchDiverged, match="began at 5"):
        branch.commit_prefix(1)
    k, v = rows(store, 1)
    session.append(0, [6], k, v)
    with pytest.raises(contract.StepIncomplete, match="layer 1 stands at 6 and layer 0 at 7"):
        session.begin_branch()
    fresh = store.open_session()
    fresh.begin_restore(np.ones((2, 3), bool))
    with pytest.raises(contract.StepIncomplete, match="a restore of 3 rows is open"):
        fresh.append(0, [0], k, v)
    fresh.close()


def test_a_store_of_all_slots_or_of_no_page_is_exhausted() -> None:
    store = open_store()
    opened = [store.open_session() for _ in range(contract.SESSIONS)]
    with pytest.raises(contract.PoolExhausted, match="all 64 sessions"):
        store.open_session()
    opened[7].close()
    assert store.open_session().generation == 2
    ledger = contract.MemoryLedger(1 << 20)
    with pytest.raises(contract.PoolExhausted, match="budget_bytes is 100, and one page takes"):
        open_store(budget_bytes=100, ledger=ledger)
    assert ledger.reserved_bytes == 0


def test_a_panic_stays_behind_the_boundary(tmp_path: Path) -> None:
    """The Rust tests, which include a panic inside a call, pass under the build's own compiler."""
    rustc = shutil.which("rustc")
    if rustc is None:
        pytest.skip("rustc was there for the build and is not now")
    program = tmp_path / "native_tests"
    source = ROOT / "rust" / "src" / "lib.rs"
    command = [rustc, "--edition", "2021", "--test", "-O", "-o", program, source]
    subprocess.run(command, check=True, timeout=120)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a_panic_becomes_a_code_and_ends_the_store ... ok" in done.stdout


# --- memory -----------------------------------------------------------------------------------------

_COUNTING = """
import json
import numpy as np
from kvtrial.contract import StoreSpec
from kvtrial.hot import _rust
from kvtrial.hot.formats.fp32 import FP32
from kvtrial.measure.allocations import count_calls

store = _rust.RustStore(StoreSpec(1, 6, 2, 64, budget_bytes=1 << 22), format=FP32)
session = store.open_session()
q, out = np.ones((6, 64), np.float32), np.ones((6, 64), np.float32)
k = np.ones((1, 2, 64), np.float32)
at = [np.array([i]) for i in range(80)]
seen = {}

def call(name, function, *args):
    count = count_calls(function, *args)
    if i >= 16:  # the interpreter's and NumPy's caches are filled
        seen[name] = max(seen.get(name, 0), count)

for i in range(0, 80, 2):
    call("append", session.append, 0, at[i], k, k)
    call("reserve_slot", session.reserve_slot, 0, at[i + 1])
    call("commit_slot", session.commit_slot, 0, at[i + 1])
    call("attend", session.attend, 0, q, out, 0.5)
    if i % 8 == 6:
        call("rollback_tail", session.rollback_tail, 2)
        session.append(0, np.array([i, i + 1]), np.ones((2, 2, 64), np.float32),
                       np.ones((2, 2, 64), np.float32))
print(json.dumps(seen))
"""


def test_verbs_of_a_step_allocate_nothing() -> None:
    extra = allocations.preload_environment()
    if extra is None:
        pytest.skip("this platform has no allocation counter")
    done = subprocess.run(
        [sys.executable, "-c", _COUNTING],
        env=os.environ | extra,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "append": 0,
        "reserve_slot": 0,
        "commit_slot": 0,
        "attend": 0,
        "rollback_tail": 0,
    }


# --- the candidates ---------------------------------------------------------------------------------


def test_without_the_library_the_candidates_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvtrial.hot._rust", None)
    monkeypatch.delattr("kvtrial.hot._rust")
    monkeypatch.setattr(build, "facts", lambda: {"rust_missing": "rustc was not found"})
    assert build.why_missing("kvtrial.hot._rust", "rust") == "rustc was not found"
    monkeypatch.setattr(build, "facts", dict)
    assert "kvtrial.hot._rust" in (build.why_missing("kvtrial.hot._rust", "rust") or "")


def test_the_candidates_differ_in_owner_alone() -> None:
    k3, k4 = native.K3, native.K4
    assert (k3.language, k3.owner, k4.language, k4.owner) == ("Rust", "Rust", "Rust", "Cython")
    assert k3.layout == k4.layout and k3.profile is k4.profile
    assert k3.missing_capabilities == k4.missing_capabilities == ()


def test_each_rust_arm_has_its_cython_twin_s_layout() -> None:
    for ours, theirs in ((native.K3, paged.K1), (native.K4, paged.K1), (native.K3T, paged.K1T)):
        assert (ours.layout, ours.profile) == (theirs.layout, theirs.profile)
        assert ours.capabilities == theirs.capabilities
    assert (native.K3T.language, native.K3T.owner) == ("Rust", "Rust")
    assert native.K3T.layout != native.K3.layout


def test_a_format_that_is_not_there_is_named() -> None:
    with pytest.raises(contract.InvalidArgument, match="format is 'fp16'; allowed: fp32, fp32t"):
        open_store(form="fp16")
