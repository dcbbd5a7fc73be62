"""Prefill: many positions at once, through blocked matrix products.

With activations quantised, weights in panels are multiplied on integers (`_panels.pyx`), as the decode does.
All else goes through BLAS in float32, weights dequantised a tile at a time, so that the
model is never in memory as float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from threadpoolctl import ThreadpoolController

from kvtrial.contract import F32, I64, KVError, KVSession
from kvtrial.engine._panels import Quads
from kvtrial.engine._regions import (
    Layer,
    gate_rows,
    rms_norm_rows,
    rope_turns,
    rotate_rows,
)
from kvtrial.engine._weights import Matrix
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.weights import Weights

#: float32 weights of a tile: it and a chunk's rows share the second-level caches, and the smallest
#: matrices still have some tiles to share out. The same for any number of threads, so that
#: results are.
TILE_FLOATS = 1 << 17
#: Tiles have a multiple of so many weight rows: the register tiles of a GEMM come out even.
TILE_ROWS = 32


class _Span(NamedTuple):
    """A session's rows in a chunk, and their positions in the session."""

    session: KVSession
    rows: slice
    positions: I64


class Prefill:
    """Buffers for chunks of up to ``chunk`` positions; ``threads`` share the matrix products."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        frequencies: np.ndarray,
        chunk: int,
        threads: int,
        quantised: bool,
    ) -> None:
        self.config = config
        self.weights = weights
        self.frequencies = frequencies
        self.chunk = chunk
        c = config
        widest = max(c.hidden, c.ffn, c.q_heads * c.head_dim)
        self._blas = ThreadpoolController()
        self._tiles = _Tiles(widest, threads)
        self._threads = threads
        self._quads = Quads(chunk, widest) if quantised else None
        self._hidden = np.empty((chunk, c.hidden), np.float32)
        self._normed = np.empty((chunk, c.hidden), np.float32)
        self._delta = np.empty((chunk, c.hidden), np.float32)
        self._q = np.empty((chunk, c.q_heads, c.head_dim), np.float32)
        self._k = np.empty((chunk, c.kv_heads, c.head_dim), np.float32)
        self._v = np.empty((chunk, c.kv_heads, c.head_dim), np.float32)
        self._attended = np.empty((chunk, c.q_heads, c.head_dim), np.float32)
        self._gate = np.empty((chunk, c.ffn), np.float32)
        self._up = np.empty((chunk, c.ffn), np.float32)

    def run(self, parts: Sequence[tuple[KVSession, I64]]) -> F32:
        """Append ids to each session, n <= chunk in all: the weights are read once for all of them. Hidden states
        (n, hidden), part after part, good until the next run. When a store refuses, the rows of the unfinished
        step are dropped."""
        spans, n = [], 0
        for session, ids in parts:
            start = session.length(0)
            positions = np.arange(start, start + len(ids), dtype=np.int64)
            spans.append(_Span(session, slice(n, n + len(ids)), positions))
            n += len(ids)
        turns = rope_turns(np.concatenate([span.positions for span in spans]), self.frequencies)
        hidden = self._hidden[:n]
        self.weights.embedding.dequantise_rows(np.concatenate([ids for _, ids in parts]), hidden)
        if self.config.architecture.scaled_embedding:
            hidden *= np.float32(self.config.embedding_scale)
        try:
            with self._one_blas_thread():
                for index, layer in enumerate(self.weights.layers):
                    self._layer(spans, index, layer, turns)
        except BaseException:
            for session, _ in parts:
                with contextlib.suppress(KVError):
                    session.abandon_step()
            raise
        return hidden

    def logits(self, hidden: F32) -> F32:
        """Logits (n, vocab) of hidden states (n, hidden)."""
        n = len(hidden)
        head = self.weights.head
        out = np.empty((n, self.config.vocab), np.float32)
        rms_norm_rows(hidden, head.norm, self.config.rms_eps, self._normed, self._threads)
        with self._one_blas_thread():
            self._multiply(self._normed[:n], (head.output, out))
        return out

    def _layer(self, spans: list[_Span], index: int, layer: Layer, turns: F32) -> None:
        n, c = spans[-1].rows.stop, self.config
        hidden, normed, delta = self._hidden[:n], self._normed[:n], self._delta[:n]
        q, k, v, attended = self._q[:n], self._k[:n], self._v[:n], self._attended[:n]
        gate, up = self._gate[:n], self._up[:n]

        rms_norm_rows(hidden, layer.attention_norm, c.rms_eps, normed, self._threads)
        flat = [rows.reshape(n, -1) for rows in (q, k, v)]
        self._multiply(normed, *zip((layer.q, layer.k, layer.v), flat))
        for bias, rows in zip((layer.q_bias, layer.k_bias, layer.v_bias), flat):
            if bias is not None:
                rows += bias
        for rows, norm in ((q, layer.q_norm), (k, layer.k_norm)):
            if norm is not None:
                heads = rows.reshape(-1, c.head_dim)
                rms_norm_rows(heads, norm, c.rms_eps, heads, self._threads)
            rotate_rows(rows, turns, c.architecture.halves, self._threads)
        for session, own, positions in spans:
            session.append(index, positions, k[own], v[own])
            session.attend_block(index, q[own], attended[own], c.attention_scale)
        self._multiply(attended.reshape(n, -1), (layer.out, delta))
        hidden += delta

        rms_norm_rows(hidden, layer.ffn_norm, c.rms_eps, normed, self._threads)
        self._multiply(normed, (layer.gate, gate), (layer.up, up))
        gate_rows(gate, up, c.architecture.gelu, self._threads)
        self._multiply(gate, (layer.down, delta))
        hidden += delta

    def _multiply(self, x: F32, *products: tuple[Matrix, F32]) -> None:
        """out (n, rows) = x (n, cols) @ matrix.T for each (matrix, out)."""
        taken = False
        for matrix, out in products:
            if self._quads is None or matrix.form < 0:
                self._tiles.multiply(x, matrix, out)
                continue
            if not taken:
                self._quads.take(x, self._threads)
                taken = True
            self._quads.multiply(matrix, out, self._threads)

    def _one_blas_thread(self) -> contextlib.AbstractContextManager[object]:
        """For the time of a run: the workers of a BLAS wait busily, and those of NumPy's and SciPy's,
        two libraries, would take the cores from each other and from the attention."""
        return self._blas.limit(limits=1, user_api="blas")


class _Tiles:
    """Products in float32: each thread takes whole tiles of weights and gives them to a BLAS."""

    def __init__(self, widest: int, threads: int) -> None:
        floats = max(TILE_FLOATS, TILE_ROWS * widest)
        self._tiles = [np.empty(floats, np.float32) for _ in range(threads)]
        self._others = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def multiply(self, x: F32, matrix: Matrix, out: F32) -> None:
        """out (n, rows) = x (n, cols) @ matrix.T; each thread takes the next tile until none is left."""
        step = max(1, TILE_FLOATS // matrix.cols // TILE_ROWS) * TILE_ROWS
        starts = iter(range(0, matrix.rows, step))  # asked by several threads, each gets its own

        def take(room: F32) -> None:
            for start in starts:
                stop = min(start + step, matrix.rows)
                tile = room[: (stop - start) * matrix.cols].reshape(stop - start, matrix.cols)
                matrix.dequantise(start, stop, tile)
                np.matmul(x, tile.T, out=out[:, start:stop])

        others = []
        if self._others is not None and matrix.rows > step:
            others = [self._others.submit(take, room) for room in self._tiles[1:]]
        take(self._tiles[0])
        for other in others:
            other.result()
