"""Small GGUF files of each tensor kind, and what damage a seed does to one."""

from __future__ import annotations

import functools
import re
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
    0, 1, -1, 3, 2**31, 2**40, 0.0, -1.0, float("nan"), float("inf"), 1e-45, True, "", "x", "gpt2", "llama",
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


class Damage:
    """One file that is being damaged; its weights begin at ``head``."""

    def __init__(self, raw: bytes, random: np.random.Generator) -> None:
        self.data = bytearray(raw)
        self.random = random
        self.head = raw.rindex(b"ffn_down.weight") + 48

    def _below(self, end: int) -> int:
        return int(self.random.integers(end))

    def bits(self) -> None:
        """Bits of the header."""
        for at in self.random.integers(0, self.head, 1 + self._below(8)):
            self.data[at] ^= 1 << self._below(8)

    def numbers(self) -> None:
        """Words of the header."""
        for _ in range(1 + self._below(3)):
            at = 4 + self._below(self.head - 4)
            if self._below(2):
                struct.pack_into("<I", self.data, at, EDGES[self._below(len(EDGES))])
            else:
                struct.pack_into("<Q", self.data, at, LONG_EDGES[self._below(len(LONG_EDGES))])

    def cut(self) -> None:
        """The end is missing, of the weights or of the header."""
        del self.data[self._below(len(self.data) if self._below(2) else self.head) :]

    def spliced(self) -> None:
        """A piece of the header is missing, or there twice."""
        first, last = sorted((self._below(self.head), self._below(self.head)))
        if self._below(2):
            del self.data[first:last]
        else:
            self.data[last:last] = self.data[first:last]

    def keys(self) -> None:
        """Keys in another order, some of them missing or with another's value."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "m.gguf"
            path.write_bytes(self.data)
            file = read_gguf(path)
            names = list(file.metadata)
            self.random.shuffle(names)
            metadata = {name: file.metadata[name] for name in names}
            for name in names[: self._below(4)]:
                if self._below(3):
                    metadata[name] = VALUES[self._below(len(VALUES))]
                else:
                    del metadata[name]
            tensors = [
                TensorToWrite(t.name, t.kind, t.shape, [t.data.tobytes()])
                for t in file.tensors.values()
            ]
            write_gguf(path, metadata, tensors)
            self.data = bytearray(path.read_bytes())

    def types(self) -> None:
        """A tensor of another type, known or not, or of another shape."""
        names = [
            m.end() for m in re.finditer(rb"[a-z_.0-9]+\.(weight|bias)", self.data[: self.head])
        ]
        at = names[self._below(len(names))]
        (dimensions,) = struct.unpack_from("<I", self.data, at)
        if self._below(2):
            struct.pack_into("<I", self.data, at + 4 + 8 * dimensions, self._below(45))
        else:
            where = at + 4 + 8 * self._below(dimensions)
            struct.pack_into("<Q", self.data, where, LONG_EDGES[self._below(len(LONG_EDGES))])

    def scales(self) -> None:
        """Numbers among the weights that are none, the largest, or any."""
        for at in self.random.integers(self.head, len(self.data) - 2, 1 + self._below(63)):
            word = (0x7C00, 0x7E00, 0xFC00, 0x7BFF, 0xFBFF, 0x7F80, self._below(65536))
            struct.pack_into("<H", self.data, int(at), word[self._below(7)])

    def alignment(self) -> None:
        """One of 0, 3, 16, 64 or another, as an integer of any type."""
        tag, form = ((4, "<I"), (5, "<i"), (10, "<Q"), (11, "<q"))[self._below(4)]
        value = (0, 3, 8, 16, 32, 64, 65536, 2**30)[self._below(8)]
        key = b"general.alignment"
        (count,) = struct.unpack_from("<Q", self.data, 16)
        struct.pack_into("<Q", self.data, 16, count + 1)
        packed = (
            struct.pack("<Q", len(key)) + key + struct.pack("<I", tag) + struct.pack(form, value)
        )
        self.data[24:24] = packed


WAYS = (
    Damage.bits,
    Damage.numbers,
    Damage.cut,
    Damage.spliced,
    Damage.keys,
    Damage.types,
    Damage.scales,
    Damage.alignment,
)


def mutant(kind: str, seed: int) -> bytes:
    """The file of ``kind`` that seed damages: each way in turn, then each in the next family."""
    random = np.random.default_rng([seed, TensorKind[kind].value])
    damage = Damage(sound(kind, FAMILIES[seed // len(WAYS) % len(FAMILIES)]), random)
    WAYS[seed % len(WAYS)](damage)
    return bytes(damage.data)
