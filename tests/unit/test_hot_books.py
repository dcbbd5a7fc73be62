"""Doors and books of the hot stores, where the conformance suite does not look."""

from __future__ import annotations

import numpy as np
import pytest

from kvtrial.contract import (
    HoleNotAllowed,
    InvalidArgument,
    MemoryLedger,
    OutOfRange,
    PoolExhausted,
    StaleOwner,
    StoreSpec,
    Unsupported,
)
from kvtrial.hot import flat, paged
from kvtrial.hot.paged import open_paged

CANDIDATES = [flat.K0, flat.A1, paged.A2, paged.K1, paged.K2, paged.K5, paged.K1T, paged.K2T]
CANDIDATES += [paged.K5T, paged.K6, paged.K7]


@pytest.fixture(params=CANDIDATES, ids=lambda c: c.name)
def session(request):
    store = request.param.open(StoreSpec(2, 4, 2, 8, budget_bytes=1 << 18))
    return store.open_session()


def rows(n):
    return np.arange(n * 16, dtype=np.float32).reshape(n, 2, 8) % 7 - 3


def fill(session, start, stop):
    for layer in range(2):
        session.append(layer, np.arange(start, stop), rows(stop - start), rows(stop - start))


@pytest.mark.parametrize("layer", [-1, 2, 2**40, 2**70, 0.0, True, "0", None])
def test_a_layer_that_is_none(session, layer):
    with pytest.raises(InvalidArgument, match="layer"):
        session.append(layer, [0], rows(1), rows(1))


@pytest.mark.parametrize(
    ("positions", "error"),
    [
        ([0.0], InvalidArgument),
        ([True], InvalidArgument),
        (["0"], InvalidArgument),
        ([[0]], InvalidArgument),
        ([-1], OutOfRange),
        (np.array([2**64 - 1], np.uint64), OutOfRange),
        ([1], HoleNotAllowed),
    ],
)
def test_positions_that_are_none(session, positions, error):
    with pytest.raises(error):
        session.append(0, positions, rows(1), rows(1))
    assert session.length(0) == 0


def test_any_sequence_of_integers_is_a_position(session):
    for start, positions in enumerate(
        [[0], (1,), range(2, 3), np.int32([3]), np.uint8([4]), np.arange(0, 10)[5:6]]
    ):
        session.append(0, positions, rows(1), rows(1))
        session.append(1, positions, rows(1), rows(1))
        assert session.length(0) == start + 1


def test_read_only_memory_is_taken_and_not_written(session, tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(rows(3).tobytes())
    k = np.memmap(path, np.float32, "r", shape=(3, 2, 8))
    v = np.frombuffer(rows(3).tobytes(), np.float32).reshape(3, 2, 8)
    session.append(0, [0, 1, 2], k, v)
    assert session.read(0, [0, 1, 2])[0].shape == (3, 2, 8)
    with pytest.raises(InvalidArgument, match=r"out .* writable"):
        session.attend(0, np.zeros((4, 8), np.float32), np.asarray(v[:2].reshape(4, 8)), 1.0)


def test_session_slots_run_out_and_come_back():
    store = paged.K1.open(StoreSpec(1, 1, 1, 8, budget_bytes=1 << 16))
    sessions = [store.open_session() for _ in range(64)]
    with pytest.raises(PoolExhausted, match="64"):
        sessions[0].begin_branch()
    sessions[7].close()
    assert sessions[0].begin_branch().length(0) == 0


def test_a_view_outlives_its_store():
    store = paged.K1.open(StoreSpec(1, 1, 1, 8, budget_bytes=1 << 16))
    k, _ = store.open_session().reserve_slot(0, [0])
    store.close()
    k[...] = 5
    assert k.sum() == 40


def test_flat_sessions_share_the_budget():
    ledger = MemoryLedger(1 << 20)
    store = flat.K0.open(StoreSpec(2, 4, 2, 8, budget_bytes=128 * 2 * 10, ledger=ledger))
    assert ledger.reserved_bytes == 128 * 2 * 10
    one, two = store.open_session(), store.open_session()
    fill(one, 0, 6)
    with pytest.raises(PoolExhausted):
        two.append(0, np.arange(9), rows(9), rows(9))
    one.rollback_tail(5)
    fill(two, 0, 9)
    assert store.resident_bytes == 128 * 2 * 10
    store.close()
    assert ledger.reserved_bytes == 0
    with pytest.raises(StaleOwner):
        two.length(0)


def test_flat_stores_say_what_they_lack():
    session = flat.A1.open(StoreSpec(2, 4, 2, 8, budget_bytes=1 << 16)).open_session()
    for verb in (session.begin_branch, session.finish_restore, session.cancel_restore):
        with pytest.raises(Unsupported, match="page table"):
            verb()
    with pytest.raises(Unsupported):
        session.store.open_session(True)


def test_options_of_a_paged_store():
    spec = StoreSpec(1, 1, 1, 8, budget_bytes=1 << 16)
    with pytest.raises(
        InvalidArgument,
        match="'fp8'; allowed: fp16, fp16t, fp32, fp32t, int4p, int4rp, int8r4rp, int8rp, q8_0",
    ):
        open_paged(spec, format="fp8")
    assert open_paged(spec).page_format == "fp32/head-major/P16/H1/D8"
    assert open_paged(spec, format="fp16t").page_format == "fp16t/head-major/P16/H1/D8"
