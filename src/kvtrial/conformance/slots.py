"""Direct writes: `reserve_slot` hands out the cache itself, `commit_slot` makes the rows valid."""

from __future__ import annotations

import numpy as np

from kvtrial.conformance.trial import (
    Trial,
    at,
    attended,
    contents,
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
from kvtrial.contract import Capability, KVSession, OutOfRange, SlotCancelled, StepIncomplete


def write(session: KVSession, positions: range, tag: int = 0) -> None:
    """One whole step through slots, each layer reserved, written in place and committed."""
    for layer in range(session.store.spec.layers):
        where = at(positions.start, positions.stop)
        slot = session.reserve_slot(layer, where)
        require(slot is not None, f"positions {positions} are not reservable")
        assert slot is not None
        k, v = rows(session.store, layer, positions, tag)
        for view, given in zip(slot, (k, v), strict=True):
            require(view.shape == given.shape, f"a slot view of shape {view.shape}")
            require(view.dtype == np.float32, f"a slot view of {view.dtype}")
            require(view.flags.writeable, "a slot view is read-only")
            view[...] = given
        session.commit_slot(layer, where)


def equals_append(trial: Trial) -> None:
    """A18: decode through slots, across page edges, is bitwise what append stores."""
    page = trial.page_tokens
    with trial.store() as store:
        direct, appended = store.open_session(), store.open_session()
        for position in range(2 * page + 2):
            write(direct, range(position, position + 1))
            fill(appended, [position])
            require(contents(direct) == contents(appended), f"position {position}: rows differ")
        require(attended(direct) == attended(appended), "attention differs")
        require_rows(trial, direct, 1, range(2 * page + 2), 0, "rows written in place")


def many_rows_inside_a_page(trial: Trial) -> None:
    """Several positions inside one page at once; across an edge a paged store says None."""
    page = trial.page_tokens
    with trial.store() as store:
        direct, appended = store.open_session(), store.open_session()
        for positions in (range(0, 3), range(3, page), range(page, 2 * page)):
            write(direct, positions)
            fill(appended, positions)
        require(contents(direct) == contents(appended), "rows differ from append")
        write(direct, range(2 * page, 3 * page - 1))
        with unchanged(trial, store, direct, appended):
            require(direct.reserve_slot(0, at(0, 0)) is None, "no positions must give None")
            if store.page_nbytes:
                across = direct.reserve_slot(0, at(3 * page - 1, 3 * page + 1))
                require(across is None, "a reservation across a page edge must be None")


def unreservable_positions(trial: Trial) -> None:
    """Positions that are stored, repeated, falling or apart are refused or None."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(5))
        for positions in ([4], [0, 1], [6], [5, 5], [6, 5], [5, 7], [-1]):
            with unchanged(trial, store, session):
                try:
                    slot = session.reserve_slot(0, np.asarray(positions))
                except (OutOfRange, ValueError):
                    continue
                require(slot is None, f"positions {positions} were reserved at length 5")


def invisible_until_committed(trial: Trial) -> None:
    """A19: attention, reads and branches do not see what is reserved and not committed."""
    page = trial.page_tokens
    for length in (3, page):
        with trial.store(layers=1) as store:
            session = store.open_session()
            fill(session, range(length))
            seen = attended(session)
            shown = contents(session)
            newest = queries(store, 2)
            block, again = (np.full_like(newest, np.nan) for _ in range(2))
            session.attend_block(0, newest, block, 0.5)
            slot = session.reserve_slot(0, at(length, length + 1))
            require(slot is not None, f"position {length} is not reservable")
            assert slot is not None
            slot[0][...], slot[1][...] = np.nan, np.nan
            require(attended(session) == seen, "attention sees a reserved row")
            session.attend_block(0, newest, again, 0.5)
            require(np.array_equal(block, again), "a block of rows sees a reserved row")
            with raises(OutOfRange):
                q = queries(store, length + 1)
                session.attend_block(0, q, np.empty_like(q), 0.5)
            valid = session.valid(0)
            require(valid[:length].all() and not valid[length:].any(), "a reserved row is valid")
            with raises(OutOfRange):
                session.read(0, at(length, length + 1))
            require(session.length(0) == length + 1, "a reserved row does not count in the length")
            if trial.has(Capability.BRANCH):
                try:
                    branch = session.begin_branch()
                except StepIncomplete:
                    pass
                else:
                    require(branch.length(0) == length, "a branch sees a reserved row")
                    require(attended(branch) == seen, "a branch attends to a reserved row")
                    branch.close()
            session.abandon_step()
            require(contents(session) == shown, "abandon_step left a reservation")
            if trial.has(Capability.POOL):
                ledger_of(store, [session])


def commit_twice(trial: Trial) -> None:
    """Committing the same rows again changes nothing; other rows are `SlotCancelled`."""
    with trial.store(layers=1) as store:
        session = store.open_session()
        fill(session, range(2))
        with unchanged(trial, store, session), raises(SlotCancelled):
            session.commit_slot(0, at(2, 3))
        write(session, range(2, 4))
        with unchanged(trial, store, session):
            session.commit_slot(0, at(2, 4))
            with raises(SlotCancelled):
                session.commit_slot(0, at(4, 5))
        slot = session.reserve_slot(0, at(4, 6))
        require(slot is not None, "two positions inside a page are not reservable")
        for wrong in (at(4, 5), at(5, 6), at(4, 7)):
            with raises(SlotCancelled):
                session.commit_slot(0, wrong)


def other_mutations_cancel(trial: Trial) -> None:
    """I1: after any other mutation a late commit is `SlotCancelled`, the row never appears."""
    page = trial.page_tokens

    def append(session: KVSession) -> None:
        fill(session, [page], tag=8)

    def rollback(session: KVSession) -> None:
        session.rollback_tail(1)

    def abandon(session: KVSession) -> None:
        session.abandon_step()

    def invalidate(session: KVSession) -> None:
        session.invalidate(0, at(0, 1))

    mutations = {"append": append}
    if trial.has(Capability.ROLLBACK):
        mutations |= {"rollback_tail": rollback, "abandon_step": abandon}
    if trial.has(Capability.HOLES):
        mutations["invalidate"] = invalidate
    for name, mutate in mutations.items():
        with trial.store(layers=1) as store:
            session = store.open_session(position_holes_allowed=trial.has(Capability.HOLES))
            fill(session, range(page))
            slot = session.reserve_slot(0, at(page, page + 1))
            require(slot is not None, f"position {page} is not reservable")
            mutate(session)
            shown = contents(session)
            with raises(SlotCancelled):
                session.commit_slot(0, at(page, page + 1))
            require(contents(session) == shown, f"a late commit after {name} changed the session")
            if trial.has(Capability.POOL):
                ledger_of(store, [session])
            require(
                page >= session.length(0) or name == "append", f"{name} left a reserved position"
            )


def a_second_reservation(trial: Trial) -> None:
    """One reservation a layer: a second cancels the first."""
    with trial.store(layers=1) as store:
        session = store.open_session()
        fill(session, range(3))
        session.reserve_slot(0, at(3, 5))
        write(session, range(3, 4))
        require(session.length(0) == 4, f"length {session.length(0)} after one committed row")
        require_rows(trial, session, 0, range(4), 0, "after a second reservation")


@needs(Capability.BRANCH)
def shared_page_is_copied_first(trial: Trial) -> None:
    """I1: a slot inside a shared page must not write the other session's page."""
    with trial.store(layers=1) as store:
        parent = store.open_session()
        fill(parent, range(5))
        branch = parent.begin_branch()
        golden = contents(parent)
        write(branch, range(5, 6), tag=1)
        require(contents(parent) == golden, "a branch's slot wrote its parent's page")
        write(parent, range(5, 6), tag=2)
        require_rows(trial, branch, 0, [5], 1, "the branch's row")
        require_rows(trial, parent, 0, [5], 2, "the parent's row")
        require_rows(trial, branch, 0, range(5), 0, "the branch's prefix")


def neighbours_stay(trial: Trial) -> None:
    """A18: a written slot touches its own row only."""
    page = trial.page_tokens
    with trial.store(layers=1) as store:
        session, other = store.open_session(), store.open_session()
        fill(other, range(page + 2), tag=5)
        for position in (page - 1, page, page + 1):
            fill(session, range(session.length(0), position))
            slot = session.reserve_slot(0, at(position, position + 1))
            require(slot is not None, f"position {position} is not reservable")
            assert slot is not None
            slot[0][...], slot[1][...] = -1234.5, 4321.5
            session.commit_slot(0, at(position, position + 1))
            k, v = session.read(0, at(position, position + 1))
            require((k == -1234.5).all() and (v == 4321.5).all(), f"the row at {position}")
            before = [p for p in range(position) if p < page - 1]
            require_rows(trial, session, 0, before, 0, f"rows before {position}")
        require_rows(trial, other, 0, range(page + 2), 5, "another session")
