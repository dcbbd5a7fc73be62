"""Candidates with one fault each. A suite that lets one of them pass is itself wrong."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from kvtrial.contract import Candidate, merge
from stranger import Session, Store, candidate


class ForgetfulSession(Session):
    """Off by one at a page's edge: its first row does not count as long as it is the last."""

    def attend(self, layer: Any, q: Any, out: Any, scale: Any) -> None:
        base, end = self.store.spec.base_position, self.length(layer)
        if (end - base) % self.store.spec.page_tokens != 1:
            self.inner.attend(layer, q, out, scale)
        else:
            rest = (base, end - 1)
            out[:] = merge([self.inner.attend_partial(layer, q, scale, positions=rest)])


class KeepingSession(Session):
    """A layer's output is computed when a page begins, and given again until the next does."""

    def __init__(self, store: Store, inner: Any) -> None:
        super().__init__(store, inner)
        self.kept: dict[int, tuple[int, np.ndarray]] = {}

    def attend(self, layer: Any, q: Any, out: Any, scale: Any) -> None:
        page = self.length(layer) // self.store.spec.page_tokens
        if layer not in self.kept or self.kept[layer][0] != page:
            self.inner.attend(layer, q, out, scale)
            self.kept[layer] = page, out.copy()
        out[:] = self.kept[layer][1]


class LeakingSession(Session):
    """Of the pages that a rollback gives back, somebody who is never heard of again takes one."""

    def rollback_tail(self, n: Any) -> None:
        before = self.store.pages_free
        self.inner.rollback_tail(n)
        if self.store.pages_free > before:
            spec = self.store.spec
            row = np.zeros((1, spec.local_kv_heads, spec.head_dim), np.float32)
            at = np.array([spec.base_position])
            self.store.inner.open_session().append(0, at, row, row)


class AllocatingSession(Session):
    """Attention makes a work space of its own each time."""

    def attend(self, layer: Any, q: Any, out: Any, scale: Any) -> None:
        np.empty(1 << 20, np.uint8)
        self.inner.attend(layer, q, out, scale)


class CrashingSession(Session):
    """Attention takes the process down."""

    def attend(self, layer: Any, q: Any, out: Any, scale: Any) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


def _wrong(name: str, session: type[Session]) -> Candidate:
    store = type(f"{name}Store", (Store,), {"session_type": session})
    return candidate(name, str(session.__doc__), store)


FORGETS_A_ROW = _wrong("ForgetsARow", ForgetfulSession)
KEEPS_ITS_OUTPUT = _wrong("KeepsItsOutput", KeepingSession)
LEAKS_A_PAGE = _wrong("LeaksAPage", LeakingSession)
ALLOCATES = _wrong("Allocates", AllocatingSession)
CRASHES = _wrong("Crashes", CrashingSession)
