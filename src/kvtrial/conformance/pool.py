"""The pool: bounded by its ledger, exhausted without a trace, and quiet while a step runs."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterable

import numpy as np

from kvtrial.conformance.trial import (
    Trial,
    at,
    fill,
    ledger_of,
    needs,
    queries,
    raises,
    require,
    require_attention,
    require_rows,
    rows,
    unchanged,
)
from kvtrial.contract import (
    SESSIONS,
    Capability,
    KVSession,
    MemoryLedger,
    PoolExhausted,
    StoreSpec,
)
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


def as_many_sessions_as_promised(trial: Trial) -> None:
    """`SESSIONS` can be open at once; one more is there or refused, and one that closes makes room."""
    with trial.store(pages=2, layers=1) as store:
        sessions = [store.open_session() for _ in range(SESSIONS)]
        fill(sessions[-1], range(3), tag=1)
        with contextlib.suppress(PoolExhausted):
            sessions.append(store.open_session())
        sessions.pop(0).close()
        fill(store.open_session(), range(3), tag=2)
        require_rows(trial, sessions[SESSIONS - 2], 0, range(3), 1, f"the session {SESSIONS}")


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


def a_pool_of_one_page(trial: Trial) -> None:
    """One page serves one layer of one session, and comes back; nobody else finds room."""
    page = trial.page_tokens
    with trial.store(pages=1, layers=1) as store:
        session, other = store.open_session(), store.open_session()
        fill(session, range(page))
        for who, where in ((session, page), (other, 0)):
            with unchanged(trial, store, session, other), raises(PoolExhausted):
                fill(who, [where])
        require_attention_of(trial, session, range(page))
        if trial.has(Capability.BRANCH):
            branch = session.begin_branch()
            with unchanged(trial, store, session, branch), raises(PoolExhausted):
                fill(branch, [page])
            branch.close()
        if trial.has(Capability.ROLLBACK):
            session.rollback_tail(page - 1)
            fill(session, range(1, page), tag=3)
            require_rows(trial, session, 0, [0], 0, "the one page's first row")
            require_rows(trial, session, 0, range(1, page), 3, "the one page, filled again")
        session.close()
        fill(other, [0], tag=4)
        require_rows(trial, other, 0, [0], 4, "the one page's next owner")


def require_attention_of(trial: Trial, session: KVSession, positions: Iterable[int]) -> None:
    """Layer 0 holds the rows of `positions` and attends to them as the oracle does."""
    store = session.store
    q = queries(store)
    out = np.full_like(q, np.nan)
    session.attend(0, q, out, 0.5)
    k, v = rows(store, 0, positions)
    require_attention(out, trial.profile, q, k, v, 0.5, what=f"{len(k)} rows")


def nothing_stays_behind(trial: Trial) -> None:
    """I13: decode steps leave neither Python objects nor pages behind, by `tracemalloc`.

    The smallest object takes 16 bytes: less than that a step is no object a step. The rows go on,
    over page edges, so that what grew with the session would show.
    """
    page = trial.page_tokens
    steps = 2 * page
    with trial.store(pages=16, layers=1) as store:
        session = store.open_session()
        q = queries(store)
        out = q.copy()
        given = [(at(p, p + 1), rows(store, 0, [p])) for p in range(2 * page + steps)]

        def step(number: int) -> None:
            where, (k, v) = given[number]
            session.append(0, where, k, v)
            session.attend(0, q, out, 0.5)
            if trial.has(Capability.ROLLBACK):
                session.rollback_tail(1)
                session.append(0, where, k, v)

        for number in range(2 * page):
            step(number)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(2 * page, 2 * page + steps):
                step(number)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        require(grown < 16 * steps, f"{steps} decode steps left {grown} bytes of Python memory")
        if trial.has(Capability.POOL):
            used = store.pages_total - store.pages_free
            right = -(-(2 * page + steps) // page)
            require(used == right, f"{used} pages are used after {steps} steps, not {right}")


@needs(Capability.ROLLBACK)
def a_rollback_copies_nothing(trial: Trial) -> None:
    """A22: no byte is copied and nothing allocated by a rollback, at 512 rows or 16,384, by count.

    The interpreter copies an argument, which a rollback of 0 rows costs too. Counts where
    `a_step_allocates_nothing` does.
    """
    if not allocations.available():
        return
    page = trial.page_tokens
    for length in (512, 16384):
        pages = 2 * (length // page + 3)
        with trial.store(pages, q_heads=1, kv_heads=1, head_dim=8) as store:
            session = store.open_session()
            row = np.ones((length, 1, 8), np.float32)
            for layer in range(2):
                session.append(layer, at(0, length), row, row)
            for number, n in enumerate((2, page + 2) * 2):
                made = allocations.count_calls(session.rollback_tail, n)
                for layer in range(2):
                    session.append(layer, at(length - n, length), row[:n], row[:n])
                copied = allocations.copied_bytes(session.rollback_tail, n)
                passing = allocations.copied_bytes(session.rollback_tail, 0)
                for layer in range(2):
                    session.append(layer, at(length - n, length), row[:n], row[:n])
                if number >= 2:  # the first round fills the interpreter's own caches
                    what = f"dropping {n} of {length} rows"
                    require(made == 0, f"{what} made {made} allocation calls")
                    require(
                        copied == passing, f"{what} copied {copied} bytes, and 0 rows {passing}"
                    )


def a_step_allocates_nothing(trial: Trial) -> None:
    """I13: no malloc, realloc, mmap or the like inside a store call of a decode step, by count, in
    any thread that works for it.

    Counts where the process was started with the counter before the C library, as
    ``python -m kvtrial.conformance`` does; the written result says whether it was.
    """
    if not allocations.available():
        return
    for threads in (1, 2) if trial.has(Capability.THREADS) else (1,):
        _count_steps(trial, threads)


def _count_steps(trial: Trial, threads: int) -> None:
    page = trial.page_tokens
    with trial.store(pages=16, layers=2, threads=threads) as store:
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
                        "attend": (session.attend, (layer, q, out, 0.5)),
                    }
                for name, (verb, arguments) in calls.items():
                    made = allocations.count_calls(verb, *arguments, every_thread=True)
                    # The first two pages warm the interpreter's own caches.
                    require(
                        number < 2 * page or made == 0,
                        f"{name} at position {number} made {made} allocation calls at {threads} "
                        "threads",
                    )
