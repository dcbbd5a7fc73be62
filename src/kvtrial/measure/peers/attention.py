"""Attention alone by PyTorch and ONNX Runtime: the work of `kvtrial.measure.attention`, and its SPEC.

``python -m kvtrial.measure.peers.attention SPEC.json OUT.json``

They get the same rows, queries and rotation as our stores do in `m1`, laid out as each of them likes
best, [kv_head][token][head_dim], before the clock starts. The first answer is held against the float64
oracle: a peer that calculates something else is no peer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

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
from kvtrial.measure.child import Row, Spec, failed_row, main
from kvtrial.measure.stores import Snapshot

#: Largest difference from the oracle, as a share of the largest value.
TOLERANCE = 1e-4


class WrongAnswer(RuntimeError):
    """A peer's attention is not what the oracle says."""


class TorchAttention:
    """``scaled_dot_product_attention`` with grouped heads."""

    def __init__(self, k: F32, v: F32, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        self._layers = [
            tuple(torch.from_numpy(_head_major(side[layer])[None]) for side in (k, v))
            for layer in range(len(k))
        ]

    def attend(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """q and out (H_q, D)."""
        k, v = self._layers[layer]
        query = self._torch.from_numpy(q)[None, :, None, :]
        result = self._torch.nn.functional.scaled_dot_product_attention(
            query, k, v, scale=scale, enable_gqa=True
        )
        out[:] = result[0, :, 0].numpy()


class OnnxAttention:
    """A graph of one GroupQueryAttention node over a cache that it shares with its output.

    The node appends the newest row and attends: the cache holds all rows, and the newest is given
    again, which writes it where it lies.
    """

    def __init__(self, k: F32, v: F32, q_heads: int, threads: int) -> None:
        import onnxruntime as ort

        layers, tokens, kv_heads, head_dim = k.shape
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(
            _graph(q_heads, kv_heads, head_dim), options, providers=["CPUExecutionProvider"]
        )
        value = ort.OrtValue.ortvalue_from_numpy  # shares the array's memory on the CPU
        self._query = np.empty((1, 1, q_heads * head_dim), np.float32)
        self._out = np.empty_like(self._query)
        common = {
            "query": value(self._query),
            "seqlens_k": value(np.array([tokens - 1], np.int32)),
            "total_sequence_length": value(np.array(tokens, np.int32)),
        }
        self._bindings = []
        for layer in range(layers):
            inputs = dict(common)
            caches = {}
            for name, rows in (("key", k[layer]), ("value", v[layer])):
                inputs[name] = value(np.array(rows[-1:].reshape(1, 1, -1)))
                caches[name] = value(_head_major(rows)[None])
                inputs[f"past_{name}"] = caches[name]
            binding = self._session.io_binding()
            for name, given in inputs.items():
                binding.bind_ortvalue_input(name, given)
            binding.bind_ortvalue_output("output", value(self._out))
            for name, cache in caches.items():
                binding.bind_ortvalue_output(f"present_{name}", cache)
            self._bindings.append(binding)

    def attend(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """q and out (H_q, D); the node's scale is 1 / sqrt(D)."""
        self._query[:] = q.reshape(self._query.shape)
        self._session.run_with_iobinding(self._bindings[layer])
        out[:] = self._out.reshape(out.shape)


def _graph(q_heads: int, kv_heads: int, head_dim: int) -> bytes:
    """The model of one node, as bytes."""
    from onnx import TensorProto, helper

    def tensor(name: str, shape: list[int | str], kind: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    cache: list[int | str] = [1, kv_heads, "tokens", head_dim]
    inputs = ["query", "key", "value", "past_key", "past_value"]
    inputs += ["seqlens_k", "total_sequence_length"]
    outputs = ["output", "present_key", "present_value"]
    node = helper.make_node(
        "GroupQueryAttention",
        inputs,
        outputs,
        domain="com.microsoft",
        num_heads=q_heads,
        kv_num_heads=kv_heads,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [
            tensor("query", [1, 1, q_heads * head_dim]),
            tensor("key", [1, 1, kv_heads * head_dim]),
            tensor("value", [1, 1, kv_heads * head_dim]),
            tensor("past_key", cache),
            tensor("past_value", cache),
            tensor("seqlens_k", [1], TensorProto.INT32),
            tensor("total_sequence_length", [], TensorProto.INT32),
        ],
        [
            tensor("output", [1, 1, q_heads * head_dim]),
            tensor("present_key", cache),
            tensor("present_value", cache),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return model


def _head_major(rows: F32) -> F32:
    """(N, H_kv, D) as a contiguous (H_kv, N, D)."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2))


def measure(spec: Spec, note: Callable[[str], None]) -> list[Row]:
    """Times of every arm, interleaved where there are several."""
    snapshot = Snapshot.open(spec["snapshots"][0])
    queries = queries_of(spec)
    rows: list[Row] = []
    arms: dict[str, Arm] = {}
    room = room_bytes(spec)
    for name in spec["candidates"]:
        note(name)
        try:
            arms[name] = _open_arm(name, snapshot, queries[0], spec, room)
        except Exception as error:
            rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
    return rows + interleave(arms, queries, spec, note)


def _open_arm(name: str, snapshot: Snapshot, query: F32, spec: Spec, room: float) -> Arm:
    """As many sessions as fill the rotation, each with its own copy of the rows."""
    n_bytes = 2 * snapshot.k[0].nbytes
    layers, count = rotation(spec, n_bytes, n_bytes, room)
    turns = np.arange(layers) % len(snapshot.k)
    k, v = snapshot.k[turns], snapshot.v[turns]

    def session() -> Attends:
        if name == "torch":
            return TorchAttention(k, v, spec["threads"])
        return OnnxAttention(k, v, spec["shape"]["q_heads"], spec["threads"])

    sessions = [session() for _ in range(count)]
    out = np.empty_like(query)
    scale = 1.0 / math.sqrt(query.shape[-1])
    sessions[0].attend(0, query, out, scale)
    wrong = float(np.abs(out - reference.attention(query, k[0], v[0], scale)).max())
    if not wrong <= TOLERANCE * float(np.abs(v[0]).max()):
        raise WrongAnswer(f"{name} is off the oracle by {wrong:g}; at most {TOLERANCE:g} of |v|")
    return Arm(name, None, [(s, layer) for s in sessions for layer in range(layers)])


if __name__ == "__main__":
    main(measure, sys.argv)
