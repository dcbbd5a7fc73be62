"""What the suite can't ask of a stranger: generations that wrap, huge pools, poison, idle counters.

Each is asked of every registered arm that has the thing in question.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvtrial import candidates
from kvtrial.conformance import Trial, pool
from kvtrial.conformance.owner import verbs
from kvtrial.conformance.suite import poisoned
from kvtrial.conformance.trial import (
    at,
    contents,
    fill,
    queries,
    require_attention,
    require_rows,
    rows,
)
from kvtrial.contract import (
    SESSIONS,
    Candidate,
    Capability,
    PoolExhausted,
    StaleOwner,
    StoreSpec,
)
from kvtrial.measure import allocations

ARMS = [c for c in candidates.candidates().values() if c.not_built is None]
BOUNDLESS = [c for c in ARMS if Capability.POOL not in c.capabilities]


def having(*capabilities: Capability) -> pytest.MarkDecorator:
    """Parametrise over the arms that claim these."""
    arms = [c for c in ARMS if c.capabilities.issuperset(capabilities)]
    return pytest.mark.parametrize("arm", arms, ids=lambda arm: arm.name)


@having(Capability.POOL)
def test_every_arm_has_room_for_as_many_sessions(arm: Candidate) -> None:
    """Rust had room for 256 where Cython had it for 64, and four times the page tables."""
    with Trial(arm, 16).store(pages=2, layers=1) as store:
        for _ in range(SESSIONS):
            store.open_session()
        with pytest.raises(PoolExhausted, match=rf"\b{SESSIONS} sessions"):
            store.open_session()


@having(Capability.OWNER)
def test_generations_wrap(arm: Candidate) -> None:
    """A13: past the last generation comes 0, and the handle before it is stale all the same."""
    trial = Trial(arm, 16)
    top = 2**64 - 1 if arm.owner == "Rust" else 2**32 - 1
    with trial.store() as store:
        store._force_generation(top)  # type: ignore[attr-defined]
        old = store.open_session()
        assert old.generation == top
        fill(old, range(3), tag=1)
        old.close()
        new = store.open_session()
        assert new.generation == 0
        fill(new, range(5), tag=2)
        shown = contents(new)
        for name, call in verbs(trial, store, old):
            with pytest.raises(StaleOwner):
                call()
                pytest.fail(f"{name} went through on a handle of the last generation")
        assert contents(new) == shown


@having(Capability.POOL, Capability.SPILL)
def test_pages_past_two_gibibytes(arm: Candidate) -> None:
    """A26: the first and the last page of a pool of more than 2^31 bytes are their owners' own.

    The pages between are taken by a restore and never touched, so they cost address space alone.
    """
    store = arm.open(StoreSpec(1, 8, 8, 256, page_tokens=64, budget_bytes=(1 << 31) + (1 << 23)))
    pages = store.pages_total
    assert store.page_nbytes * (pages - 1) > 2**31
    one, between, two = (store.open_session() for _ in range(3))
    fill(one, range(64), tag=1)
    between.begin_restore(np.ones((1, (pages - 2) * 64), bool))
    fill(two, range(50), tag=2)
    assert store.pages_free == 0
    ids = [session.page_table(0).page_ids.tolist() for session in (one, two)]
    assert sorted(ids) == [[0], [pages - 1]]
    q, out = queries(store), np.empty((8, 256), np.float32)
    for session, tag, n in ((one, 1, 64), (two, 2, 50)):
        require_rows(Trial(arm, 64), session, 0, range(n), tag, "a page at the end of the pool")
        session.attend(0, q, out, 0.1)
        require_attention(out, arm.profile, q, *rows(store, 0, range(n), tag), 0.1)
    between.cancel_restore()
    store.close()


@pytest.mark.parametrize("name", ["K0", "A1"])
def test_flat_rows_past_two_gibibytes(name: str) -> None:
    """A26: the last layer of a flat session of more than 2^32 bytes has rows of its own."""
    trial = Trial(candidates.get(name), 16)
    spec = StoreSpec(3, 8, 8, 256, budget_bytes=(1 << 32) + (1 << 31))
    store = trial.candidate.open(spec)
    session = store.open_session()
    fill(session, range(3))
    q, out = queries(store), np.empty((8, 256), np.float32)
    for layer in range(3):
        require_rows(trial, session, layer, range(3), 0, f"layer {layer}")
        session.attend(layer, q, out, 0.1)
        require_attention(out, trial.profile, q, *rows(store, layer, range(3)), 0.1)
    store.close()


@pytest.fixture
def poison() -> Iterator[None]:
    with poisoned():
        yield


@having(Capability.RESERVE_SLOT)
def test_slots_without_content_are_nan(arm: Candidate, poison: None) -> None:
    """B1, B2: fresh, given up, rolled back: a slot that is handed out again holds nothing old."""
    trial = Trial(arm, 16)
    with trial.store(layers=1, head_dim=12) as store:
        session = store.open_session()

        def reserved(start: int) -> bool:
            k, v = session.reserve_slot(0, at(start, start + 2))
            empty = bool(np.isnan(k).all() and np.isnan(v).all())
            k[...], v[...] = 1, 2
            return empty

        assert reserved(0), "fresh memory is not poisoned"
        session.abandon_step()
        assert reserved(0), "a reservation that was given up left its rows"
        session.commit_slot(0, at(0, 2))
        fill(session, range(2, 5))
        session.rollback_tail(4)
        assert reserved(1), "a rollback left its rows"
        session.abandon_step()
        assert (session.read(0, at(0, 1))[0] == 1).all(), "poison reached a row with content"


@having(Capability.SPILL)
def test_pages_without_content_are_nan(arm: Candidate, poison: None) -> None:
    """B1, B8: fresh pages and those that were given back, padding lanes beside rows, in every format; what
    is shown of a page has zeros where there is no row."""
    trial = Trial(arm, 16)
    kind = {"fp32": np.float32, "fp16": np.float16}.get(arm.profile.name, np.uint8)

    def rows_of(view: memoryview) -> np.ndarray:
        page = np.array(np.frombuffer(view, kind).reshape(3, 2, 16, -1))
        if "K [head_dim][token]" in arm.layout:
            page[:, 0] = page[:, 0].swapaxes(1, 2)
        return page

    def empty(page: np.ndarray) -> np.ndarray:
        return np.isnan(page) if kind != np.uint8 else page == 0xFF

    with trial.store(layers=1, head_dim=12) as store:
        session = store.open_session()
        fill(session, range(5))
        five = bytes(session.page_bytes(0, 0))
        session.close()
        for _ in range(2):
            session = store.open_session()
            (view,) = session.begin_restore(np.ones((1, 16), bool))[0]
            assert empty(rows_of(view)).all()
            session.cancel_restore()
            fill(session, range(9))
            session.rollback_tail(4)
            after_five = session.page_bytes(0, 0)
            if "panels" not in arm.layout:  # there a row's bytes lie all over the tile
                assert not rows_of(after_five)[:, :, 5:].view(np.uint8).any()
            assert bytes(after_five) == five
            require_rows(trial, session, 0, range(5), 0, "rows beside poison")
            fill(session, range(5, 16))
            page = rows_of(session.page_bytes(0, 0))
            if kind != np.uint8:  # a Q8_0 row has no padding: whole blocks are written
                assert not empty(page[:, :, :, :12]).any()
                assert empty(page[:, :, :, 12:]).all()
            session.close()


COUNTED = """
import sys
from kvtrial import candidates
from kvtrial.conformance import Trial, pool
from kvtrial.measure import allocations
assert allocations.available()
trial = Trial(candidates.get(sys.argv[1]), 16)
pool.a_step_allocates_nothing(trial)
pool.a_rollback_copies_nothing(trial)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the counter needs Linux and glibc")
@pytest.mark.parametrize("name", ["K0", "A1"])
def test_flat_arms_allocate_and_copy_nothing_either(name: str) -> None:
    """I13, A22: the promise is a pool's, and the suite asks pools; the flat arms keep it too."""
    environment = {**os.environ, **(allocations.preload_environment() or {})}
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, name], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arm", BOUNDLESS, ids=lambda arm: arm.name)
def test_arms_without_a_pool_leave_no_objects_either(arm: Candidate) -> None:
    """I13: what the suite asks of pools."""
    pool.nothing_stays_behind(Trial(arm, 16))
