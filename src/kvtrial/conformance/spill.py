"""Spill: page bytes out of one session and into another are the same cache, bitwise."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    BranchesOpen,
    Capability,
    KVError,
    KVSession,
    OutOfRange,
    PoolExhausted,
    StepIncomplete,
)


def spilled(session: KVSession) -> tuple[np.ndarray, list[list[bytes | None]]]:
    """The bitmap (L, rows) and every page's bytes: what a cold store keeps."""
    layers = range(session.store.spec.layers)
    n = max(session.length(layer) for layer in layers) - session.store.spec.base_position
    valid = np.zeros((len(layers), n), bool)
    pages: list[list[bytes | None]] = []
    for layer in layers:
        bits = session.valid(layer)
        valid[layer, : len(bits)] = bits
        row = []
        for index in range(len(session.page_table(layer).page_ids)):
            view = session.page_bytes(layer, index)
            if view is not None:
                require(view.readonly, "page_bytes is writable")
                require(
                    view.nbytes == session.store.page_nbytes,
                    f"page_bytes of {view.nbytes}, page_nbytes is {session.store.page_nbytes}",
                )
            row.append(None if view is None else bytes(view))
        pages.append(row)
    return valid, pages


def restore(session: KVSession, valid: np.ndarray, pages: list[list[bytes | None]]) -> None:
    """Fill an empty session from what `spilled` gave."""
    views = session.begin_restore(valid)
    require(len(views) == len(pages), f"begin_restore gave {len(views)} layers of {len(pages)}")
    for layer, (mine, given) in enumerate(zip(views, pages, strict=True)):
        given = [*given, *[None] * (len(mine) - len(given))]
        for index, (view, data) in enumerate(zip(mine, given, strict=True)):
            require((view is None) == (data is None), f"layer {layer} page {index}: a page or none")
            if view is not None and data is not None:
                require(not view.readonly, "begin_restore gave a read-only view")
                view.cast("B")[:] = data
    session.finish_restore()


def same_bits(trial: Trial) -> None:
    """A17, D10: restored rows, bitmap, length and attention are bitwise the spilled ones, and the
    next steps too, for prefixes of whole pages and others."""
    page = trial.page_tokens
    for n in (1, page - 1, page, page + 1, 3 * page):
        with trial.store() as store, trial.store() as again:
            require(store.page_format == again.page_format, "equal stores, other page_format")
            session, restored = store.open_session(), again.open_session()
            fill(session, range(n))
            restore(restored, *spilled(session))
            require(contents(restored) == contents(session), f"{n} rows differ after a restore")
            require(attended(restored) == attended(session), f"{n} rows attend otherwise")
            for step in range(n, n + 3):
                fill(session, [step])
                fill(restored, [step])
            require(restored.length(1) == n + 3, f"length {restored.length(1)} after {n} + 3 rows")
            require(attended(restored) == attended(session), f"decode after {n} restored rows")
            ledger_of(again, [restored])


def holes_and_odd_bits(trial: Trial) -> None:
    """I9: the hole bitmap comes back; -0.0 and NaN payloads keep their bits where FP32 is stored."""
    page = trial.page_tokens
    with trial.store(pages=32) as store:
        session = store.open_session(position_holes_allowed=True)
        n = 3 * page + 2
        for layer in range(2):
            k, v = rows(store, layer, range(n))
            k[0, 0, 0] = -0.0
            if trial.profile.exact:
                k[1, 0, 0:2] = np.array([0x7FC12345, 0xFFC54321], np.uint32).view(np.float32)
            session.append(layer, at(0, n), k, v)
            session.invalidate(layer, at(page, 2 * page))
            session.invalidate(layer, np.array([2 + layer, 2 * page + 1]))
        valid, pages = spilled(session)
        require(pages[0][1] is None, "a page of holes was spilled")
        restored = store.open_session(position_holes_allowed=True)
        restore(restored, valid, pages)
        require(contents(restored) == contents(session), "rows or bitmap differ")
        ledger_of(store, [session, restored])


def unfinished_is_invisible(trial: Trial) -> None:
    """D7: before `finish_restore` nothing is visible; `cancel_restore` gives the pages back."""
    page = trial.page_tokens
    with trial.store(pages=16) as store:
        session = store.open_session()
        fill(session, range(page + 3))
        valid, pages = spilled(session)
        target = store.open_session()
        free = store.pages_free
        target.begin_restore(valid)
        require(target.length(0) == 0, "rows of an unfinished restore are visible")
        require(not attended(target).strip(b"\0"), "an unfinished restore is attended to")
        target.cancel_restore()
        require(store.pages_free == free, "cancel_restore kept pages")
        with raises(KVError):
            target.finish_restore()
        other = store.open_session()
        other.begin_restore(valid)
        other.close()
        require(store.pages_free == free, "closing an unfinished restore kept pages")
        restore(target, valid, pages)
        require(contents(target) == contents(session), "a restore after a cancelled one")
        with unchanged(trial, store, session, target), raises(KVError):
            target.begin_restore(valid)


def valid_rows_alone(trial: Trial) -> None:
    """D11: a page's bytes follow from its valid rows: nothing of who had it before, nor of rows that were
    dropped, made holes, or belong to a branch, is in them."""
    page = trial.page_tokens
    n = page + 3

    def filled(store: Any, holes: bool = False) -> KVSession:
        session = store.open_session(position_holes_allowed=holes)
        fill(session, range(n))
        return session

    with trial.store() as store, trial.store() as fresh:
        want = spilled(filled(fresh))[1]
        other = store.open_session()
        fill(other, range(3 * page), tag=9)
        other.close()
        session = filled(store)
        require(spilled(session)[1] == want, "a page shows what it held before it was taken")
        last = want[0][1]
        require(
            # Codes of 4 bits share their bytes with rows that are not there: six rows' bytes for three.
            last is not None and last.count(0) >= len(last) * (page - 6) // page,
            "rows that were never appended are not zeros in a page's bytes",
        )
        if trial.has(Capability.ROLLBACK):
            fill(session, range(n, n + 4))
            session.rollback_tail(4)
            require(spilled(session)[1] == want, "a page shows rows that were rolled back")
        if trial.has(Capability.BRANCH):
            branch = session.begin_branch()
            fill(session, range(n, n + 2))
            fill(branch, range(n, n + 5))
            branch.rollback_tail(5)
            require(spilled(branch)[1] == want, "a branch's page shows rows of its parent")
            branch.close()
    if not trial.has(Capability.HOLES):
        return
    with trial.store() as store, trial.store() as fresh:
        session, left_out = filled(store, holes=True), fresh.open_session(True)
        for layer in range(2):
            session.invalidate(layer, at(1, 3))
            kept = [i for i in range(n) if i not in (1, 2)]
            left_out.append(layer, np.array(kept), *rows(fresh, layer, kept))
        require(
            spilled(session)[1] == spilled(left_out)[1], "a page shows rows that were made holes"
        )


@needs(Capability.RESERVE_SLOT)
def reserved_rows_are_not_spilled(trial: Trial) -> None:
    """A19: what is reserved and not committed has no bit in a spill, nor a page of its own."""
    page = trial.page_tokens
    for length in (3, page):
        with trial.store(layers=1) as store:
            session = store.open_session()
            fill(session, range(length))
            shown = contents(session)
            slot = session.reserve_slot(0, at(length, length + 1))
            require(slot is not None, f"position {length} is not reservable")
            assert slot is not None
            slot[0][...], slot[1][...] = 5, 5
            try:
                valid, pages = spilled(session)
            except StepIncomplete:  # whether a reservation has begun the step is not said
                continue
            require(not valid[:, length:].any(), "a reserved row is spilled as valid")
            require(not any(pages[0][-(-length // page) :]), "a reserved row's page is spilled")
            restored = store.open_session()
            restore(restored, valid[:, :length], [row[: -(-length // page)] for row in pages])
            require(contents(restored) == shown, "a reserved row came back by a restore")


def refused_restores(trial: Trial) -> None:
    """Too many pages, a wrong bitmap, a session that is not empty, a page that is not there."""
    page = trial.page_tokens
    with trial.store(pages=4, layers=2) as store:
        session = store.open_session()
        with unchanged(trial, store, session), raises(PoolExhausted):
            session.begin_restore(np.ones((2, 3 * page), bool))
        wrong: tuple[Any, ...] = (
            np.ones((1, 4), bool),
            np.ones((2, 4), np.float32),
            np.ones(4, bool),
        )
        for bad in wrong:
            with unchanged(trial, store, session), raises(KVError):
                session.begin_restore(bad)
        with raises(KVError):
            session.finish_restore()
        if trial.has(Capability.BRANCH):
            branch = session.begin_branch()
            with unchanged(trial, store, session, branch), raises(BranchesOpen):
                session.begin_restore(np.ones((2, page), bool))
            branch.close()
        fill(session, range(3))
        with unchanged(trial, store, session), raises(KVError):
            session.begin_restore(np.ones((2, 4), bool))
        for layer, index in ((0, 1), (0, -1), (0, 99)):
            with raises(OutOfRange):
                session.page_bytes(layer, index)
        for layer in (-1, 2):
            with raises(KVError):
                session.page_bytes(layer, 0)
        session.append(0, at(3, 4), *rows(store, 0, [3]))
        with raises(StepIncomplete):
            session.page_bytes(0, 0)
        session.abandon_step()
        require_rows(trial, session, 1, range(3), 0, "after refused restores")
