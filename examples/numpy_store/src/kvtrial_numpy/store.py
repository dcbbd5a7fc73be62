"""A flat KV store: one array a session, a row where its position says.

It claims an owner and rollback. Every other verb says `Unsupported`, and the verdict then says which
capabilities are missing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from kvtrial.contract import (
    F32,
    HoleNotAllowed,
    InvalidArgument,
    KVError,
    MemoryLedger,
    OutOfRange,
    PoolExhausted,
    StaleOwner,
    StepIncomplete,
    StoreSpec,
    Unsupported,
)


def _lacks(verb: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **named: Any) -> NoReturn:
        raise Unsupported(f"{verb}: a flat NumPy store has none; use a paged store such as K1")

    return refuse


class FlatStore:
    """Rows of all sessions share ``budget_bytes``; a row of one layer takes ``row_bytes``."""

    page_nbytes = pages_total = pages_free = 0  # no pages
    page_table = _lacks("page_table")
    reference_counts = _lacks("reference_counts")

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self.row_bytes = 2 * 4 * spec.local_kv_heads * spec.head_dim
        self.page_format = f"fp32/numpy/H{spec.local_kv_heads}/D{spec.head_dim}"
        self.rows_free = spec.budget_bytes // self.row_bytes
        self.capacity = self.rows_free // spec.layers
        if not self.capacity:
            raise PoolExhausted(
                f"budget_bytes is {spec.budget_bytes}; one token takes {self.row_bytes * spec.layers}"
            )
        self._ledger = spec.ledger or MemoryLedger(spec.budget_bytes)
        self._reserved = self.rows_free * self.row_bytes
        self._token = self._ledger.reserve(self.page_format, self._reserved)
        self._sessions = 0
        self.open = True

    @property
    def resident_bytes(self) -> int:
        return self._reserved - self.rows_free * self.row_bytes

    def open_session(self, position_holes_allowed: bool = False) -> FlatSession:
        if not self.open:
            raise StaleOwner("the store is closed; open another")
        if position_holes_allowed:
            _lacks("holes")()
        self._sessions += 1
        return FlatSession(self, self._sessions)

    def close(self) -> None:
        if not self.open:
            raise StaleOwner("the store is closed already")
        self.open = False
        self._ledger.release(self._token)


class FlatSession:
    """One sequence: `rows` is float32 (L, 2, capacity, H_kv, D), `ends` counts rows by layer."""

    position_holes_allowed = False

    def __init__(self, store: FlatStore, generation: int) -> None:
        self.store, self.generation = store, generation
        spec = store.spec
        shape = (spec.layers, 2, store.capacity, spec.local_kv_heads, spec.head_dim)
        self._rows = np.empty(shape, np.float32)  # memory comes as it is written
        self._ends = [0] * spec.layers
        self._open = True

    # What is asked of every call -------------------------------------------------------------------

    def _check_open(self) -> None:
        if not (self._open and self.store.open):
            raise StaleOwner(f"session {self.generation} is closed; open another")

    def _layer(self, layer: Any) -> int:
        self._check_open()
        index = _integer(layer, "layer", InvalidArgument)
        if not 0 <= index < len(self._ends):
            raise InvalidArgument(f"layer is {layer}; allowed: 0 to {len(self._ends) - 1}")
        return index

    def _array(self, x: Any, shape: tuple[int, ...], name: str, writable: bool = False) -> F32:
        if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.shape != shape:
            raise InvalidArgument(f"{name} has to be a float32 array of shape {shape}")
        if not (x.flags.c_contiguous and x.flags.aligned and (x.flags.writeable or not writable)):
            raise InvalidArgument(
                f"{name} has to be C-contiguous and aligned{', and writable' * writable}"
            )
        return x

    def _check_boundary(self) -> None:
        self._check_open()
        if len(set(self._ends)) != 1:
            raise StepIncomplete(f"layers end at {self._ends}; finish the step or abandon_step")

    # Rows ------------------------------------------------------------------------------------------

    def append(self, layer: Any, positions: Any, k: F32, v: F32) -> None:
        layer, at, spec = self._layer(layer), _positions(positions), self.store.spec
        n, end = len(at), self._ends[layer]
        shape = (n, spec.local_kv_heads, spec.head_dim)
        k, v = self._array(k, shape, "k"), self._array(v, shape, "v")
        if not n:
            return
        start = spec.base_position + end
        if at[0] < start or (at[1:] <= at[:-1]).any():
            raise OutOfRange(f"positions are {at[0]} to {at[-1]}; they ascend from {start}")
        if at[0] != start or at[-1] != start + n - 1:
            raise HoleNotAllowed(f"positions {at[0]} to {at[-1]} leave holes after {start}")
        if layer == 0:
            self._check_boundary()
        elif end + n > self._ends[layer - 1]:
            raise StepIncomplete(f"layer {layer} would pass layer {layer - 1}")
        if n > self.store.rows_free or end + n > self.store.capacity:
            raise PoolExhausted(f"{n} rows are needed, {self.store.rows_free} are free")
        self._rows[layer, 0, end : end + n] = k
        self._rows[layer, 1, end : end + n] = v
        self._ends[layer] += n
        self.store.rows_free -= n

    def read(self, layer: Any, positions: Any) -> tuple[F32, F32]:
        layer = self._layer(layer)
        at = _positions(positions) - self.store.spec.base_position
        if ((at < 0) | (at >= self._ends[layer])).any():
            raise OutOfRange(f"positions {positions}: the layer holds {self._ends[layer]} rows")
        return self._rows[layer, 0, at], self._rows[layer, 1, at]

    def length(self, layer: Any) -> int:
        return self._ends[self._layer(layer)] + self.store.spec.base_position

    def valid(self, layer: Any) -> np.ndarray:
        return np.ones(self._ends[self._layer(layer)], bool)

    def _truncate(self, end: int) -> None:
        for layer, old in enumerate(self._ends):
            self._ends[layer] = min(old, end)
            self.store.rows_free += old - self._ends[layer]

    def rollback_tail(self, n: int) -> None:
        self._check_boundary()
        n = _integer(n, "n", OutOfRange)
        if not 0 <= n <= self._ends[0]:
            raise OutOfRange(f"n is {n}; allowed: 0 to {self._ends[0]}")
        self._truncate(self._ends[0] - n)

    def abandon_step(self) -> None:
        self._check_open()
        self._truncate(min(self._ends))

    def close(self) -> None:
        self._check_boundary()
        self._truncate(0)
        self._open = False

    # Attention -------------------------------------------------------------------------------------

    def attend(self, layer: Any, q: F32, out: F32, scale: float) -> None:
        layer, spec = self._layer(layer), self.store.spec
        q = self._array(q, (spec.q_heads, spec.head_dim), "q")
        out = self._array(out, q.shape, "out", writable=True)
        self._attend(layer, q, out, _finite(scale), self._ends[layer])

    def attend_block(self, layer: Any, q: F32, out: F32, scale: float) -> None:
        layer, spec = self._layer(layer), self.store.spec
        n = len(q) if isinstance(q, np.ndarray) and q.ndim == 3 else 0
        q = self._array(q, (n, spec.q_heads, spec.head_dim), "q")
        out = self._array(out, q.shape, "out", writable=True)
        scale, before = _finite(scale), self._ends[layer] - n
        if before < 0:
            raise OutOfRange(f"{n} queries over {self._ends[layer]} rows")
        for i in range(n):
            self._attend(layer, q[i], out[i], scale, before + i + 1)

    def _attend(self, layer: int, q: F32, out: F32, scale: float, stop: int) -> None:
        """Softmax attention over rows [0, stop), in float64."""
        spec = self.store.spec
        low, high = spec.heads
        mine = slice(low * spec.group, high * spec.group)  # query heads of the KV heads held here
        if not stop:
            out[mine] = 0
            return
        k, v = self._rows[layer, :, :stop]
        grouped = q[mine].reshape(high - low, spec.group, spec.head_dim).astype(np.float64)
        scores = np.einsum("hgd,nhd->hgn", grouped, k) * scale
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(
            scores - np.where(np.isneginf(top), 0, top)
        )  # scores of -inf weigh nothing
        total = weights.sum(axis=-1, keepdims=True)
        weights /= np.where(total == 0, 1, total)
        out[mine] = np.einsum("hgn,nhd->hgd", weights, v).reshape(-1, spec.head_dim)

    # What it does not claim ------------------------------------------------------------------------

    def reserve_slot(self, layer: Any, positions: Any) -> None:
        """None: the engine then appends."""

    commit_slot = _lacks("commit_slot")
    invalidate = _lacks("invalidate")
    attend_partial = _lacks("attend_partial")
    page_table = _lacks("page_table")
    begin_branch = _lacks("begin_branch")
    commit_prefix = _lacks("commit_prefix")
    page_bytes = _lacks("page_bytes")
    begin_restore = _lacks("begin_restore")
    finish_restore = _lacks("finish_restore")
    cancel_restore = _lacks("cancel_restore")


def _integer(value: Any, name: str, error: type[KVError]) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise error(f"{name} is {value!r}; give an integer") from None


def _finite(scale: Any) -> float:
    if not isinstance(scale, (int, float, np.floating)) or not np.isfinite(scale):
        raise InvalidArgument(f"scale is {scale!r}; give a finite number")
    return float(scale)


def _positions(positions: Any) -> np.ndarray:
    at = np.asarray(positions)
    if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
        raise InvalidArgument(f"positions have to be integers (n,), not {at.dtype} {at.shape}")
    return at.astype(np.int64)
