"""Pages of known bytes behind the contract's verbs: what the cold stores are tried with.

Sequence n has `pattern_tokens` (n) and the bytes of `pattern_session` (n), so whoever reopens a store can
tell what it has to hold.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtrial.cold.keys import Identity
from kvtrial.contract import I64, Bool, InvalidArgument, PoolExhausted, StoreSpec

PATTERN_ROWS = 37  # two whole pages of 16 and a partial one
SHARED_ROWS = 16  # the first page, which others have too


class PatternStore:
    """Pages of plain bytes behind those verbs of the contract that the cold tier uses."""

    def __init__(
        self, page_tokens: int = 16, pages: int = 10_000, layers: int = 2, threads: int = 1
    ) -> None:
        self.spec = StoreSpec(
            layers=layers,
            q_heads=1,
            kv_heads=1,
            head_dim=8,
            page_tokens=page_tokens,
            threads=threads,
            budget_bytes=1,
        )
        self.page_format = f"pattern-P{page_tokens}"
        self.page_nbytes = page_tokens * 2 * 8 * 4
        self.pages_free = pages

    def open_session(self, position_holes_allowed: bool = False) -> PatternSession:
        """An empty session."""
        return PatternSession(self, position_holes_allowed)

    def filled(self, rows: int, seed: int = 0, holes: bool = False) -> PatternSession:
        """A session of ``rows`` rows whose bytes follow from ``seed``."""
        session = self.open_session(holes)
        draw = np.random.default_rng(seed)
        session.pages = [
            [
                draw.integers(0, 256, self.page_nbytes, np.uint8)
                for _ in range(-(-rows // self.spec.page_tokens))
            ]
            for _ in range(self.spec.layers)
        ]
        session.bits = np.ones((self.spec.layers, rows), bool)
        return session

    def identity(self) -> Identity:
        """Of a model that doesn't exist."""
        return Identity.of(
            self,  # type: ignore[arg-type]
            model_sha256="0" * 64,
            rope_base=1e4,
            activations="fp32",
        )


class PatternSession:
    """One sequence of a `PatternStore`: bytes per layer and page, and the validity (L, rows)."""

    def __init__(self, store: PatternStore, position_holes_allowed: bool) -> None:
        self.store = store
        self.position_holes_allowed = position_holes_allowed
        self.pages: list[list[Any]] = [[] for _ in range(store.spec.layers)]
        self.bits: Bool = np.zeros((store.spec.layers, 0), bool)
        self._coming: Bool = self.bits
        self._taken = 0

    def valid(self, layer: int) -> Bool:
        """As the contract says: up to the last valid row."""
        bits = self.bits[layer]
        return bits[: bits.nonzero()[0].max(initial=-1) + 1]

    def length(self, layer: int) -> int:
        """Highest valid position + 1."""
        return len(self.valid(layer))

    def page_bytes(self, layer: int, index: int) -> memoryview | None:
        """One page, read-only."""
        page = self.pages[layer][index]
        return None if page is None else memoryview(page).toreadonly()

    def begin_restore(self, valid: Bool) -> list[list[memoryview | None]]:
        """Take pages from the pool."""
        if self.bits.size:
            raise InvalidArgument("the session is not empty; open a new one")
        p = self.store.spec.page_tokens
        starts = range(0, valid.shape[1], p)
        held = [
            [bool(valid[layer, s : s + p].any()) for s in starts] for layer in range(len(valid))
        ]
        need = sum(map(sum, held))
        if need > self.store.pages_free:
            raise PoolExhausted(f"{need} pages needed, {self.store.pages_free} free")
        self.store.pages_free -= need
        self._coming, self._taken = valid.copy(), need
        self.pages = [
            [np.zeros(self.store.page_nbytes, np.uint8) if h else None for h in layer]
            for layer in held
        ]
        return [[None if p is None else memoryview(p) for p in layer] for layer in self.pages]

    def finish_restore(self) -> None:
        """Make the rows visible."""
        self.bits = self._coming

    def cancel_restore(self) -> None:
        """Give the pages back."""
        self.pages = [[] for _ in self.pages]
        self.store.pages_free += self._taken

    def contents(self) -> list[list[bytes | None]]:
        """All bytes, to compare."""
        return [[None if p is None else bytes(p) for p in layer] for layer in self.pages]


def pattern_tokens(n: int, rows: int = PATTERN_ROWS) -> I64:
    """The tokens of sequence ``n``: the first page is shared by eight sequences."""
    tokens = np.arange(rows, dtype=np.int64)
    tokens[:16] += 1000 * (n // 8)
    tokens[16:] += 1000 * n
    return tokens


def pattern_session(store: PatternStore, n: int) -> PatternSession:
    """The rows of sequence ``n``; what tokens share, bytes share."""
    session = store.filled(PATTERN_ROWS, seed=n)
    shared = store.filled(PATTERN_ROWS, seed=-1 - n // 8 + 2**32)
    for layer, pages in enumerate(shared.pages):
        session.pages[layer][0] = pages[0]
    return session
