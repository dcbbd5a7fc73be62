"""`rollback_tail`: the prefix stays, the pages come back, nothing is copied."""

from __future__ import annotations

from kvtrial.conformance.trial import (
    Trial,
    attended,
    contents,
    fill,
    needs,
    raises,
    require,
    require_rows,
    unchanged,
)
from kvtrial.contract import Capability, OutOfRange


def zero_and_too_many(trial: Trial) -> None:
    """A7: 0 is a no-op; more than there is, or a negative count, is refused."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(3))
        with unchanged(trial, store, session):
            session.rollback_tail(0)
        for n in (4, 5, -1, -3, 2**31, 2**62):
            with unchanged(trial, store, session), raises(OutOfRange):
                session.rollback_tail(n)
        session.rollback_tail(3)
        require(session.length(0) == 0, f"length is {session.length(0)} after dropping all")
        require(not attended(session).strip(b"\0"), "an empty session does not attend to zeros")


def history_stays(trial: Trial) -> None:
    """A9: after 4 rows more and a rollback of 4, attention is bitwise what it was."""
    for before in (1, 16, trial.page_tokens, trial.page_tokens + 5):
        with trial.store() as store:
            session = store.open_session()
            fill(session, range(before))
            shown, seen = contents(session), attended(session)
            fill(session, range(before, before + 4), tag=5)
            session.rollback_tail(4)
            require(contents(session) == shown, f"rows differ after rollback to {before}")
            require(attended(session) == seen, f"attention differs after rollback to {before}")


def draft_then_bonus(trial: Trial) -> None:
    """A8, B2: what is appended after a rollback stands as if the dropped rows had never been."""
    page = trial.page_tokens
    for drafted in (3, page, page + 1):
        for kept in {0, 1, drafted - 1, drafted}:
            with trial.store() as store:
                drafted_session, plain = store.open_session(), store.open_session()
                for session in (drafted_session, plain):
                    fill(session, range(5))
                fill(drafted_session, range(5, 5 + kept))
                fill(drafted_session, range(5 + kept, 5 + drafted), tag=9)
                drafted_session.rollback_tail(drafted - kept)
                fill(plain, range(5, 5 + kept))
                for session in (drafted_session, plain):
                    fill(session, [5 + kept], tag=2)
                require(
                    contents(drafted_session) == contents(plain)
                    and attended(drafted_session) == attended(plain),
                    f"{kept} of {drafted} drafted rows kept: differs from appending only those",
                )


@needs(Capability.POOL)
def pages_come_back(trial: Trial) -> None:
    """A10: past a page edge the freed page serves another session; the first does not see it."""
    page = trial.page_tokens
    with trial.store(pages=6, layers=2) as store:
        session = store.open_session()
        fill(session, range(2 * page + 1))
        require(store.pages_free == 0, f"{store.pages_free} pages free, expected none")
        session.rollback_tail(2)
        table = session.page_table(0)
        require(len(table.page_ids) == 2, f"{len(table.page_ids)} pages for {2 * page - 1} rows")
        require(table.length == 2 * page - 1, f"length {table.length}")
        require(len(session.valid(0)) == 2 * page - 1, "the bitmap is longer than the layer")
        require(store.pages_free == 2, f"{store.pages_free} pages came back, expected 2")
        seen = attended(session)
        other = store.open_session()
        fill(other, range(page), tag=4)
        require(attended(session) == seen, "another session's rows show through a freed page")
        other.close()
        for _ in range(3):
            fill(session, range(2 * page - 1, 2 * page + 1))
            session.rollback_tail(2)
        require(store.pages_free == 2, "a rollback across a page edge lost a page")
        require_rows(trial, session, 1, range(2 * page - 1), 0, "after rollbacks")
