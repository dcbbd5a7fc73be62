"""Real sessions through the cold tier: attention after a restore is bitwise what it was before."""

from __future__ import annotations

import numpy as np
import pytest
from spilling import P

from kvtrial.candidates import candidates
from kvtrial.cold import Identity, open_cold
from kvtrial.cold.errors import IdentityMismatch
from kvtrial.cold.page import PageMeta, content_address
from kvtrial.contract import PoolExhausted, StoreSpec

ROWS = 3 * P + 5
SHAPE = {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32, "page_tokens": P}


def opened(name, pages=32):
    candidate = candidates()[name]
    probe = candidate.open(StoreSpec(**SHAPE, budget_bytes=P * 2 * 2 * 32 * 4))
    page = probe.page_nbytes
    probe.close()
    return candidate.open(StoreSpec(**SHAPE, budget_bytes=pages * page))


def filled(name, store, holes=False):
    session = store.open_session(position_holes_allowed=holes)
    draw = np.random.default_rng(3)
    positions = np.arange(ROWS)
    for layer in range(2):
        k, v = draw.standard_normal((2, ROWS, 2, 32), dtype=np.float32)
        v[4, 0, 0] = -0.0
        if not candidates()[name].profile.finite:  # which refuses what isn't finite
            v[4, 0, 1] = np.array([0x7F800001], np.uint32).view(np.float32)[0]
        session.append(layer, positions, k, v)
    if holes:
        for layer in range(2):
            session.invalidate(layer, np.arange(P, 2 * P))  # a whole page
            session.invalidate(layer, np.array([0, 3]))
    return session


def attended(session):
    q = np.random.default_rng(5).standard_normal((4, 32), dtype=np.float32)
    outs = []
    for layer in range(2):
        out = np.empty((4, 32), np.float32)
        session.attend(layer, q, out, 32**-0.5)
        outs.append(out.tobytes())
    return outs


def cold_for(kind, path, store):
    return open_cold(
        kind, path, Identity.of(store, model_sha256="0" * 64, rope_base=1e4, activations="fp32")
    )


@pytest.fixture(params=["A2", "K1", "K2", "K3", "K4", "K5", "K1T", "K3T", "K2T", "K5T", "K6", "K7"])
def name(request):
    assert candidates()[request.param].not_built is None
    return request.param


@pytest.mark.parametrize("holes", [False, True])
def test_attention_after_a_restore_is_bitwise_the_same(kind, name, holes, tmp_path):
    store = opened(name)
    session = filled(name, store, holes)
    before = attended(session)
    with cold_for(kind, tmp_path / "cold", store) as cold:
        cold.spill(session, np.arange(ROWS))
    other = opened(name)
    with cold_for(kind, tmp_path / "cold", other) as cold:
        back = other.open_session(position_holes_allowed=holes)
        assert cold.restore(np.arange(ROWS), back) == ROWS
    for layer in range(2):
        assert np.array_equal(back.valid(layer), session.valid(layer))
        assert back.length(layer) == session.length(layer)
        for index in range(-(-ROWS // P)):
            ours, theirs = session.page_bytes(layer, index), back.page_bytes(layer, index)
            assert (ours is None) == (theirs is None)
            assert ours is None or bytes(ours) == bytes(theirs)
        at = np.flatnonzero(session.valid(layer))
        for ours, theirs in zip(session.read(layer, at), back.read(layer, at)):
            assert ours.tobytes() == theirs.tobytes()
    assert attended(back) == before
    # And it goes on: the next row is appended as if nothing had happened.
    for one in (session, back):
        row = np.ones((1, 2, 32), np.float32)
        for layer in range(2):
            one.append(layer, np.array([ROWS]), row, row)
    assert attended(back) == attended(session)


def short(store, positions=3, drop=0):
    """A few rows of a session's own, of which the last ``drop`` are rolled back."""
    session = store.open_session()
    rows = np.random.default_rng(8).standard_normal((2, 2, positions, 2, 32), dtype=np.float32)
    for layer, (k, v) in enumerate(rows):
        session.append(layer, np.arange(positions), k, v)
    if drop:
        session.rollback_tail(drop)
    return session


def addresses(cold):
    return [PageMeta.decode(meta).address for _, meta in cold._index.items("prefix")]


def test_a_page_on_disk_holds_its_own_rows_and_nothing_else(name, tmp_path):
    """Whoever held the page before, or rows that were dropped, must not reach the disk with it."""
    used, fresh = opened(name), opened(name)
    secret = used.open_session()
    for layer in range(2):
        rows = np.full((4 * P, 2, 32), 1000, np.float32)
        secret.append(layer, np.arange(4 * P), rows, rows)
    pattern = bytes(secret.page_bytes(0, 0))[:16]
    secret.close()
    for where, store in (("used", used), ("fresh", fresh)):
        with cold_for("Z2", tmp_path / where, store) as cold:
            cold.spill(short(store), np.arange(3))
            cold.spill(short(store, 8, drop=1), np.arange(7))
    on_disk = [path.read_bytes() for path in (tmp_path / "used").rglob("*") if path.is_file()]
    assert sum(data.count(pattern) for data in on_disk) == 0
    with (
        cold_for("Z2", tmp_path / "used", used) as one,
        cold_for("Z2", tmp_path / "fresh", fresh) as other,
    ):
        # The content address follows from the rows, so equal sequences have equal ones.
        assert addresses(one) == addresses(other) and len(set(addresses(one))) == 2


def test_rows_that_were_made_holes_do_not_reach_the_disk(name, tmp_path):
    store, kept = opened(name), np.delete(np.arange(P), 5)
    session, never = (store.open_session(position_holes_allowed=True) for _ in range(2))
    for layer in range(2):
        rows = np.random.default_rng(layer).standard_normal((P, 2, 32), np.float32)
        session.append(layer, np.arange(P), rows, rows)
        never.append(layer, kept, rows[kept], rows[kept])
    for layer in range(2):
        session.invalidate(layer, np.array([5]))
    with cold_for("Z2", tmp_path / "cold", store) as cold:
        cold.spill(session, np.arange(P))
        back = opened(name).open_session(position_holes_allowed=True)
        assert cold.restore(np.arange(P), back) == P
        meta = PageMeta.decode(next(iter(cold._index.items("prefix")))[1])
    assert meta.address == content_address([never.page_bytes(layer, 0) for layer in range(2)])
    assert bytes(back.page_bytes(1, 0)) == bytes(never.page_bytes(1, 0))


def test_a_pool_too_small_changes_nothing(kind, name, tmp_path):
    store = opened(name)
    with cold_for(kind, tmp_path / "cold", store) as cold:
        cold.spill(filled(name, store), np.arange(ROWS))
        small = opened(name, pages=6)
        back = small.open_session()
        with pytest.raises(PoolExhausted):
            cold.restore(np.arange(ROWS), back)
        assert small.pages_free == small.pages_total and back.length(0) == 0
        assert cold.restore(np.arange(3 * P), back) == 3 * P


@pytest.mark.parametrize(("by_row", "by_element"), [("K1", "K1T"), ("K2", "K2T")])
def test_arms_with_other_layouts_never_see_each_other_s_pages(kind, by_row, by_element, tmp_path):
    """Their pages are of one size, and hold K in another order."""
    one, other = opened(by_row), opened(by_element)
    with cold_for(kind, tmp_path / "cold", one) as cold:
        cold.spill(filled(by_row, one), np.arange(ROWS))
        with pytest.raises(IdentityMismatch, match="page_format"):
            cold.restore(np.arange(ROWS), other.open_session())
    with cold_for(kind, tmp_path / "cold", other) as cold:
        assert cold.restore(np.arange(ROWS), other.open_session()) == 0


@pytest.mark.parametrize(("one", "other"), [("K1", "K3"), ("K1T", "K3T"), ("K3T", "K1T")])
def test_an_arm_restores_the_pages_of_its_twin_in_the_other_language(kind, one, other, tmp_path):
    theirs, ours = opened(one), opened(other)
    session, back = filled(one, theirs), ours.open_session()
    with cold_for(kind, tmp_path / "cold", theirs) as cold:
        cold.spill(session, np.arange(ROWS))
    with cold_for(kind, tmp_path / "cold", ours) as cold:
        assert cold.restore(np.arange(ROWS), back) == ROWS
    at = np.arange(ROWS)
    for layer in range(2):
        for restored, spilled in zip(back.read(layer, at), session.read(layer, at)):
            assert restored.tobytes() == spilled.tobytes()
