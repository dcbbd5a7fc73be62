"""A store of the contract in a few lines of NumPy: the part of it that the engine calls."""

from __future__ import annotations

import numpy as np

from kvtrial.contract import PoolExhausted, StoreSpec


class NumpyStore:
    """Rows in one array a session, (layers, 2, tokens, kv_heads, head_dim); slots as views of it."""

    def __init__(self, spec: StoreSpec, tokens: int, slots: bool = True) -> None:
        self.spec, self.tokens, self.slots = spec, tokens, slots
        self.row_bytes = 8 * spec.kv_heads * spec.head_dim

    def open_session(self) -> NumpySession:
        return NumpySession(self)

    def close(self) -> None:
        pass


class NumpySession:
    def __init__(self, store: NumpyStore) -> None:
        self.store = store
        s = store.spec
        # Head-major, so that a slot's rows are strided as in a paged store.
        self.rows = np.full((s.layers, 2, s.kv_heads, store.tokens, s.head_dim), np.nan, np.float32)
        self.lengths = np.zeros(s.layers, np.int64)

    def length(self, layer: int) -> int:
        return int(self.lengths[layer])

    def append(self, layer: int, positions: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        assert positions[0] == self.lengths[layer]
        if positions[-1] >= self.store.tokens:
            raise PoolExhausted(f"position {positions[-1]} of {self.store.tokens}")
        for side, rows in enumerate((k, v)):
            self.rows[layer, side][:, positions] = rows.transpose(1, 0, 2)
        self.lengths[layer] += len(positions)

    def reserve_slot(self, layer: int, positions: np.ndarray):
        if not self.store.slots or positions[-1] >= self.store.tokens:
            return None
        start, stop = positions[0], positions[-1] + 1
        return tuple(self.rows[layer, side][:, start:stop].transpose(1, 0, 2) for side in (0, 1))

    def commit_slot(self, layer: int, positions: np.ndarray) -> None:
        self.lengths[layer] += len(positions)

    def abandon_step(self) -> None:
        self.lengths[:] = self.lengths.min()

    def attend(self, layer: int, q: np.ndarray, out: np.ndarray, scale: float) -> None:
        self.attend_block(layer, q[None], out[None], scale)

    def attend_block(self, layer: int, q: np.ndarray, out: np.ndarray, scale: float) -> None:
        n, length = len(q), self.length(layer)
        group = self.store.spec.group
        for i in range(n):
            k, v = self.rows[layer, :, :, : length - n + i + 1].repeat(group, axis=1)
            scores = scale * np.einsum("hd,htd->ht", q[i].astype(np.float64), k)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[i] = np.einsum("ht,htd->hd", weights, v)


def open_numpy(model, tokens: int, slots: bool = True) -> NumpyStore:
    c = model.config
    spec = StoreSpec(c.layers, c.q_heads, c.kv_heads, c.head_dim, budget_bytes=1)
    return NumpyStore(spec, tokens, slots)
