"""Stores and sessions for a measured process, filled from a workload snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtrial.candidates import get, open_store, pool_bytes
from kvtrial.contract import I64, Capability, KVSession, KVStore
from kvtrial.host import machine

#: Beside pools and weights, a measured process holds probes and the interpreter.
HEADROOM_BYTES = 1 << 30
#: Pages a layer and session beyond the filled ones: the append and branch costs need room.
SPARE_PAGES = 4
#: Sessions whose pages are given back in turn, so that a pool's free pages lie in no order.
_SHUFFLED_SESSIONS = 8
#: What a candidate needs for that; one that lacks a part of it keeps its own order.
_SHUFFLES = {Capability.POOL, Capability.SPILL, Capability.ROLLBACK}


@dataclass(frozen=True)
class Snapshot:
    """One session's filled context, as `kvtrial.stages.workload` wrote it.

    ``k`` and ``v`` are float32 (L, N, H_kv, D), memory-mapped; ``next_id`` is the greedy token
    after the context; ``forced`` int64 (F,) are the text's own tokens there, which every arm is fed.
    """

    k: np.ndarray
    v: np.ndarray
    next_id: int
    forced: I64

    @classmethod
    def open(cls, folder: str | Path) -> Snapshot:
        """Map a snapshot's folder; nothing is read yet."""
        folder = Path(folder)
        tokens = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        return cls(
            k=np.load(folder / "k.npy", mmap_mode="r"),
            v=np.load(folder / "v.npy", mmap_mode="r"),
            next_id=int(tokens["next_id"]),
            forced=np.array(tokens["forced"], np.int64),
        )

    @classmethod
    def synthetic(cls, shape: dict[str, int], tokens: int, seed: int) -> Snapshot:
        """Rows drawn from the normal law, for a shape that no model at hand has; no stream follows."""
        draw = np.random.default_rng(seed)
        size = (shape["layers"], tokens, shape["kv_heads"], shape["head_dim"])
        k, v = (draw.standard_normal(size, np.float32) for _ in range(2))
        return cls(k, v, next_id=0, forced=np.zeros(0, np.int64))

    def first(self, tokens: int) -> Snapshot:
        """Its first positions alone."""
        return replace(self, k=self.k[:, :tokens], v=self.v[:, :tokens])

    @property
    def tokens(self) -> int:
        """N, the filled positions."""
        return int(self.k.shape[1])


def needed_bytes(
    name: str, shape: dict[str, int], *, tokens: int, sessions: int, page_tokens: int
) -> int:
    """Bytes of a candidate's pool for ``sessions`` of ``tokens`` each, with `SPARE_PAGES`.

    ``shape`` has layers, q_heads, kv_heads and head_dim.
    """
    return pool_bytes(
        name,
        shape,
        tokens=tokens,
        sessions=sessions,
        page_tokens=page_tokens,
        spare_pages=SPARE_PAGES,
    )


def largest_bytes(names: Iterable[str], shape: dict[str, int], **room: int) -> int:
    """`needed_bytes` of the candidate that takes most, of those that are built here."""
    built = [name for name in names if get(name).not_built is None]
    return max(needed_bytes(name, shape, **room) for name in built)


@contextmanager
def opened(
    name: str,
    shape: dict[str, int],
    *,
    tokens: int,
    sessions: int = 1,
    page_tokens: int,
    threads: int = 1,
    page_seed: int | None = None,
) -> Iterator[tuple[KVStore, list[KVSession]]]:
    """A store with room for ``sessions`` of ``tokens`` positions, and those sessions, empty.

    With ``page_seed`` its pages are handed out in an order drawn from that.

    Raises
    ------
    NotEnoughMemory
        The machine has too little memory left; to swap would measure the disk.
    """
    budget = needed_bytes(name, shape, tokens=tokens, sessions=sessions, page_tokens=page_tokens)
    available = machine.available_memory_bytes()
    if budget > available:
        raise machine.NotEnoughMemory(
            f"{name} needs {budget} bytes for {sessions} sessions of {tokens} tokens; {available} "
            "are available: free memory, or leave this cell out of the protocol"
        )
    spec: dict[str, Any] = {
        **shape,
        "budget_bytes": budget,
        "page_tokens": page_tokens,
        "threads": threads,
    }
    store = open_store(name, trial=True, **spec)
    try:
        if page_seed is not None and get(name).capabilities >= _SHUFFLES:
            shuffle_pages(store, page_seed)
        yield store, [store.open_session() for _ in range(sessions)]
    finally:
        store.close()


def fill(session: KVSession, snapshot: Snapshot, tokens: int | None = None) -> None:
    """Append the snapshot's first ``tokens`` rows (all by default) to an empty session.

    The session takes the snapshot's layers in turn, as many as it has.
    """
    n = snapshot.tokens if tokens is None else tokens
    positions = np.arange(n, dtype=np.int64)
    for layer in range(session.store.spec.layers):
        own = layer % len(snapshot.k)
        session.append(
            layer,
            positions,
            np.ascontiguousarray(snapshot.k[own, :n]),
            np.ascontiguousarray(snapshot.v[own, :n]),
        )


def copy(session: KVSession, source: KVSession) -> None:
    """Give an empty session all rows of another of its store, page by page: nothing is rounded again.

    Both need what a restore needs, `Capability.SPILL`.
    """
    layers, n = session.store.spec.layers, source.length(0)
    pages = session.begin_restore(np.ones((layers, n), np.bool_))
    for layer, views in enumerate(pages):
        for index, view in enumerate(views):
            page = source.page_bytes(layer, index)
            if view is not None and page is not None:  # a page of holes is none on both sides
                np.frombuffer(view, np.uint8)[:] = np.frombuffer(page, np.uint8)
    session.finish_restore()


def shuffle_pages(store: KVStore, seed: int) -> None:
    """Leave the free pages of a new pool in an order drawn from ``seed``.

    A pool that has served for a while hands out pages from all over its memory. No candidate shall
    gain from pages that happen to lie one after the other, nor from one lucky order: each block draws
    its own. Only verbs of the contract are used.
    """
    pages = store.pages_free // store.spec.layers // _SHUFFLED_SESSIONS
    if pages == 0:
        return
    page_tokens = store.spec.page_tokens
    rows = np.ones((store.spec.layers, pages * page_tokens), np.bool_)
    sessions = [store.open_session() for _ in range(_SHUFFLED_SESSIONS)]
    for session in sessions:
        session.begin_restore(rows)
        session.finish_restore()
    turns = np.repeat(np.arange(_SHUFFLED_SESSIONS), pages)
    for turn in np.random.default_rng(seed).permutation(turns).tolist():
        sessions[turn].rollback_tail(page_tokens)
    for session in sessions:
        session.close()


def row_at(snapshot: Snapshot, layer: int, index: int) -> tuple[Any, Any]:
    """K and V of one position, each (1, H_kv, D): real rows for the cost of an append."""
    at = index % snapshot.tokens
    return (
        np.ascontiguousarray(snapshot.k[layer, at : at + 1]),
        np.ascontiguousarray(snapshot.v[layer, at : at + 1]),
    )


def shape_of(model: Any) -> dict[str, int]:
    """The store's shape for a model: layers, q_heads, kv_heads, head_dim."""
    of_model: dict[str, int] = model.config.store_shape
    return of_model
