"""Holes: only where the session allows them, and never seen by attention."""

from __future__ import annotations

import numpy as np

from kvtrial.conformance.trial import (
    Trial,
    at,
    contents,
    fill,
    needs,
    queries,
    raises,
    require,
    require_attention,
    require_rows,
    rows,
    unchanged,
)
from kvtrial.contract import Capability, HoleNotAllowed, KVSession, OutOfRange, PoolExhausted


def punch(session: KVSession, positions: list[int]) -> None:
    """Make holes of ``positions`` in every layer."""
    for layer in range(session.store.spec.layers):
        session.invalidate(layer, np.asarray(positions, np.int64))


def refused_by_default(trial: Trial) -> None:
    """A session opened without holes refuses both ways of making them."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(4))
        k, v = rows(store, 0, [6])
        with unchanged(trial, store, session), raises(HoleNotAllowed):
            session.append(0, at(6, 7), k, v)
        k, v = rows(store, 0, [4, 6])
        with unchanged(trial, store, session), raises(HoleNotAllowed):
            session.append(0, np.array([4, 6]), k, v)
        with unchanged(trial, store, session), raises(HoleNotAllowed):
            session.invalidate(0, at(1, 2))
        if trial.has(Capability.BRANCH):
            branch = session.begin_branch()
            with unchanged(trial, store, session, branch), raises(HoleNotAllowed):
                branch.invalidate(0, at(1, 2))


@needs(Capability.SPILL)
def restored_holes_need_leave_too(trial: Trial) -> None:
    """A bitmap with holes is restored only where the session allows them."""
    valid = np.ones((2, 9), bool)
    valid[1, 4] = False
    with trial.store() as store:
        session = store.open_session()
        with unchanged(trial, store, session), raises(HoleNotAllowed):
            session.begin_restore(valid)
        allowed = store.open_session(position_holes_allowed=True)
        allowed.begin_restore(valid)
        allowed.finish_restore()
        require(np.flatnonzero(~allowed.valid(1)).tolist() == [4], "the restored hole is elsewhere")


def left_out_positions(trial: Trial) -> None:
    """Positions left out by an append are holes; the other rows keep their positions."""
    with trial.store() as store:
        session = store.open_session(position_holes_allowed=True)
        kept = [0, 2, 3, 7, trial.page_tokens + 1]
        fill(session, kept)
        for layer in range(2):
            require(session.length(layer) == kept[-1] + 1, f"length {session.length(layer)}")
            valid = np.flatnonzero(session.valid(layer)).tolist()
            require(valid == kept, f"valid positions {valid}, expected {kept}")
            require_rows(trial, session, layer, kept, 0, "rows beside holes")
            with raises(OutOfRange):
                session.read(layer, at(1, 2))


def far_positions_are_refused(trial: Trial) -> None:
    """A12: a hole of 2^62 positions is a typed error at bounded memory, not a page table."""
    with trial.store() as store:
        session = store.open_session(position_holes_allowed=True)
        fill(session, range(3))
        k, v = rows(store, 0, [0])
        for position in (2**62, 2**63 - 1):
            with unchanged(trial, store, session), raises(OutOfRange, PoolExhausted):
                session.append(0, np.array([position]), k, v)


def invalidated_positions(trial: Trial) -> None:
    """`invalidate` clears the named rows of the named layer and nothing else; twice is the same."""
    with trial.store() as store:
        session = store.open_session(position_holes_allowed=True)
        fill(session, range(20))
        session.invalidate(0, np.array([3, 17]))
        shown = contents(session)
        session.invalidate(0, np.array([3, 17]))
        session.invalidate(0, at(0, 0))
        require(contents(session) == shown, "invalidating a hole again changed something")
        left = [p for p in range(20) if p not in (3, 17)]
        require(np.flatnonzero(session.valid(0)).tolist() == left, "layer 0 has other holes")
        require(bool(session.valid(1).all()), "layer 1 got holes too")
        require_rows(trial, session, 0, left, 0, "rows beside holes")
        for bad in ([20], [-1], [0, 99]):
            with unchanged(trial, store, session), raises(OutOfRange):
                session.invalidate(0, np.asarray(bad))


def a_hole_at_the_end(trial: Trial) -> None:
    """I3: the length is the highest valid position + 1, and the next step still goes on.

    A position is appended once: what was invalidated is not filled again, at the end neither.
    """
    with trial.store() as store:
        session = store.open_session(position_holes_allowed=True)
        fill(session, range(6))
        punch(session, [0, 5])
        require(session.length(0) == 5, f"length {session.length(0)} with a hole at position 5")
        require(len(session.valid(0)) == 5, "valid() is longer than the length")
        k, v = rows(store, 0, [5])
        with unchanged(trial, store, session), raises(OutOfRange):
            session.append(0, at(5, 6), k, v)
        fill(session, [6])
        require(session.length(1) == 7, f"length {session.length(1)} after position 6")
        require_rows(trial, session, 1, [1, 2, 3, 4, 6], 0, "rows around a hole at the old end")
        if not trial.has(Capability.ROLLBACK):
            return
        punch(session, [6])
        session.rollback_tail(1)
        fill(session, [6], tag=2)
        require_rows(trial, session, 1, [6], 2, "a hole at the end that was rolled back and filled")


@needs(Capability.POOL)
def a_page_of_holes_costs_nothing(trial: Trial) -> None:
    """I3: a page that holds only holes is -1 in the page table and goes back to the pool."""
    page = trial.page_tokens
    with trial.store(pages=8, layers=1) as store:
        session = store.open_session(position_holes_allowed=True)
        fill(session, range(2 * page + 2))
        punch(session, list(range(page, 2 * page)))
        ids = session.page_table(0).page_ids.tolist()
        require(len(ids) == 3 and ids[1] == -1 and min(ids[0], ids[2]) >= 0, f"page ids {ids}")
        require(store.pages_free == 6, f"{store.pages_free} of 8 pages free")
        other = store.open_session(position_holes_allowed=True)
        fill(other, [4 * page])
        ids = other.page_table(0).page_ids.tolist()
        require(ids[:4] == [-1] * 4 and ids[4] >= 0, f"page ids {ids} for one row at {4 * page}")
        require(store.pages_free == 5, "pages of holes were taken from the pool")
        require_rows(trial, session, 0, range(page), 0, "before the page of holes")
        require_rows(trial, session, 0, range(2 * page, 2 * page + 2), 0, "after it")


@needs(Capability.BRANCH)
def holes_stay_in_their_branch(trial: Trial) -> None:
    """I3: a hole on a shared page belongs to the session that made it."""
    page = trial.page_tokens
    with trial.store() as store:
        parent = store.open_session(position_holes_allowed=True)
        fill(parent, range(page + 3))
        golden = contents(parent)
        branch = parent.begin_branch()
        punch(branch, [2, page + 1])
        require(contents(parent) == golden, "a branch's hole shows in its parent")
        require(not branch.valid(0)[2], "the branch has no hole")
        shown = contents(branch)
        punch(parent, list(range(page)))
        require(contents(branch) == shown, "a parent's hole shows in its branch")
        branch.close()
        require(bool(parent.valid(0)[page:].all()), "closing the branch made holes in its parent")


def masked_by_skipping(trial: Trial) -> None:
    """B1, B2, B5, I3: hole rows full of NaN and inf, at every kind of place, never leak."""
    page = trial.page_tokens
    n = 3 * page + 5
    places = {
        "first row": [0],
        "last row": [n - 1],
        "middle": [page // 2, page, 2 * page + 3],
        "first page": list(range(page)),
        "middle page": list(range(page, 2 * page)),
        "last page": list(range(3 * page, n)),
        "every other row": list(range(0, n, 2)),
        "all but one": [p for p in range(n) if p != page + 1],
    }
    for name, holes in places.items():
        with trial.store(layers=1) as store:
            session = store.open_session(position_holes_allowed=True)
            k, v = rows(store, 0, range(n))
            poisoned = k.copy(), v.copy()
            if not trial.profile.finite:  # which refuses rows that are not finite
                poisoned[0][holes], poisoned[1][holes] = np.nan, np.inf
            session.append(0, at(0, n), *poisoned)
            session.invalidate(0, np.asarray(holes))
            valid = np.ones(n, bool)
            valid[holes] = False
            q = queries(store)
            out = np.full_like(q, np.nan)
            session.attend(0, q, out, 0.3)
            require_attention(out, trial.profile, q, k, v, 0.3, valid, f"holes at {name}")


def low_scores_beside_holes(trial: Trial) -> None:
    """B5: the first page is all holes and every other score lies between -300 and -200."""
    page = trial.page_tokens
    n = 3 * page
    with trial.store(layers=1, q_heads=14, kv_heads=2, head_dim=64) as store:
        session = store.open_session(position_holes_allowed=True)
        _, v = rows(store, 0, range(n))
        k = np.zeros_like(v)
        k[:, :, 0] = np.linspace(-300, -200, n, dtype=np.float32)[:, None]
        q = np.zeros((14, 64), np.float32)
        q[:, 0] = 1
        session.append(0, at(0, n), k, v)
        for start, stop in ((0, page), (page, 2 * page), (2 * page, n)):
            session.invalidate(0, at(start, stop))
            valid = np.zeros(n, bool)
            valid[: session.length(0)] = session.valid(0)
            out = np.full_like(q, np.nan)
            session.attend(0, q, out, 1.0)
            require_attention(out, trial.profile, q, k, v, 1.0, valid, f"holes up to {stop}")


def nothing_valid_is_zero(trial: Trial) -> None:
    """B3: every position a hole: zeros, and the other layer is as before."""
    with trial.store() as store:
        session = store.open_session(position_holes_allowed=True)
        fill(session, range(20))
        q = queries(store)
        before, out = np.empty_like(q), np.full_like(q, np.nan)
        session.attend(1, q, before, 0.5)
        session.invalidate(0, at(0, 20))
        session.attend(0, q, out, 0.5)
        require(not out.any(), "attention over holes alone is not zero")
        session.attend(1, q, out, 0.5)
        require(np.array_equal(out, before), "holes in layer 0 changed layer 1")


def causal_block_skips_holes(trial: Trial) -> None:
    """The causal block form sees the same holes, its own rows included."""
    page = trial.page_tokens
    n = page + 9
    with trial.store(layers=1) as store:
        session = store.open_session(position_holes_allowed=True)
        k, v = rows(store, 0, range(n))
        session.append(0, at(0, n), k, v)
        holes = [0, page - 1, n - 3]
        session.invalidate(0, np.asarray(holes))
        q = queries(store, 5)
        out = np.full_like(q, np.nan)
        session.attend_block(0, q, out, 0.3)
        valid = np.ones(n, bool)
        valid[holes] = False
        for i in range(5):
            end = n - 5 + i + 1
            require_attention(
                out[i], trial.profile, q[i], k[:end], v[:end], 0.3, valid[:end], f"block row {i}"
            )
