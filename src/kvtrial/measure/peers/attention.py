"""Attention alone by PyTorch, ONNX Runtime and OpenVINO: the work of `kvtrial.measure.attention`, and its spec.

``python -m kvtrial.measure.peers.attention SPEC.json OUT.json``

They get the same rows, queries and rotation as our stores do in `m1`, laid out as each of them likes
best, [kv_head][token][head_dim], before the clock starts. The first answer is held against the float64
oracle over the rows as the peer holds them, quantised or not: one that calculates something else is no peer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvtrial import reference
from kvtrial.contract import F32
from kvtrial.measure.attention import (
    Arm,
    Attends,
    interleave,
    queries_of,
    room_bytes,
    rotation,
)
from kvtrial.measure.child import Row, failed_row, main
from kvtrial.measure.peers.programs import PEERS
from kvtrial.measure.peers.rows import swapped
from kvtrial.measure.specs import AttentionSpec
from kvtrial.measure.stores import Snapshot

#: Largest difference from the oracle, as a share of the largest value.
TOLERANCE = 1e-4


class WrongAnswer(RuntimeError):
    """A peer's attention is not what the oracle says."""


class Peer(Attends, Protocol):
    """A session of a peer: layers of filled rows."""

    def held(self, layer: int) -> tuple[F32, F32]:
        """K and V (N, H_kv, D) as they are stored, as float32."""


class TorchAttention:
    """``scaled_dot_product_attention`` with grouped heads."""

    def __init__(self, k: F32, v: F32, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        self._layers = [
            tuple(torch.from_numpy(swapped(side[layer])[None]) for side in (k, v))
            for layer in range(len(k))
        ]

    def held(self, layer: int) -> tuple[F32, F32]:
        """K and V (N, H_kv, D)."""
        k, v = (swapped(side[0].numpy()) for side in self._layers[layer])
        return k, v

    def attend(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """q and out (H_q, D)."""
        k, v = self._layers[layer]
        query = self._torch.from_numpy(q)[None, :, None, :]
        result = self._torch.nn.functional.scaled_dot_product_attention(
            query, k, v, scale=scale, enable_gqa=True
        )
        out[:] = result[0, :, 0].numpy()


def measure(spec: AttentionSpec, note: Callable[[str], None]) -> list[Row]:
    """Times of every arm, interleaved where there are several."""
    snapshot = Snapshot.open(spec.snapshots[0])
    queries = queries_of(spec)
    rows: list[Row] = []
    arms: dict[str, Arm] = {}
    room = room_bytes(spec)
    for name in spec.candidates:
        note(name)
        try:
            arms[name] = _open_arm(name, snapshot, queries[0], spec, room)
        except Exception as error:
            rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
    return rows + interleave(arms, queries, spec, note)


def _open_arm(name: str, snapshot: Snapshot, query: F32, spec: AttentionSpec, room: float) -> Arm:
    """As many sessions as fill the rotation, each with its own copy of the rows."""
    n_bytes = 2 * snapshot.k[0].nbytes
    layers, count = rotation(spec, n_bytes, n_bytes, room)
    turns = np.arange(layers) % len(snapshot.k)
    k, v = snapshot.k[turns], snapshot.v[turns]

    peer, q_heads, threads = PEERS[name], spec.shape["q_heads"], spec.threads

    def session() -> Peer:
        if peer.program == "torch":
            return TorchAttention(k, v, threads)
        if peer.program == "openvino":
            from kvtrial.measure.peers.openvino_attention import OpenvinoAttention

            return OpenvinoAttention(k, v, q_heads, threads, peer.k_type)
        from kvtrial.measure.peers.onnx_attention import OnnxAttention

        return OnnxAttention(k, v, q_heads, threads, peer.k_type)

    sessions = [session() for _ in range(count)]
    out = np.empty_like(query)
    scale = 1.0 / math.sqrt(query.shape[-1])
    sessions[0].attend(0, query, out, scale)
    wrong = float(np.abs(out - reference.attention(query, *sessions[0].held(0), scale)).max())
    if not wrong <= TOLERANCE * float(np.abs(v[0]).max()):
        raise WrongAnswer(f"{name} is off the oracle by {wrong:g}; at most {TOLERANCE:g} of |v|")
    return Arm(name, None, [(s, layer) for s in sessions for layer in range(layers)])


if __name__ == "__main__":
    main(AttentionSpec, measure, sys.argv)
