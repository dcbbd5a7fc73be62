"""A closed or reused handle is `StaleOwner` and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvtrial.conformance.trial import (
    Trial,
    at,
    fill,
    needs,
    queries,
    raises,
    require,
    require_rows,
    rows,
    unchanged,
)
from kvtrial.contract import Capability, KVError, KVSession, KVStore, StaleOwner


def verbs(
    trial: Trial, store: KVStore, session: KVSession
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every verb that the candidate claims, as a call on ``session``."""
    q = queries(store)
    k, v = rows(store, 0, [0])
    yield "append", lambda: session.append(0, at(0, 1), k, v)
    yield "append of nothing", lambda: session.append(0, at(0, 0), k[:0], v[:0])
    yield "attend", lambda: session.attend(0, q, np.empty_like(q), 1.0)
    yield "attend_block", lambda: session.attend_block(0, q[None], np.empty_like(q[None]), 1.0)
    yield "read", lambda: session.read(0, at(0, 0))
    yield "length", lambda: session.length(0)
    yield "valid", lambda: session.valid(0)
    if trial.has(Capability.PARTIALS):
        yield "attend_partial", lambda: session.attend_partial(0, q, 1.0)
    if trial.has(Capability.ROLLBACK):
        yield "rollback_tail", lambda: session.rollback_tail(0)
        yield "abandon_step", lambda: session.abandon_step()
    if trial.has(Capability.RESERVE_SLOT):
        yield "reserve_slot", lambda: session.reserve_slot(0, at(0, 1))
        yield "commit_slot", lambda: session.commit_slot(0, at(0, 1))
    if trial.has(Capability.HOLES):
        yield "invalidate", lambda: session.invalidate(0, at(0, 1))
    if trial.has(Capability.BRANCH):
        yield "begin_branch", lambda: session.begin_branch()
        yield "commit_prefix", lambda: session.commit_prefix(0)
    if trial.has(Capability.POOL):
        yield "page_table", lambda: session.page_table(0)
        yield "store.page_table", lambda: store.page_table(session, 0)
    if trial.has(Capability.SPILL):
        yield "page_bytes", lambda: session.page_bytes(0, 0)
        yield "begin_restore", lambda: session.begin_restore(np.ones((store.spec.layers, 1), bool))
        yield "finish_restore", lambda: session.finish_restore()
        yield "cancel_restore", lambda: session.cancel_restore()
    yield "close", lambda: session.close()


def closed_handle_is_stale(trial: Trial) -> None:
    """A13, A3: every verb of a closed handle, while its slot has a new owner."""
    with trial.store() as store:
        old = store.open_session()
        fill(old, range(3), tag=1)
        old.close()
        new = store.open_session()
        fill(new, range(trial.page_tokens + 3), tag=2)
        for name, call in verbs(trial, store, old):
            with unchanged(trial, store, new):
                try:
                    with raises(StaleOwner):
                        call()
                except AssertionError as error:
                    raise AssertionError(f"{name} on a closed handle: {error}") from error
        require_rows(trial, new, 0, range(trial.page_tokens + 3), 2, "the slot's new owner")


def many_generations(trial: Trial) -> None:
    """A13: a handle stays stale however often its slot is opened again."""
    with trial.store() as store:
        handles = []
        for _ in range(20):
            session = store.open_session()
            fill(session, range(2))
            handles.append(session)
            session.close()
        live = store.open_session()
        fill(live, range(2), tag=3)
        for handle in handles:
            with raises(StaleOwner):
                handle.length(0)
        require_rows(trial, live, 1, range(2), 3, "the live owner")


def closed_store_is_stale(trial: Trial) -> None:
    """Sessions of a closed store are stale, never a read of freed memory."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(3))
        store.close()
        for name, call in verbs(trial, store, session):
            try:
                with raises(StaleOwner):
                    call()
            except AssertionError as error:
                raise AssertionError(f"{name} after store.close: {error}") from error
        with raises(KVError):
            store.open_session()


@needs(Capability.POOL)
def double_close_frees_once(trial: Trial) -> None:
    """A3: a second close is refused and the free list gets no page twice."""
    with trial.store(pages=8) as store:
        first = store.open_session()
        fill(first, range(1))
        free = store.pages_free
        first.close()
        for _ in range(3):
            with raises(StaleOwner):
                first.close()
        require(store.pages_free == store.pages_total, "a close did not give every page back")
        one, two = store.open_session(), store.open_session()
        fill(one, range(1), tag=1)
        fill(two, range(1), tag=2)
        ids = [s.page_table(layer).page_ids[0] for s in (one, two) for layer in range(2)]
        require(len(set(ids)) == 4, f"two owners got pages {ids}")
        require(free == 6, f"one row in each of 2 layers left {free} of 8 pages free")


def sessions_do_not_mix(trial: Trial) -> None:
    """Interleaved sessions keep their own rows."""
    with trial.store() as store:
        sessions = [store.open_session() for _ in range(3)]
        for step in range(trial.page_tokens + 2):
            for tag, session in enumerate(sessions):
                fill(session, [step], tag)
        for tag, session in enumerate(sessions):
            for layer in range(2):
                require_rows(
                    trial, session, layer, range(trial.page_tokens + 2), tag, f"session {tag}"
                )
