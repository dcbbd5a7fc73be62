"""A store around K1's: every verb goes through. What is wrong in `wrong` is wrong in one verb of it."""

from __future__ import annotations

from typing import Any

from kvtrial import candidates
from kvtrial.contract import (
    FP32,
    Candidate,
    Capability,
    InvalidArgument,
    PageTable,
    StoreSpec,
)


class Session:
    """A session of K1, with the store that it was opened from."""

    def __init__(self, store: Store, inner: Any) -> None:
        self.store, self.inner = store, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin_branch(self) -> Session:
        return type(self)(self.store, self.inner.begin_branch())


class Store:
    """A store of K1 that opens sessions of ``session_type``."""

    session_type = Session

    def __init__(self, spec: StoreSpec) -> None:
        self.inner: Any = candidates.get("K1").open(spec)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open_session(self, position_holes_allowed: bool = False) -> Session:
        return self.session_type(self, self.inner.open_session(position_holes_allowed))

    def page_table(self, session: Any, layer: Any) -> PageTable:
        if not isinstance(session, Session):
            raise InvalidArgument(f"{session!r} is no session of this store; give one of its own")
        return self.inner.page_table(session.inner, layer)


def candidate(name: str, title: str, opened: type[Store]) -> Candidate:
    """All that K1 can do, under another name."""
    return Candidate(
        name=name,
        title=title,
        role="contender",
        profile=FP32,
        language="Cython",
        owner="Python",
        layout="paged [kv_head][token][head_dim]",
        capabilities=frozenset(Capability),
        open=opened,
    )


WRAPPED = candidate("Wrapped", "K1 behind a wrapper in Python", Store)
