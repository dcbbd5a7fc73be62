"""Small GGUF files of each tensor kind, and what damage a seed does to one."""

from __future__ import annotations

import functools
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kvtrial.engine.gguf import TensorToWrite, read_gguf, write_gguf
from kvtrial.engine.kinds import TensorKind
from kvtrial.engine.synthetic import ModelSizes, write_synthetic

GOLDEN = Path(__file__).parents[1] / "data" / "kinds.npz"
#: Numbers at which a reader's arithmetic turns over.
EDGES = (0, 1, 2, 3, 7, 31, 32, 33, 64, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
LONG_EDGES = (*EDGES, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
#: Metadata of another type than any key of a model has.
VALUES: tuple[Any, ...] = (
    0, 1, -1, 3, 2**31, 2**40, 0.0, -1.0, float("nan"), float("inf"), 1e-45, True, "", "x", "gpt2", "llama", "default",
    [], ["a"], ["a"] * 300, np.zeros(0, np.int32), np.arange(300, dtype=np.int64), np.full(300, np.nan, np.float32),
)  # fmt: skip
FAMILIES = ("llama", "qwen2", "qwen3", "gemma")


@functools.cache
def sound(kind: str, family: str) -> bytes:
    """A model of one layer whose Q and down matrices are of ``kind``; F32 and F16 have weights of one half."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        sizes = ModelSizes(
            family, "Q8_0", layers=1, q_heads=4, kv_heads=2, head_dim=64, ffn=256, vocab=272, context=64,
            rope_base=1e4, seed=3,
        )  # fmt: skip
        write_synthetic(path, "m", sizes)
        file = read_gguf(path)
        tensors = []
        for tensor in file.tensors.values():
            wanted, data = tensor.kind, tensor.data
            if "attn_q.weight" in tensor.name or "ffn_down" in tensor.name:
                wanted = TensorKind[kind]
                data = _weights(wanted, int(np.prod(tensor.shape)))
            tensors.append(TensorToWrite(tensor.name, wanted, tensor.shape, [data.tobytes()]))
        write_gguf(path, file.metadata, tensors)
        return path.read_bytes()


def _weights(kind: TensorKind, count: int) -> np.ndarray:
    if kind is TensorKind.F32:
        return np.full(count, 0.5, "<f4").view(np.uint8)
    if kind is TensorKind.F16:
        return np.full(count, 0.5, "<f2").view(np.uint8)
    blocks: np.ndarray = np.load(GOLDEN)[f"{kind.name}_blocks"]
    return np.resize(blocks, count // kind.block_size * kind.block_bytes)


def mutant(kind: str, seed: int) -> bytes:
    """The file of ``kind`` that seed damages: by bits, numbers, cuts, keys or scales."""
    random = np.random.default_rng([seed, TensorKind[kind].value])
    raw = sound(kind, FAMILIES[seed % len(FAMILIES)])
    ways = (_bits, _numbers, _cut, _spliced, _keys, _types, _scales, _alignment)
    return ways[seed // len(FAMILIES) % len(ways)](bytearray(raw), random, TensorKind[kind])


def _head_bytes(data: bytearray) -> int:
    """Where the weights begin, about: after the last tensor's record."""
    return data.rindex(b"ffn_down.weight") + 48


def _bits(data: bytearray, random: np.random.Generator, kind: TensorKind) -> bytes:
    for at in random.integers(0, _head_bytes(data), random.integers(1, 9)):
        data[at] ^= 1 << int(random.integers(8))
    return bytes(data)


def _numbers(data: bytearray, random: np.random.Generator, kind: TensorKind) -> bytes:
    for _ in range(int(random.integers(1, 4))):
        at = int(random.integers(4, _head_bytes(data)))
        if random.integers(2):
            struct.pack_into("<I", data, at, EDGES[random.integers(len(EDGES))])
        else:
            struct.pack_into("<Q", data, at, LONG_EDGES[random.integers(len(LONG_EDGES))])
    return bytes(data)


def _cut(data: bytearray, random: np.random.Generator, kind: TensorKind) -> bytes:
    end = len(data) if random.integers(2) else _head_bytes(data)
    return bytes(data[: random.integers(0, end)])


def _spliced(data: bytearray, random: np.random.Generator, kind: TensorKind) -> bytes:
    """A piece taken out, or in twice."""
    first, last = sorted(int(at) for at in random.integers(0, _head_bytes(data), 2))
    return bytes(
        data[:last] + data[last if random.integers(2) else first :][:]
        if random.integers(2)
        else data[:first] + data[last:]
    )


def _keys(data: bytearray, random: np.random.Generator, kind: TensorKind) -> bytes:
    """Keys in another order, some without their value or with another's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(data)
        file = read_gguf(path)
        keys = list(file.metadata)
        random.shuffle(keys)
        metadata = {key: file.metadata[key] for key in keys}
        for key in keys[: int(random.integers(0, 4))]:
            if random.integers(3):
                metadata[key] = VALUES[random.integers(len(VALUES))]
            else:
                del metadata[key]
        metadata.pop("general.alignment", None)
        tensors = [
            TensorToWrite(t.name, t.kind, t.shape, [t.data.tobytes()])
            for t in file.tensors.values()
        ]
        write_gguf(path, metadata, tensors)
        return path.read_bytes()


def _types(data: bytearray, random: np.random.Generator, kind: TensorKind) -> bytes:
    """Tensors of another type, known or not, and of other shapes."""
    for _ in range(int(random.integers(1, 3))):
        at = (
            data.rindex(
                b"weight", 0, int(random.integers(_head_bytes(data) - 400, _head_bytes(data)))
            )
            + 6
        )
        dimensions = struct.unpack_from("<I", data, at)[0]
        if random.integers(2):
            struct.pack_into("<I", data, at + 4 + 8 * dimensions, int(random.integers(0, 45)))
        else:
            where = at + 4 + 8 * int(random.integers(max(dimensions, 1)))
            struct.pack_into("<Q", data, where, LONG_EDGES[random.integers(len(LONG_EDGES))])
    return bytes(data)


def _scales(data: bytearray, random: np.random.Generator, kind: TensorKind) -> bytes:
    """Numbers of weights that are none, the largest, or any."""
    begin = _head_bytes(data)
    for at in random.integers(begin, len(data) - 2, random.integers(1, 64)):
        word = int(
            random.choice([0x7C00, 0x7E00, 0xFC00, 0x7BFF, 0xFBFF, 0x7F80, random.integers(65536)])
        )
        struct.pack_into("<H", data, int(at), word)
    return bytes(data)


def _alignment(data: bytearray, random: np.random.Generator, kind: TensorKind) -> bytes:
    """A key that says 0, 3, 16, 64 or what there is no room for, of any integer type."""
    tag, form = ((4, "<I"), (5, "<i"), (10, "<Q"), (11, "<q"))[random.integers(4)]
    value = int(random.choice([0, 3, 8, 16, 32, 64, 65536, 2**30]))
    count = struct.unpack_from("<Q", data, 16)[0]
    struct.pack_into("<Q", data, 16, count + 1)
    key = b"general.alignment"
    data[24:24] = (
        struct.pack("<Q", len(key)) + key + struct.pack("<I", tag) + struct.pack(form, value)
    )
    return bytes(data)
