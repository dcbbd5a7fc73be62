"""Models of one shape in each tensor kind: decode against the bytes that it reads, prefill against Q4_1's, load
against reading the file once from the page cache. Kinds take turns, so that what the machine does meets all; what
one thread does is timed by its own clock, which others on the machine stop.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine
import numpy as np
from kvtrial.measure._probes import read

from kvtrial.engine.gguf import TensorToWrite, read_gguf, write_gguf
from kvtrial.engine.kinds import TensorKind
from kvtrial.engine.synthetic import ModelSizes, write_synthetic
from kvtrial.measure import clock
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of
from kvtrial.run import models

#: Rows of whole super-blocks, about as many weights as SmolLM2-135M.
SHAPE = ModelSizes(
    "llama", "Q8_0", 20, q_heads=12, kv_heads=4, head_dim=64, ffn=2048, vocab=32768, context=4096,
    rope_base=1e4, seed=1,
)  # fmt: skip
MULTIPLIED = ("Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS")
LOADED = ("Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "BF16")
CONTEXT = 512
ROUNDS, STEPS = 12, 2
#: What is streamed to see how fast that is, as many bytes as a model.
STREAMED = np.arange(12 << 20, dtype=np.uint64)
PREFILLS, LOADS = 3, 3
#: Of every block, so that weights are numbers of a model's size.
SCALE = np.array([2.0**-17], "<f2").view(np.uint8)


def files(folder: Path) -> dict[str, Path]:
    """A file of each kind, of random blocks."""
    plain = folder / "plain.gguf"
    write_synthetic(plain, "kinds", SHAPE)
    file, random = read_gguf(plain), np.random.default_rng(1)
    made = {}
    for name in LOADED:
        kind = TensorKind[name]
        tensors = []
        for tensor in file.tensors.values():
            data, own = tensor.data, tensor.kind
            if len(tensor.shape) == 2:
                own, data = kind, _blocks(kind, math.prod(tensor.shape), random)
            tensors.append(TensorToWrite(tensor.name, own, tensor.shape, [data]))
        made[name] = folder / f"{name}.gguf"
        write_gguf(made[name], file.metadata, tensors)
    plain.unlink()
    return made


def _blocks(kind: TensorKind, weights: int, random: np.random.Generator) -> np.ndarray:
    layout = kind.layout
    blocks = random.integers(0, 256, (weights // layout.weights, layout.nbytes), np.uint8)
    for at in layout.halves:
        blocks[:, at : at + 2] = SCALE
    if kind is TensorKind.BF16:
        blocks[:, 1] = 0x3C  # about 0.01
    return blocks


def figures(folder: Path) -> Iterator[tuple[str, float]]:
    """Name and value: fractions of the streaming read, ratios to Q4_1, loads as multiples of a read."""
    paths = files(folder)
    loaded = {name: models.load_model(paths[name]) for name in MULTIPLIED}
    for name, fraction in decode(loaded, paths).items():
        yield f"decode {CONTEXT} {name}", fraction
    for name, ratio in prefill(loaded).items():
        yield f"prefill {name}/Q4_1", ratio
    del loaded
    for name, times in load(paths).items():
        yield f"load/read {name}", times


def decode(loaded: dict[str, Any], paths: dict[str, Path]) -> dict[str, float]:
    """Time of a step's bytes, as they are in memory, at the streaming read over the best step's time."""
    best = dict.fromkeys(loaded, math.inf)
    shape = shape_of(next(iter(loaded.values())))
    rows = Snapshot.synthetic(shape, CONTEXT, seed=7)
    ids, streaming = np.array([1], np.int64), math.inf
    with contextlib.ExitStack() as stack:
        store, (session,) = stack.enter_context(
            opened("K1", shape, tokens=CONTEXT + STEPS, page_tokens=engine.PAGE_TOKENS)
        )
        fill(session, rows)
        row_bytes = shape["layers"] * store.row_bytes
        decoders = {name: model.decoder(threads=1) for name, model in loaded.items()}
        for turn in range(ROUNDS):
            for name in sorted(decoders, reverse=bool(turn % 2)):
                for _ in range(STEPS):
                    start = clock.own_ns()
                    decoders[name].step([session], ids)
                    best[name] = min(best[name], clock.own_ns() - start)
                session.rollback_tail(STEPS)
                start = clock.own_ns()
                read(STREAMED)
                streaming = min(streaming, clock.own_ns() - start)
    return {
        name: (engine.weight_bytes(paths[name]) + row_bytes * CONTEXT)
        / STREAMED.nbytes
        * (streaming / best[name])
        for name in best
    }


def prefill(loaded: dict[str, Any]) -> dict[str, float]:
    """Speed over that of Q4_1."""
    best = dict.fromkeys(loaded, math.inf)
    shape = shape_of(next(iter(loaded.values())))
    ids = np.random.default_rng(7).integers(5, 250, CONTEXT).tolist()
    with opened("K1", shape, tokens=CONTEXT, page_tokens=engine.PAGE_TOKENS) as (_, (session,)):
        for _ in range(PREFILLS):
            for name, model in loaded.items():
                start = clock.own_ns()
                model.prefill(session, ids, threads=1)
                best[name] = min(best[name], clock.own_ns() - start)
                session.rollback_tail(CONTEXT)
    return {name: best["Q4_1"] / ns for name, ns in best.items() if name != "Q4_1"}


def load(paths: dict[str, Path]) -> dict[str, float]:
    """Time of a load, on all cores, over that of reading the file into memory that is there."""
    best = {name: [math.inf, math.inf] for name in paths}
    for _ in range(LOADS):
        for name, path in paths.items():
            room = bytearray(path.stat().st_size)
            for _ in range(2):  # the second finds the memory there
                start = time.perf_counter()
                with path.open("rb", buffering=0) as file:
                    file.readinto(room)
                best[name][0] = min(best[name][0], time.perf_counter() - start)
            del room
            start = time.perf_counter()
            models.load_model(path)
            best[name][1] = min(best[name][1], time.perf_counter() - start)
    return {name: loading / reading for name, (reading, loading) in best.items()}
