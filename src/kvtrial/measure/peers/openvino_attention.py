"""OpenVINO's attention: a state that grows by a row a call, as its own language models decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset6, opset13

from kvtrial.contract import F32
from kvtrial.measure.peers.rows import swapped


class OpenvinoAttention:
    """Layers k and v (L, N, H_kv, D), stored as ``kind``, f32 or u8.

    A call appends the newest row once more and attends. The plugin fuses state, append and attention into one
    node, and stores the state as it likes best.
    """

    def __init__(self, k: F32, v: F32, q_heads: int, threads: int, kind: str) -> None:
        layers, _, kv_heads, head_dim = k.shape
        compiled = ov.Core().compile_model(
            _graph(q_heads, kv_heads, head_dim),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "INFERENCE_PRECISION_HINT": "f32",
                "KV_CACHE_PRECISION": kind,
            },
        )
        self._requests = [compiled.create_infer_request() for _ in range(layers)]
        self._query = np.empty((1, q_heads, 1, head_dim), np.float32)
        self._inputs = []
        for layer, request in enumerate(self._requests):
            sides = {"key": swapped(k[layer])[None], "value": swapped(v[layer])[None]}
            for state in request.query_state():
                rows = sides[state.name][:, :, :-1]  # the newest comes with the call
                state.state = ov.Tensor(np.ascontiguousarray(rows))
            newest = [np.ascontiguousarray(side[:, :, -1:]) for side in sides.values()]
            self._inputs.append(dict(enumerate([self._query, *newest, np.zeros(1, np.int32)])))

    def held(self, layer: int) -> tuple[F32, F32]:
        """K and V (N, H_kv, D) after a call."""
        rows = {s.name: swapped(s.state.data[0]) for s in self._requests[layer].query_state()}
        return rows["key"], rows["value"]

    def attend(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """q and out (H_q, D); the node's scale is 1 / sqrt(D)."""
        self._query[:] = q.reshape(self._query.shape)
        given = self._requests[layer].infer(
            self._inputs[layer], share_inputs=True, share_outputs=True
        )
        out[:] = given[0].reshape(out.shape)


def _graph(q_heads: int, kv_heads: int, head_dim: int) -> Any:
    """Query, newest K and V and the order of beams to the attention of all rows."""

    def numbers(*values: int) -> Any:
        return opset13.constant(np.array(values, np.int64))

    def given(name: str, heads: int) -> Any:
        return opset13.parameter([1, heads, 1, head_dim], ov.Type.f32, name=name)

    query, key, value = given("query", q_heads), given("key", kv_heads), given("value", kv_heads)
    beams = opset13.parameter([1], ov.Type.i32, name="beams")
    grown, all_heads = [], []
    for name, newest in (("key", key), ("value", value)):
        shape = ov.PartialShape([-1, kv_heads, -1, head_dim])
        nothing = opset13.constant(np.zeros((1, kv_heads, 0, head_dim), np.float32))
        past = opset6.read_value(nothing, name, ov.Type.f32, shape)
        past = opset13.gather(past, beams, opset13.constant(0, ov.Type.i32))
        rows = opset13.concat([past, newest], axis=2)
        grown.append(opset6.assign(rows, name))
        tokens = opset13.gather(opset13.shape_of(rows, output_type="i64"), numbers(2), numbers(0))
        group = [numbers(1, kv_heads, q_heads // kv_heads), tokens, numbers(head_dim)]
        wide = opset13.broadcast(
            opset13.unsqueeze(rows, numbers(2)),
            opset13.concat(group, 0),
            broadcast_spec="BIDIRECTIONAL",
        )
        all_heads.append(
            opset13.reshape(wide, numbers(0, q_heads, -1, head_dim), special_zero=True)
        )
    out = opset13.scaled_dot_product_attention(query, *all_heads, causal=False)
    return ov.Model([opset13.result(out)], grown, [query, key, value, beams], "attention")
