"""Appends: many rows at once equal many appends of one, and steps go layer by layer."""

from __future__ import annotations

from collections.abc import Callable

from kvtrial.conformance.trial import (
    Trial,
    at,
    attended,
    contents,
    fill,
    fill_singly,
    needs,
    raises,
    require,
    require_rows,
    rows,
    unchanged,
)
from kvtrial.contract import Capability, OutOfRange, StepIncomplete


def any_n_equals_singles(trial: Trial) -> None:
    """A20, A6: n rows in one call are n single appends, bitwise, in every layer."""
    page = trial.page_tokens
    with trial.store(pages=64) as store:
        for n in (0, 1, 2, page - 1, page, page + 1, 3 * page):
            for before in (0, 1, page - 1, page):
                many, single = store.open_session(), store.open_session()
                fill(many, range(before))
                fill(single, range(before))
                fill(many, range(before, before + n))
                fill_singly(single, range(before, before + n))
                require(
                    contents(many) == contents(single),
                    f"{n} rows after {before}: one append differs from {n} appends",
                )
                require(attended(many) == attended(single), f"{n} rows after {before}: attention")
                many.close()
                single.close()


def every_row_at_its_place(trial: Trial) -> None:
    """A6: for every fill of the last page, what is read back is what was appended."""
    page = trial.page_tokens
    with trial.store(pages=16) as store:
        for before in range(page):
            session = store.open_session()
            n = 2 * page - before // 2
            fill(session, range(before))
            fill(session, range(before, before + n))
            for layer in range(2):
                require_rows(trial, session, layer, range(before + n), 0, f"{before} + {n} rows")
                require(session.length(layer) == before + n, f"length after {before} + {n} rows")
            session.close()


@needs(Capability.POOL)
def pages_used_are_rounded_up(trial: Trial) -> None:
    """A6, A18: a page is taken with its first row, not a token early or late."""
    page = trial.page_tokens
    with trial.store(pages=8, layers=1) as store:
        session = store.open_session()
        for n in range(1, 3 * page + 2):
            fill(session, [n - 1])
            used = store.pages_total - store.pages_free
            require(used == -(-n // page), f"{n} rows use {used} pages of {page} tokens")
            table = session.page_table(0)
            require(table.length == n, f"page_table says length {table.length} after {n} rows")
            require(len(table.page_ids) == used, f"page table of {len(table.page_ids)} pages")


def base_position_is_where_it_starts(trial: Trial) -> None:
    """An empty layer's length is the base position; lower positions are refused."""
    with trial.store(base_position=100) as store:
        session = store.open_session()
        require(session.length(0) == 100, f"an empty layer's length is {session.length(0)}")
        k, v = rows(store, 0, [99])
        with unchanged(trial, store, session), raises(OutOfRange):
            session.append(0, at(99, 100), k, v)
        fill(session, range(100, 140))
        require(session.length(1) == 140, f"length {session.length(1)} after position 139")
        require(len(session.valid(0)) == 40, "valid() starts at base_position")
        require_rows(trial, session, 1, range(100, 140), 0, "rows from base_position")


def positions_are_not_rewritten(trial: Trial) -> None:
    """A stored position can't be appended again, nor can positions fall or repeat."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(5))
        for positions in ([4], [0], [6, 5], [5, 5], [-1]):
            k, v = rows(store, 0, [0] * len(positions))
            with unchanged(trial, store, session), raises(OutOfRange, ValueError):
                session.append(0, at(0, len(positions)) * 0 + positions, k, v)


def steps_go_layer_by_layer(trial: Trial) -> None:
    """I2: layer 0 waits for the others, and no layer passes the one before it."""
    with trial.store(layers=3) as store:
        session = store.open_session()
        fill(session, range(4))

        def put(layer: int, start: int, stop: int) -> None:
            session.append(layer, at(start, stop), *rows(store, layer, range(start, stop)))

        for layer in (1, 2):
            with unchanged(trial, store, session), raises(StepIncomplete):
                put(layer, 4, 5)
        put(0, 4, 6)
        with unchanged(trial, store, session), raises(StepIncomplete):
            put(0, 6, 7)
        put(1, 4, 5)
        with unchanged(trial, store, session), raises(StepIncomplete):
            put(1, 5, 7)
        with unchanged(trial, store, session), raises(StepIncomplete):
            put(2, 4, 6)
        put(2, 4, 5)
        with unchanged(trial, store, session), raises(StepIncomplete):
            put(0, 6, 7)
        put(1, 5, 6)
        put(2, 5, 6)
        put(0, 6, 7)
        require_rows(trial, session, 2, range(6), 0, "two steps in pieces")


@needs(Capability.ROLLBACK)
def boundary_verbs_wait_for_the_step(trial: Trial) -> None:
    """I2: inside a step rollback, branch and page reads are refused; abandon_step ends it."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(trial.page_tokens))
        whole = contents(session)
        session.append(0, at(trial.page_tokens, trial.page_tokens + 1), *rows(store, 0, [999]))
        calls: list[Callable[[], object]] = [lambda: session.rollback_tail(1)]
        if trial.has(Capability.BRANCH):
            calls.append(lambda: session.begin_branch())
        if trial.has(Capability.SPILL):
            calls.append(lambda: session.page_bytes(0, 0))
        calls.append(lambda: session.close())
        for call in calls:
            with unchanged(trial, store, session), raises(StepIncomplete):
                call()
        session.abandon_step()
        require(contents(session) == whole, "abandon_step did not restore the last whole step")
        session.abandon_step()
        require(contents(session) == whole, "abandon_step at a boundary is not a no-op")
        session.rollback_tail(1)
        fill(session, range(trial.page_tokens - 1, trial.page_tokens + 2))
        require_rows(trial, session, 1, range(trial.page_tokens + 2), 0, "after abandon_step")
