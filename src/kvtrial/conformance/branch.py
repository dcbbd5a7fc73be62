"""Branches: copy-on-write, nested, with siblings; commit and rollback."""

from __future__ import annotations

from kvtrial.conformance.trial import (
    Trial,
    at,
    attended,
    contents,
    fill,
    ledger_of,
    needs,
    raises,
    require,
    require_rows,
    rows,
    unchanged,
)
from kvtrial.contract import (
    BranchDiverged,
    BranchesOpen,
    Capability,
    KVSession,
    KVStore,
    OutOfRange,
    PoolExhausted,
    StaleOwner,
    StepIncomplete,
)


def page_ids(session: KVSession, layer: int = 0) -> list[int]:
    return session.page_table(layer).page_ids.tolist()


def references(store: KVStore, session: KVSession) -> list[int]:
    counts = store.reference_counts()
    return [int(counts[page]) for page in page_ids(session)]


@needs(Capability.POOL)
def writers_do_not_meet(trial: Trial) -> None:
    """A1: parent and branches write the same position in any order; each sees its own."""
    page = trial.page_tokens
    length = page + 4
    for branches in (1, 3):
        for parent_first in (True, False):
            with trial.store(layers=1) as store:
                parent = store.open_session()
                fill(parent, range(length))
                family = [parent] + [parent.begin_branch() for _ in range(branches)]
                require(
                    references(store, parent) == [branches + 1] * 2,
                    f"references {references(store, parent)} with {branches} branches",
                )
                order = family if parent_first else family[::-1]
                for session in order:
                    fill(session, [length], tag=family.index(session) + 10)
                for number, session in enumerate(family):
                    require_rows(trial, session, 0, range(length), 0, f"prefix of {number}")
                    require_rows(trial, session, 0, [length], number + 10, f"tail of {number}")
                first = {page_ids(s)[0] for s in family}
                tails = {page_ids(s)[1] for s in family}
                require(len(first) == 1, f"the full page was copied: ids {first}")
                require(len(tails) == len(family), f"a written page is still shared: ids {tails}")
                require(
                    references(store, parent) == [branches + 1, 1],
                    f"references {references(store, parent)} after every tail was written",
                )
                ledger_of(store, family)


@needs(Capability.POOL)
def every_fork_length(trial: Trial) -> None:
    """A2: forks around page edges; write here, there, or in both; close in either order."""
    page = trial.page_tokens
    for length in (1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1):
        for writes in ("branch", "parent", "both"):
            with trial.store(pages=32) as store:
                parent = store.open_session()
                fill(parent, range(length))
                golden = contents(parent)
                branch = parent.begin_branch()
                require(contents(branch) == golden, f"a branch at {length} differs at birth")
                if writes != "branch":
                    fill(parent, range(length, length + 3), tag=1)
                if writes != "parent":
                    fill(branch, range(length, length + 3), tag=2)
                for session, tag, wrote in (
                    (parent, 1, writes != "branch"),
                    (branch, 2, writes != "parent"),
                ):
                    require_rows(trial, session, 1, range(length), 0, f"fork at {length}")
                    expected = length + 3 * wrote
                    require(session.length(1) == expected, f"length {session.length(1)}")
                    if wrote:
                        tail = range(length, length + 3)
                        require_rows(trial, session, 1, tail, tag, f"tail at {length}")
                if writes == "branch":
                    require(contents(parent) == golden, f"a branch at {length} wrote its parent")
                ledger_of(store, [parent, branch])
                with unchanged(trial, store, parent, branch), raises(BranchesOpen):
                    parent.close()
                branch.close()
                with raises(StaleOwner):
                    branch.length(0)
                parent.close()
                require(store.pages_free == store.pages_total, f"pages leak at fork {length}")


def commit_counts_from_the_fork(trial: Trial) -> None:
    """A7, A8: commit_prefix(a) for every a, then a bonus row: as if only those were appended."""
    page = trial.page_tokens
    for drafted in (3, page, page + 1):
        for kept in sorted({0, 1, drafted - 1, drafted}):
            with trial.store() as store:
                parent, plain = store.open_session(), store.open_session()
                fill(parent, range(5))
                fill(plain, range(5))
                branch = parent.begin_branch()
                fill(branch, range(5, 5 + drafted))
                for bad in (-1, drafted + 1, 2**40):
                    with unchanged(trial, store, parent, branch, plain), raises(OutOfRange):
                        branch.commit_prefix(bad)
                branch.commit_prefix(kept)
                with raises(StaleOwner):
                    branch.length(0)
                fill(plain, range(5, 5 + kept))
                require(contents(parent) == contents(plain), f"commit {kept} of {drafted}")
                for session in (parent, plain):
                    fill(session, [5 + kept], tag=3)
                require(
                    contents(parent) == contents(plain) and attended(parent) == attended(plain),
                    f"the row after commit {kept} of {drafted}",
                )
                if trial.has(Capability.POOL):
                    ledger_of(store, [parent, plain])
                parent.close()
                plain.close()


def moved_parent_refuses(trial: Trial) -> None:
    """A commit after the parent's own append, or a sibling's commit, is `BranchDiverged`."""
    with trial.store() as store:
        parent = store.open_session()
        fill(parent, range(6))
        first, second = parent.begin_branch(), parent.begin_branch()
        fill(first, range(6, 9), tag=1)
        fill(second, range(6, 9), tag=2)
        first.commit_prefix(2)
        require_rows(trial, parent, 0, [6, 7], 1, "the first sibling's commit")
        with unchanged(trial, store, parent, second), raises(BranchDiverged):
            second.commit_prefix(1)
        second.close()
        third = parent.begin_branch()
        fill(third, [8], tag=3)
        fill(parent, [8], tag=4)
        with unchanged(trial, store, parent, third), raises(BranchDiverged):
            third.commit_prefix(1)
        third.close()
        fourth = parent.begin_branch()
        fill(fourth, [9], tag=5)
        fill(parent, [9], tag=6)
        parent.rollback_tail(1)
        with raises(BranchDiverged):
            fourth.commit_prefix(1)


def rollback_stops_at_forks(trial: Trial) -> None:
    """A25: a branch does not roll back past its fork, nor a parent past its child's."""
    with trial.store() as store:
        parent = store.open_session()
        fill(parent, range(20))
        branch = parent.begin_branch()
        fill(branch, range(20, 23), tag=1)
        with unchanged(trial, store, parent, branch), raises(OutOfRange):
            branch.rollback_tail(10)
        with unchanged(trial, store, parent, branch), raises(OutOfRange):
            branch.rollback_tail(4)
        with unchanged(trial, store, parent, branch), raises(BranchesOpen):
            parent.rollback_tail(1)
        branch.rollback_tail(3)
        require(contents(branch) == contents(parent), "a branch rolled back to its fork differs")
        fill(branch, range(20, 22), tag=2)
        require_rows(trial, branch, 0, [20, 21], 2, "rows after the branch's rollback")
        require_rows(trial, parent, 0, range(20), 0, "the parent of a rolled-back branch")
        require(parent.length(0) == 20, "the parent's length moved")


def branches_nest(trial: Trial) -> None:
    """A grandchild commits into the child, the child into the parent."""
    page = trial.page_tokens
    with trial.store() as store:
        parent = store.open_session()
        fill(parent, range(page - 1))
        child = parent.begin_branch()
        fill(child, range(page - 1, page + 2))
        grandchild = child.begin_branch()
        fill(grandchild, range(page + 2, page + 6))
        for call in (lambda: child.commit_prefix(1), child.close, parent.close):
            with unchanged(trial, store, parent, child, grandchild), raises(BranchesOpen):
                call()
        grandchild.commit_prefix(3)
        require(child.length(0) == page + 5, f"the child's length is {child.length(0)}")
        child.commit_prefix(5)
        require(parent.length(1) == page + 4, f"the parent's length is {parent.length(1)}")
        for layer in range(2):
            require_rows(trial, parent, layer, range(page + 4), 0, "two commits")


@needs(Capability.HOLES)
def what_a_branch_gave_back_stays_its_ancestors(trial: Trial) -> None:
    """A page that a branch has cleared is written by its own branch: both commits leave the rows below
    the first fork as they were."""
    page = trial.page_tokens
    for below in (1, page - 4):
        with trial.store() as store:
            first = store.open_session(position_holes_allowed=True)
            start = page + below
            fill(first, range(start))
            second = first.begin_branch()
            for layer in range(store.spec.layers):
                second.invalidate(layer, at(page, start))
            third = second.begin_branch()
            fill(third, [start], tag=1)
            third.commit_prefix(1)
            second.commit_prefix(1)
            for layer in range(store.spec.layers):
                require_rows(trial, first, layer, range(start), 0, "below the first fork")
                require_rows(trial, first, layer, [start], 1, "what was committed twice")
            if trial.has(Capability.POOL):
                ledger_of(store, [first])


@needs(Capability.POOL)
def shared_pages_count_once(trial: Trial) -> None:
    """A15: 10 shared pages are 10 pages; each divergence costs one."""
    page = trial.page_tokens
    with trial.store(pages=16, layers=1) as store:
        parent = store.open_session()
        fill(parent, range(10 * page - 3))
        branches = [parent.begin_branch() for _ in range(3)]
        ten = 10 * store.page_nbytes
        require(store.resident_bytes == ten, f"{store.resident_bytes} bytes, not {ten}")
        for number, branch in enumerate(branches, start=1):
            fill(branch, [10 * page - 3], tag=number)
            expected = ten + number * store.page_nbytes
            require(store.resident_bytes == expected, f"divergence {number} cost other than 1 page")
        for branch in branches:
            branch.close()
        require(store.resident_bytes == ten, "closed branches kept pages")


@needs(Capability.POOL)
def commit_copies_nothing(trial: Trial) -> None:
    """Commit moves pages by their ids; the rest of the branch goes back to the pool."""
    page = trial.page_tokens
    with trial.store(pages=8, layers=1) as store:
        parent = store.open_session()
        fill(parent, range(page))
        branch = parent.begin_branch()
        fill(branch, range(page, 4 * page))
        ids = page_ids(branch)
        branch.commit_prefix(page + 1)
        require(page_ids(parent) == ids[:3], f"pages {page_ids(parent)} are not {ids[:3]}")
        require(store.pages_free == 5, f"{store.pages_free} pages free after the commit")


@needs(Capability.POOL)
def exhausted_copy_changes_nothing(trial: Trial) -> None:
    """A5: no page left for the copy of a shared page."""
    page = trial.page_tokens
    with trial.store(pages=2, layers=1) as store:
        parent = store.open_session()
        fill(parent, range(page + 2))
        branch = parent.begin_branch()
        with unchanged(trial, store, parent, branch), raises(PoolExhausted):
            fill(branch, [page + 2])
        with unchanged(trial, store, parent, branch), raises(PoolExhausted):
            fill(parent, [page + 2])
        branch.close()
        fill(parent, [page + 2])
        require_rows(trial, parent, 0, range(page + 3), 0, "after the branch closed")


def branch_waits_for_the_step(trial: Trial) -> None:
    """A branch inside a step is `StepIncomplete`, for child and parent alike."""
    with trial.store() as store:
        parent = store.open_session()
        fill(parent, range(3))
        branch = parent.begin_branch()
        branch.append(0, at(3, 4), *rows(store, 0, [3]))
        for call in (lambda: branch.commit_prefix(0), branch.begin_branch, branch.close):
            with unchanged(trial, store, parent, branch), raises(StepIncomplete):
                call()
        branch.abandon_step()
        branch.close()
        require(parent.length(0) == 3, "an abandoned branch moved its parent")
