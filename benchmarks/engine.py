"""How near whole decode steps and a prefill of a model come to this machine's ceilings, on one thread.

A decode step at its ceiling takes as long as its bytes, weights and rows, take at the streaming read; a
prefill is held against its multiply-adds at float32's peak, which products of integers pass. Arms, steps
and probes are interleaved.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from kvtrial.engine._weights import packed_nbytes

from kvtrial.contract import KVSession
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.synthetic import ModelSizes, write_synthetic
from kvtrial.host.shapes import operations_a_row
from kvtrial.measure.probes import Probes
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of
from kvtrial.run import models

PAGE_TOKENS = 32
ROUNDS = 12
STEPS = 2
PREFILLS = 4
PREFILL_TOKENS = 512


def decode(model: Any, gguf: Path, context: int, names: list[str]) -> dict[str, float]:
    """Of each arm: a step's time at the streaming read over the best step's time."""
    best, row_bytes, read = _steps(model, context, names)
    fixed = weight_bytes(gguf)
    return {name: (fixed + row_bytes[name] * context) / read / best[name] for name in names}


def in_kernels(model: Any) -> float:
    """Share of a step at 512 that is not the interpreter's: from the step of a model of as many layers
    that has next to nothing to compute."""
    shape = ModelSizes(
        "llama", "Q8_0", model.config.layers, q_heads=1, kv_heads=1, head_dim=32, ffn=32, vocab=320,
        context=1024, rope_base=1e4, seed=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic(Path(folder) / "hollow.gguf", "hollow", shape)
        hollow = models.load_model(Path(folder) / "hollow.gguf")
        nothing = _steps(hollow, 1, ["K1"])[0]["K1"]
    whole = _steps(model, 512, ["K1"])[0]["K1"]
    return 1 - nothing / whole


def _steps(
    model: Any, context: int, names: list[str]
) -> tuple[dict[str, float], dict[str, int], float]:
    """Each arm's best step in seconds and bytes a position of all layers; bytes read a second."""
    shape = shape_of(model)
    rows = Snapshot.synthetic(shape, context, seed=7)
    decoder = model.decoder(threads=1, activations="quantised", batch=1)
    ids = np.array([1], np.int64)
    best: dict[str, float] = dict.fromkeys(names, math.inf)
    row_bytes: dict[str, int] = {}
    arms: dict[str, KVSession] = {}
    read = 0.0
    probe = Probes(1)
    with contextlib.ExitStack() as stack:
        for name in names:
            store, (arms[name],) = stack.enter_context(
                opened(name, shape, tokens=context + STEPS, page_tokens=PAGE_TOKENS)
            )
            fill(arms[name], rows)
            row_bytes[name] = shape["layers"] * store.row_bytes
        for turn in range(ROUNDS):
            for name in names if turn % 2 else reversed(names):
                for _ in range(STEPS):
                    start = time.perf_counter()
                    decoder.step([arms[name]], ids)
                    best[name] = min(best[name], time.perf_counter() - start)
                arms[name].rollback_tail(STEPS)
            if turn % 3 == 0:
                read = max(read, probe.measure().read_gb_per_s * 1e9)
    probe.close()
    return best, row_bytes, read


def prefill(model: Any, gguf: Path) -> float:
    """Its multiply-adds at float32's peak over the best prefill's time."""
    shape = shape_of(model)
    ids = np.random.default_rng(7).integers(5, 1000, PREFILL_TOKENS).tolist()
    probe = Probes(1)
    best, peak = math.inf, 0.0
    with opened("K1", shape, tokens=PREFILL_TOKENS, page_tokens=PAGE_TOKENS) as (_, (session,)):
        for _ in range(PREFILLS):
            start = time.perf_counter()
            model.prefill(session, ids, threads=1)
            best = min(best, time.perf_counter() - start)
            session.rollback_tail(PREFILL_TOKENS)
            peak = max(peak, probe.measure().fma_gflop_per_s * 1e9)
    probe.close()
    tensors = read_gguf(gguf).tensors
    products = (
        2
        * PREFILL_TOKENS
        * sum(
            math.prod(t.shape)
            for name, t in tensors.items()
            if name.startswith("blk.") and len(t.shape) == 2
        )
    )
    pairs = PREFILL_TOKENS * (PREFILL_TOKENS + 1) // 2
    attention = shape["layers"] * pairs * operations_a_row(shape["q_heads"], shape["head_dim"])
    return (products + attention) / peak / best


def weight_bytes(gguf: Path) -> int:
    """Bytes of weights that a step reads, as they are packed: all but embeddings that are not the output's, too."""
    tensors = read_gguf(gguf).tensors
    tied = "output.weight" not in tensors
    return sum(
        packed_nbytes(t.kind.name, *t.shape) if len(t.shape) == 2 else t.data.nbytes
        for name, t in tensors.items()
        if tied or name != "token_embd.weight"
    )
