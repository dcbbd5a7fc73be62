"""The pool: bounded by its ledger, exhausted without a trace, and quiet while a step runs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from kvtrial.conformance.trial import (
    Trial,
    at,
    fill,
    ledger_of,
    needs,
    queries,
    raises,
    require,
    require_rows,
    rows,
    unchanged,
)
from kvtrial.contract import Capability, MemoryLedger, PoolExhausted, StoreSpec
from kvtrial.measure import allocations


def bounded_by_the_ledger(trial: Trial) -> None:
    """A pool reserves once, within its budget, and gives it back; a second one must fit too."""
    with trial.store(pages=8) as store:
        need = store.page_nbytes * 8
        shape = {
            name: getattr(store.spec, name)
            for name in ("layers", "q_heads", "kv_heads", "head_dim", "page_tokens")
        }
        budget = store.spec.budget_bytes
    ledger = MemoryLedger(budget + budget // 2)
    spec = StoreSpec(budget_bytes=budget, ledger=ledger, **shape)
    first = trial.candidate.open(spec)
    reserved = ledger.reserved_bytes
    require(need <= reserved <= budget, f"{reserved} bytes reserved, {need} to {budget} expected")
    session = first.open_session()
    fill(session, range(4 * trial.page_tokens))
    require(ledger.reserved_bytes == reserved, "appending changed the ledger")
    with raises(PoolExhausted):
        trial.candidate.open(spec)
    require(ledger.reserved_bytes == reserved, "a store that did not open kept its reservation")
    require_rows(trial, session, 0, range(4 * trial.page_tokens), 0, "beside a refused store")
    first.close()
    require(ledger.reserved_bytes == 0, f"{ledger.reserved_bytes} bytes are left after close")
    trial.candidate.open(spec).close()


def less_than_a_page_is_refused(trial: Trial) -> None:
    """A budget that holds no page opens no store."""
    with raises(PoolExhausted, ValueError):
        trial.candidate.open(
            StoreSpec(1, 2, 2, 32, page_tokens=trial.page_tokens, budget_bytes=16)
        ).close()


def exhaustion_leaves_no_trace(trial: Trial) -> None:
    """A5: an append of three pages' rows with two pages free changes nothing; of two it works."""
    page = trial.page_tokens
    with trial.store(pages=5, layers=1) as store:
        session = store.open_session()
        fill(session, range(3 * page))
        with unchanged(trial, store, session), raises(PoolExhausted):
            fill(session, range(3 * page, 6 * page))
        fill(session, range(3 * page, 5 * page))
        require(store.pages_free == 0, f"{store.pages_free} pages free in a full pool")
        with unchanged(trial, store, session), raises(PoolExhausted):
            fill(session, [5 * page])
        require_rows(trial, session, 0, range(5 * page), 0, "a full pool")


def exhaustion_in_a_later_layer(trial: Trial) -> None:
    """I2, A5: layer 1 finds no page; the step is abandoned and the rest goes on."""
    page = trial.page_tokens
    with trial.store(pages=3, layers=2) as store:
        session = store.open_session()
        fill(session, range(page))
        session.append(0, at(page, page + 1), *rows(store, 0, [page]))
        with unchanged(trial, store, session), raises(PoolExhausted):
            session.append(1, at(page, page + 1), *rows(store, 1, [page]))
        session.abandon_step()
        require(store.pages_free == 1, f"{store.pages_free} pages free after abandon_step")
        require_rows(trial, session, 1, range(page), 0, "after an abandoned step")
        session.close()
        require(store.pages_free == 3, "close did not give every page back")


def sessions_share_one_pool(trial: Trial) -> None:
    """What one session gives back, another can take; page ids are never shared between owners."""
    page = trial.page_tokens
    with trial.store(pages=4, layers=1) as store:
        one, two = store.open_session(), store.open_session()
        fill(one, range(3 * page), tag=1)
        fill(two, range(page), tag=2)
        with unchanged(trial, store, one, two), raises(PoolExhausted):
            fill(two, [page], tag=2)
        one.rollback_tail(page)
        fill(two, [page], tag=2)
        ids = one.page_table(0).page_ids.tolist() + two.page_table(0).page_ids.tolist()
        require(sorted(ids) == [0, 1, 2, 3], f"page ids {ids}, expected 0 to 3, each once")
        ledger_of(store, [one, two])
        require_rows(trial, one, 0, range(2 * page), 1, "the one session")
        require_rows(trial, two, 0, range(page + 1), 2, "the other session")


def accounting_adds_up(trial: Trial) -> None:
    """A14: references equal page-table entries, free and mapped pages are the pool."""
    page = trial.page_tokens
    with trial.store(pages=32) as store:
        sessions = [store.open_session() for _ in range(3)]
        ledger_of(store, sessions)
        for number, session in enumerate(sessions):
            fill(session, range(number * page + 1))
            ledger_of(store, sessions)
        for session in list(sessions):
            session.rollback_tail(1)
            ledger_of(store, sessions)
            session.close()
            sessions.remove(session)
            ledger_of(store, sessions)
        require(store.resident_bytes == 0, "an empty store is resident")


@needs(Capability.ROLLBACK)
def nothing_stays_behind(trial: Trial) -> None:
    """A22: decode steps and rollbacks leave neither Python memory nor pages behind."""
    page = trial.page_tokens
    with trial.store(pages=16, layers=1) as store:
        session = store.open_session()
        fill(session, range(page))
        k, v = rows(store, 0, [page])
        q = queries(store)
        out = q.copy()
        where = at(page, page + 1)

        def step() -> None:
            session.append(0, where, k, v)
            session.attend(0, q, out, 0.5)
            session.rollback_tail(1)

        for _ in range(8):
            step()
        free = store.pages_free
        tracemalloc.start()
        try:
            step()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(64):
                step()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        require(grown < 1024, f"64 decode steps left {grown} bytes of Python memory behind")
        require(store.pages_free == free, "decode steps and rollbacks lost pages")


def a_step_allocates_nothing(trial: Trial) -> None:
    """I13: no malloc, realloc, mmap or the like inside a store call of a decode step, by count.

    Counts where the process was started with the counter before the C library, as
    ``python -m kvtrial.conformance`` does; the written result says whether it was.
    """
    if not allocations.available():
        return
    page = trial.page_tokens
    with trial.store(pages=16, layers=2) as store:
        session = store.open_session()
        q = queries(store)
        out = q.copy()
        steps = [
            (at(p, p + 1), [rows(store, layer, [p]) for layer in range(2)]) for p in range(4 * page)
        ]
        for number, (where, given) in enumerate(steps):
            for layer, (k, v) in enumerate(given):
                calls: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
                    "append": (session.append, (layer, where, k, v)),
                    "attend": (session.attend, (layer, q, out, 0.5)),
                }
                if number % 2 and trial.has(Capability.RESERVE_SLOT):
                    calls = {
                        "reserve_slot": (session.reserve_slot, (layer, where)),
                        "commit_slot": (session.commit_slot, (layer, where)),
                    }
                for name, (verb, arguments) in calls.items():
                    made = allocations.count_calls(verb, *arguments)
                    # The first two pages warm the interpreter's own caches.
                    require(
                        number < 2 * page or made == 0,
                        f"{name} at position {number} made {made} allocation calls",
                    )
