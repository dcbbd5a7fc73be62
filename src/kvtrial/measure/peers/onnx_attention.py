"""ONNX Runtime's attention: a graph of one GroupQueryAttention node over a cache that it shares with its output."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from kvtrial.contract import F32
from kvtrial.measure.peers.rows import swapped

#: How a cache is stored → the type of its elements, their bits (0: none are named), the largest number.
_KINDS = {
    "f32": (TensorProto.FLOAT, 0, 0),
    "int8": (TensorProto.INT8, 8, 127),
    "int4": (TensorProto.UINT8, 4, 7),  # two in a byte, 8 added to each
}


class OnnxAttention:
    """Layers k and v (L, N, H_kv, D), stored as ``kind``.

    The node appends the newest row and attends: the cache holds all rows, and the newest is given again,
    which writes it where it lies.
    """

    def __init__(self, k: F32, v: F32, q_heads: int, threads: int, kind: str) -> None:
        layers, tokens, kv_heads, head_dim = k.shape
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self._kind = kind
        self._session = ort.InferenceSession(
            _graph(q_heads, kv_heads, head_dim, kind), options, providers=["CPUExecutionProvider"]
        )
        value = ort.OrtValue.ortvalue_from_numpy  # shares the array's memory on the CPU
        self._query = np.empty((1, 1, q_heads * head_dim), np.float32)
        self._out = np.empty_like(self._query)
        common = {
            "query": value(self._query),
            "seqlens_k": value(np.array([tokens - 1], np.int32)),
            "total_sequence_length": value(np.array(tokens, np.int32)),
        }
        self._stored: list[list[tuple[np.ndarray, F32]]] = []
        self._bindings = []
        for layer in range(layers):
            inputs = dict(common)
            caches = {}
            self._stored.append([])
            for name, rows in (("key", k[layer]), ("value", v[layer])):
                numbers, scale = _stored(swapped(rows), kind)
                self._stored[-1].append((numbers, scale))
                inputs[name] = value(np.array(rows[-1:].reshape(1, 1, -1)))
                caches[name] = value(numbers[None])
                inputs[f"past_{name}"] = caches[name]
                if kind != "f32":
                    inputs[f"{name}_scale"] = value(scale[None])
            binding = self._session.io_binding()
            for name, given in inputs.items():
                binding.bind_ortvalue_input(name, given)
            binding.bind_ortvalue_output("output", value(self._out))
            for name, cache in caches.items():
                binding.bind_ortvalue_output(f"present_{name}", cache)
            self._bindings.append(binding)

    def held(self, layer: int) -> tuple[F32, F32]:
        """K and V (N, H_kv, D)."""
        k, v = (swapped(_read(*side, self._kind)) for side in self._stored[layer])
        return k, v

    def attend(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """q and out (H_q, D); the node's scale is 1 / sqrt(D)."""
        self._query[:] = q.reshape(self._query.shape)
        self._session.run_with_iobinding(self._bindings[layer])
        out[:] = self._out.reshape(out.shape)


def _stored(rows: F32, kind: str) -> tuple[np.ndarray, F32]:
    """Rows (H_kv, N, D) as the cache holds them, and the scale of each column (H_kv, 1, D)."""
    largest = _KINDS[kind][2]
    if not largest:
        return rows, np.ones((len(rows), 1, rows.shape[-1]), np.float32)
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(largest)
    scale[scale == 0] = 1
    numbers = np.rint(rows / scale).astype(np.int8)
    if kind == "int4":
        nibbles = (numbers + 8).astype(np.uint8)
        return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scale
    return numbers, scale


def _read(numbers: np.ndarray, scale: F32, kind: str) -> F32:
    """What `_stored` keeps of the rows."""
    if kind == "int4":
        nibbles = np.stack([numbers & 15, numbers >> 4], axis=-1).astype(np.int8) - 8
        numbers = nibbles.reshape(*numbers.shape[:-1], -1)
    rows: F32 = numbers.astype(np.float32) * scale
    return rows


def _graph(q_heads: int, kv_heads: int, head_dim: int, kind: str) -> bytes:
    """The model of one node, as bytes."""
    element, bits, _ = _KINDS[kind]

    def tensor(name: str, shape: list[int | str], of: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, of, shape)

    cache: list[int | str] = [1, kv_heads, "tokens", head_dim * bits // 8 if bits else head_dim]
    inputs = ["query", "key", "value", "past_key", "past_value"]
    inputs += ["seqlens_k", "total_sequence_length"]
    given = [
        tensor("query", [1, 1, q_heads * head_dim]),
        tensor("key", [1, 1, kv_heads * head_dim]),
        tensor("value", [1, 1, kv_heads * head_dim]),
        tensor("past_key", cache, element),
        tensor("past_value", cache, element),
        tensor("seqlens_k", [1], TensorProto.INT32),
        tensor("total_sequence_length", [], TensorProto.INT32),
    ]
    quantised = {}
    if bits:
        inputs += [""] * 5 + [
            "key_scale",
            "value_scale",
        ]  # the five are options that it does without
        column: list[int | str] = [1, kv_heads, 1, head_dim]
        given += [tensor("key_scale", column), tensor("value_scale", column)]
        ways = dict.fromkeys(("k_quant_type", "v_quant_type"), "PER_CHANNEL")
        quantised = {**ways, "kv_cache_bit_width": bits}
    node = helper.make_node(
        "GroupQueryAttention",
        inputs,
        ["output", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=q_heads,
        kv_num_heads=kv_heads,
        **quantised,
    )
    results = [
        tensor("output", [1, 1, q_heads * head_dim]),
        tensor("present_key", cache, element),
        tensor("present_value", cache, element),
    ]
    graph = helper.make_graph([node], "attention", given, results)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return model
