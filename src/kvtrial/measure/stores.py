"""Stores and sessions for a measured process, filled from a workload snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvtrial.candidates import open_store
from kvtrial.contract import KVSession, KVStore

#: Pages a layer and session beyond the filled ones: the append and branch costs need room.
SPARE_PAGES = 4


@dataclass(frozen=True)
class Snapshot:
    """One session's filled context, as `kvtrial.stages.workload` wrote it.

    ``k`` and ``v`` are float32 (L, N, H_kv, D), memory-mapped; ``next_id`` is the greedy token
    after the context.
    """

    k: np.ndarray
    v: np.ndarray
    next_id: int

    @classmethod
    def open(cls, folder: str | Path) -> Snapshot:
        """Map a snapshot's folder; nothing is read yet."""
        folder = Path(folder)
        tokens = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
        return cls(
            k=np.load(folder / "k.npy", mmap_mode="r"),
            v=np.load(folder / "v.npy", mmap_mode="r"),
            next_id=int(tokens["next_id"]),
        )

    @property
    def tokens(self) -> int:
        """N, the filled positions."""
        return int(self.k.shape[1])


def budget_bytes(shape: dict[str, int], tokens: int, sessions: int, page_tokens: int) -> int:
    """Bytes of a pool for ``sessions`` of ``tokens`` each, with `SPARE_PAGES`, at FP32.

    ``shape`` has layers, kv_heads and head_dim. A narrower format gets the same budget and leaves
    part of it untouched, so that no candidate is short of pages where another is not.
    """
    pages = -(-tokens // page_tokens) + SPARE_PAGES
    page = page_tokens * shape["kv_heads"] * shape["head_dim"] * 2 * 4
    return sessions * shape["layers"] * pages * page


@contextmanager
def opened(
    name: str,
    shape: dict[str, int],
    *,
    tokens: int,
    sessions: int = 1,
    page_tokens: int,
    threads: int = 1,
) -> Iterator[tuple[KVStore, list[KVSession]]]:
    """A store with room for ``sessions`` of ``tokens`` positions, and those sessions, empty.

    Raises
    ------
    MemoryError
        The machine has too little memory left; to swap would measure the disk.
    """
    needed = budget_bytes(shape, tokens, sessions, page_tokens)
    available = psutil.virtual_memory().available
    if needed > available:
        raise MemoryError(
            f"{name} needs {needed} bytes for {sessions} sessions of {tokens} tokens; {available} "
            "are available: free memory, or leave this cell out of the protocol"
        )
    store = open_store(
        name, trial=True, budget_bytes=needed, page_tokens=page_tokens, threads=threads, **shape
    )
    try:
        yield store, [store.open_session() for _ in range(sessions)]
    finally:
        store.close()


def fill(session: KVSession, snapshot: Snapshot, tokens: int | None = None) -> None:
    """Append the snapshot's first ``tokens`` rows (all by default) to an empty session.

    The session may have fewer layers than the snapshot: then it takes the first ones.
    """
    n = snapshot.tokens if tokens is None else tokens
    positions = np.arange(n, dtype=np.int64)
    for layer in range(session.store.spec.layers):
        session.append(
            layer,
            positions,
            np.ascontiguousarray(snapshot.k[layer, :n]),
            np.ascontiguousarray(snapshot.v[layer, :n]),
        )


def row_at(snapshot: Snapshot, layer: int, index: int) -> tuple[Any, Any]:
    """K and V of one position, each (1, H_kv, D): real rows for the cost of an append."""
    at = index % snapshot.tokens
    return (
        np.ascontiguousarray(snapshot.k[layer, at : at + 1]),
        np.ascontiguousarray(snapshot.v[layer, at : at + 1]),
    )


def shape_of(model: Any) -> dict[str, int]:
    """The store's shape for a model: layers, q_heads, kv_heads, head_dim."""
    config = model.config
    return {
        "layers": config.layers,
        "q_heads": config.q_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
    }
