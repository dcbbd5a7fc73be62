"""A model's weights: every tensor by its name, shape checked, each taken exactly once."""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np

from kvtrial.contract import F32
from kvtrial.engine._regions import Head, Layer
from kvtrial.engine._weights import Matrix, packed_nbytes
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.errors import GgufInvalid, NonFiniteWeight
from kvtrial.engine.gguf import GgufFile, GgufTensor, check_finite
from kvtrial.host import machine

HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class Weights:
    """What the regions multiply with, in memory of one's own; those with blocks are packed."""

    embedding: Matrix
    layers: tuple[Layer, ...]
    head: Head
    #: Divisors of RoPE's angles (head_dim / 2,), of Llama 3.1 and later; None where there are none.
    rope_factors: F32 | None
    #: Names of tensors that the architecture has no use for, sorted.
    unused: tuple[str, ...]


def load_weights(file: GgufFile, config: ModelConfig) -> Weights:
    """Take every tensor of the architecture.

    Raises
    ------
    MissingTensor
        Named; the file itself is whole.
    GgufInvalid
        A tensor of another shape than the metadata says.
    NonFiniteWeight
        NaN or infinity among weights or scales.
    """
    take = _Taker(file)
    c, family = config, config.architecture
    q_rows, kv_rows = c.q_heads * c.head_dim, c.kv_heads * c.head_dim
    stored = file.tensor("token_embd.weight").shape[0]
    embedding = take.matrix("token_embd.weight", stored, c.hidden, used=c.vocab)
    layers = []
    for i in range(c.layers):
        block = f"blk.{i}"
        biases = None
        if family.qkv_bias:
            biases = tuple(
                take.vector(f"{block}.attn_{name}.bias", rows)
                for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
            )
        norms = None
        if family.qk_norm:
            norms = tuple(
                take.vector(f"{block}.attn_{name}_norm.weight", c.head_dim) for name in "qk"
            )
        layers.append(
            Layer(
                take.matrix(f"{block}.attn_q.weight", q_rows, c.hidden),
                take.matrix(f"{block}.attn_k.weight", kv_rows, c.hidden),
                take.matrix(f"{block}.attn_v.weight", kv_rows, c.hidden),
                take.matrix(f"{block}.attn_output.weight", c.hidden, q_rows),
                take.matrix(f"{block}.ffn_gate.weight", c.ffn, c.hidden),
                take.matrix(f"{block}.ffn_up.weight", c.ffn, c.hidden),
                take.matrix(f"{block}.ffn_down.weight", c.hidden, c.ffn),
                take.vector(f"{block}.attn_norm.weight", c.hidden),
                take.vector(f"{block}.ffn_norm.weight", c.hidden),
                biases,
                norms,
            )
        )
    output = embedding
    if not c.tied:
        output = take.matrix("output.weight", stored, c.hidden, used=c.vocab)
    head = Head(take.vector("output_norm.weight", c.hidden), output)
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = take.vector("rope_freqs.weight", c.head_dim // 2)
        if not (factors > 0).all():
            raise GgufInvalid(f"{file.path}: rope_freqs.weight has factors that are not above 0")
    unused = tuple(sorted(set(file.tensors) - take.taken))
    return Weights(embedding, tuple(layers), head, factors, unused)


class _Taker:
    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.taken: set[str] = set()
        self._threads = machine.usable_cpus()
        sizes = [_room_nbytes(t) for t in file.tensors.values() if len(t.shape) == 2]
        self._room = _huge_pages(sum(sizes))

    def matrix(self, name: str, rows: int, cols: int, used: int | None = None) -> Matrix:
        """A matrix of (rows, cols), of which the first ``used`` rows are taken; by default all."""
        tensor = self.file.tensor(name)
        if tensor.shape != (rows, cols):
            raise GgufInvalid(
                f"{self.file.path}: tensor {name!r} has shape {tensor.shape}; the metadata says "
                f"({rows}, {cols})"
            )
        taken = rows if used is None else used
        room = self._room[: packed_nbytes(tensor.kind.name, taken, cols)]
        self._room = self._room[_room_nbytes(tensor) :]
        return self._packed(tensor, taken, cols, room)

    def _packed(self, tensor: GgufTensor, rows: int, cols: int, room: np.ndarray | None) -> Matrix:
        """The first ``rows`` rows of a tensor, whose weights have to be finite."""
        check_finite(tensor, self.file.path)
        self.taken.add(tensor.name)
        data = tensor.data[: tensor.data.size // _rows(tensor) * rows]
        try:
            return Matrix(tensor.name, tensor.kind.name, rows, cols, data, room, self._threads)
        except OverflowError:
            raise NonFiniteWeight(
                f"{self.file.path}: tensor {tensor.name!r} ({tensor.kind.name}) has blocks whose lowest weights "
                "are past what FP16 holds; the file is corrupt: fetch it again"
            ) from None

    def vector(self, name: str, size: int) -> F32:
        """A small tensor as float32, whatever it is stored as."""
        tensor = self.file.tensor(name)
        if tensor.shape != (size,):
            raise GgufInvalid(
                f"{self.file.path}: tensor {name!r} has shape {tensor.shape}; the metadata says "
                f"({size},)"
            )
        out = np.empty((1, size), np.float32)
        self._packed(tensor, 1, size, None).dequantise(0, 1, out)
        return out[0]


def _rows(tensor: GgufTensor) -> int:
    return tensor.shape[0] if len(tensor.shape) == 2 else 1


def _room_nbytes(tensor: GgufTensor) -> int:
    """What a matrix takes, in whole cache lines."""
    return -(-packed_nbytes(tensor.kind.name, *tensor.shape) // 64) * 64


def _huge_pages(nbytes: int) -> np.ndarray:
    """Zeros, uint8 (nbytes,), in one piece for all matrices, so that huge pages can back it."""
    region = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a system that has none still has memory
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + nbytes]
