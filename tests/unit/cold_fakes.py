"""A page store of numpy arrays with the verbs that the cold tier uses."""

from __future__ import annotations

import numpy as np

from kvtrial.cold import Identity
from kvtrial.contract import InvalidArgument, PoolExhausted, StoreSpec

P = 16


class FakeStore:
    """Pages are bytearrays, (L, pages) of them a session; a pool counts them."""

    def __init__(self, page_tokens: int = P, pages: int = 10_000, layers: int = 2) -> None:
        self.spec = StoreSpec(
            layers=layers,
            q_heads=2,
            kv_heads=1,
            head_dim=8,
            page_tokens=page_tokens,
            budget_bytes=1,
        )
        self.page_format = f"fake-fp32-P{page_tokens}"
        self.page_nbytes = page_tokens * 2 * 8 * 4
        self.pages_free = pages * layers

    def open_session(self, position_holes_allowed: bool = False) -> FakeSession:
        return FakeSession(self, position_holes_allowed)


class FakeSession:
    def __init__(self, store: FakeStore, position_holes_allowed: bool) -> None:
        self.store = store
        self.position_holes_allowed = position_holes_allowed
        self.pages: list[list[bytearray | np.ndarray | None]] = [
            [] for _ in range(store.spec.layers)
        ]
        self.bits = np.zeros((store.spec.layers, 0), bool)

    def valid(self, layer: int) -> np.ndarray:
        bits = self.bits[layer]
        return bits[: bits.nonzero()[0].max(initial=-1) + 1]

    def length(self, layer: int) -> int:
        return len(self.valid(layer))

    def page_bytes(self, layer: int, index: int) -> memoryview | None:
        page = self.pages[layer][index]
        return None if page is None else memoryview(page).toreadonly()

    def begin_restore(self, valid: np.ndarray) -> list[list[memoryview | None]]:
        if self.bits.any():
            raise InvalidArgument("not empty")
        p = self.store.spec.page_tokens
        starts = range(0, valid.shape[1], p)
        held = [[valid[layer, s : s + p].any() for s in starts] for layer in range(len(valid))]
        need = sum(map(sum, held))
        if need > self.store.pages_free:
            raise PoolExhausted(f"{need} pages, {self.store.pages_free} free")
        self.store.pages_free -= need
        self.pages = [
            [np.zeros(self.store.page_nbytes, np.uint8) if h else None for h in layer]
            for layer in held
        ]
        self._coming, self._taken = valid, need
        return [[None if p is None else memoryview(p) for p in layer] for layer in self.pages]

    def finish_restore(self) -> None:
        self.bits = self._coming.copy()

    def cancel_restore(self) -> None:
        self.pages = [[] for _ in self.pages]
        self.store.pages_free += self._taken


def tokens(n: int) -> np.ndarray:
    return np.arange(n) * 7 % 1000


def filled(store: FakeStore, rows: int, holes: bool = False, seed: int = 1) -> FakeSession:
    """A session with ``rows`` rows of random bytes."""
    session = store.open_session(holes)
    rng = np.random.default_rng(seed)
    n = -(-rows // store.spec.page_tokens)
    session.pages = [
        [rng.integers(0, 256, store.page_nbytes, np.uint8) for _ in range(n)]
        for _ in range(store.spec.layers)
    ]
    session.bits = np.ones((store.spec.layers, rows), bool)
    return session


def pages_of(session: FakeSession) -> list[list[bytes | None]]:
    return [[None if p is None else bytes(p) for p in layer] for layer in session.pages]


def identity_of(store: FakeStore) -> Identity:
    return Identity.of(store, model_sha256="0" * 64, rope_base=1e4)  # type: ignore[arg-type]
