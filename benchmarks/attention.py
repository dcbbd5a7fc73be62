"""How near each arm's attention comes to this machine's lower ceiling, out of cache.

One region after the other, arms and probes interleaved, the best of many short rounds each.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np

from kvtrial.contract import KVStore
from kvtrial.host import machine
from kvtrial.host.shapes import operations_a_row
from kvtrial.measure.attention import Arm, attend_ns
from kvtrial.measure.probes import Probes
from kvtrial.measure.stores import opened

SHAPES = {"9/3x64": (9, 3, 64), "14/2x64": (14, 2, 64)}
TOKENS = 4096
PAGE_TOKENS = 32
ROUNDS = 40


def fractions(heads: tuple[int, int, int], names: list[str]) -> dict[str, float]:
    """Of each arm: time at the lower of the two ceilings over the best time of a region."""
    q_heads, kv_heads, head_dim = heads
    draw = np.random.default_rng(7)
    k, v = draw.standard_normal((2, TOKENS, kv_heads, head_dim), np.float32)
    queries = draw.standard_normal((1, q_heads, head_dim), np.float32)
    out = np.empty_like(queries[0])
    region_bytes = 8 * TOKENS * kv_heads * head_dim
    layers = math.ceil(4 * machine.last_level_cache_bytes() / region_bytes)
    shape = {
        "layers": layers, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip
    best: dict[str, float] = dict.fromkeys(names, math.inf)
    stores: dict[str, KVStore] = {}
    read = arithmetic = 0.0
    probe = Probes(1)
    with contextlib.ExitStack() as stack:
        arms = []
        for name in names:
            store, (session,) = stack.enter_context(
                opened(name, shape, tokens=TOKENS, page_tokens=PAGE_TOKENS)
            )
            for layer in range(layers):
                session.append(layer, np.arange(TOKENS), k, v)
            stores[name] = store
            arms.append(Arm(name, store, [(session, layer) for layer in range(layers)]))
        for turn in range(ROUNDS):
            for arm in arms if turn % 2 else reversed(arms):
                spent = attend_ns(arm, queries, out, head_dim**-0.5, 4) / 4
                best[arm.name] = min(best[arm.name], spent)
            if turn % 8 == 0:
                reading = probe.measure()
                read = max(read, reading.read_gb_per_s)
                arithmetic = max(arithmetic, reading.fma_gflop_per_s)
    probe.close()
    operations = operations_a_row(q_heads, head_dim) * TOKENS
    return {
        name: max(stores[name].row_bytes * TOKENS / read, operations / arithmetic) / spent
        for name, spent in best.items()
    }
