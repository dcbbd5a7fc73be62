"""Tensor kinds of GGUF files: their blocks, and as which of four kinds each is kept in memory.

Weights are multiplied in four forms: F32, F16, Q4_1 (scale and minimum of 32 nibbles) and Q8_0 (step of 32 int8).
Whatever is linear in a block of 32 is kept in one of them as it is; the rest is made again in Q8_0, within half a
step of each block's largest weight / 127. `KEPT` says which is which. Layouts are those of ggml's quantisations
(llama.cpp, ``ggml-quants.c``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

QK = 32  # weights per quantised block, and per sub-block of most
QK_K = 256  # weights per super-block of the K kinds
#: Weights that are converted at a time: their float32 values stay in a cache.
_AT_ONCE = 1 << 18


class Layout(NamedTuple):
    """Weights and bytes of a block, and where in it numbers lie that have to be finite."""

    weights: int
    nbytes: int
    halves: tuple[int, ...] = ()


class TensorKind(enum.Enum):
    """Tensor kinds by their GGUF number."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30

    @property
    def layout(self) -> Layout:
        """Its blocks."""
        return _LAYOUTS[self]

    @property
    def block_size(self) -> int:
        """Weights per block."""
        return self.layout.weights

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return self.layout.nbytes


#: Kinds that don't run here, by number, so that a message can name them.
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

K = TensorKind
_LAYOUTS = {
    K.F32: Layout(1, 4),
    K.F16: Layout(1, 2, (0,)),
    K.BF16: Layout(1, 2),
    K.Q4_0: Layout(QK, 18, (0,)),
    K.Q4_1: Layout(QK, 20, (0, 2)),
    K.Q5_0: Layout(QK, 22, (0,)),
    K.Q5_1: Layout(QK, 24, (0, 2)),
    K.Q8_0: Layout(QK, 34, (0,)),
    K.IQ4_NL: Layout(QK, 18, (0,)),
    K.Q2_K: Layout(QK_K, 84, (80, 82)),
    K.Q3_K: Layout(QK_K, 110, (108,)),
    K.Q4_K: Layout(QK_K, 144, (0, 2)),
    K.Q5_K: Layout(QK_K, 176, (0, 2)),
    K.Q6_K: Layout(QK_K, 210, (208,)),
    K.IQ4_XS: Layout(QK_K, 136, (0,)),
}


class Kept(NamedTuple):
    """As which kind another is kept, and how far a weight may move: ``exact``, ``scale`` (the block's scale is
    rounded to FP16, 2^-11 of it) or ``half a step`` (of the largest weight of 32, / 127)."""

    kind: TensorKind
    loss: str


KEPT = {
    K.F32: Kept(K.F32, "exact"),
    K.F16: Kept(K.F16, "exact"),
    K.Q4_1: Kept(K.Q4_1, "exact"),
    K.Q8_0: Kept(K.Q8_0, "exact"),
    K.BF16: Kept(K.F32, "exact"),
    K.Q4_0: Kept(K.Q4_1, "exact"),
    K.Q5_0: Kept(K.Q8_0, "exact"),
    K.IQ4_NL: Kept(K.Q8_0, "exact"),
    K.Q4_K: Kept(K.Q4_1, "scale"),
    K.IQ4_XS: Kept(K.Q8_0, "scale"),
    K.Q5_1: Kept(K.Q8_0, "half a step"),
    K.Q2_K: Kept(K.Q8_0, "half a step"),
    K.Q3_K: Kept(K.Q8_0, "half a step"),
    K.Q5_K: Kept(K.Q8_0, "half a step"),
    K.Q6_K: Kept(K.Q8_0, "half a step"),
}


def kept(kind: TensorKind, data: U8) -> U8:
    """Blocks of ``kind`` as blocks of ``KEPT[kind].kind``; the data itself where the two are one.

    Parameters
    ----------
    kind : TensorKind
    data : uint8 (blocks * block_bytes,)

    Returns
    -------
    uint8 (weights / block_size * block_bytes of the kind that it is kept as,)
    """
    if kind not in _CONVERT:
        return data
    layout, target = kind.layout, KEPT[kind].kind.layout
    blocks = data.reshape(-1, layout.nbytes)
    out = np.empty(len(blocks) * layout.weights // target.weights * target.nbytes, np.uint8)
    step = max(1, _AT_ONCE // layout.weights)
    at = 0
    for start in range(0, len(blocks), step):
        # A scale that overflows as it is kept shows in what came out, whose scales are looked at.
        with np.errstate(over="ignore", invalid="ignore"):
            made = _CONVERT[kind](blocks[start : start + step]).reshape(-1)
        out[at : at + made.size] = made
        at += made.size
    return out


# --------------------------------------------------------------------------------------------------
# Parts of blocks; b is uint8 (n, block_bytes)


def _half(b: U8, at: int) -> F32:
    """A half at a byte of each block: float32 (n, 1)."""
    return b[:, at : at + 2].copy().view("<f2").astype(np.float32)


def _nibbles(q: U8) -> U8:
    """Low nibbles of the bytes (n, m), then their high ones: (n, 2 m)."""
    return np.concatenate([q & 15, q >> 4], axis=1)


def _pairs_of_nibbles(q: U8) -> U8:
    """(n, 128) bytes as (n, 8, 32): each 32 bytes give 32 low nibbles, then 32 high ones."""
    q = q.reshape(-1, 4, 1, 32)
    return np.concatenate([q & 15, q >> 4], axis=2).reshape(-1, 8, 32)


def _fifth_bits(b: U8) -> U8:
    """32 bits (n, 4) as (n, 32): bit i belongs to element i."""
    return np.unpackbits(b, axis=1, bitorder="little")


def _six_bits(s: U8) -> tuple[F32, F32]:
    """Scales and minima (n, 8) of Q4_K and Q5_K, six bits each, from 12 bytes."""
    scales = np.concatenate([s[:, :4] & 63, (s[:, 8:] & 15) | (s[:, :4] >> 6 << 4)], axis=1)
    minima = np.concatenate([s[:, 4:8] & 63, (s[:, 8:] >> 4) | (s[:, 4:8] >> 6 << 4)], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Weights of super-blocks, float32


def _q5_1(b: U8) -> F32:
    q = _nibbles(b[:, 8:24]) | _fifth_bits(b[:, 4:8]) << 4
    return _half(b, 0) * q + _half(b, 2)


def _q2_k(b: U8) -> F32:
    q = b[:, 16:80].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = b[:, :16].reshape(-1, 2, 4, 2)  # of 16 weights each
    d, low = (_half(b, at)[:, :, None, None] for at in (80, 82))
    per = np.repeat(d * (scales & 15), 16, axis=3), np.repeat(low * (scales >> 4), 16, axis=3)
    return (per[0] * q - per[1]).reshape(-1, QK_K)


def _q3_k(b: U8) -> F32:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    bits = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    lacks = b[:, None, None, :32] >> bits & 1 ^ 1
    q = (b[:, 32:96].reshape(-1, 2, 1, 32) >> shifts & 3).astype(np.float32) - 4 * lacks
    s = b[:, 96:108]
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    high = (s[:, None, 8:] >> shifts & 3).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    per = _half(b, 108) * scales
    return (np.repeat(per, 16, axis=1).reshape(-1, 2, 4, 32) * q).reshape(-1, QK_K)


def _q5_k(b: U8) -> F32:
    scales, minima = _six_bits(b[:, 4:16])
    bits = np.arange(8, dtype=np.uint8)[:, None]
    q = _pairs_of_nibbles(b[:, 48:]) | (b[:, None, 16:48] >> bits & 1) << 4
    scale, low = (_half(b, 0) * scales)[..., None], (_half(b, 2) * minima)[..., None]
    return (scale * q - low).reshape(-1, QK_K)


def _q6_k(b: U8) -> F32:
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | high << 4).astype(np.int8) - 32
    per = _half(b, 208) * b[:, 192:208].view(np.int8)
    return (np.repeat(per, 16, axis=1).reshape(-1, 2, 4, 32) * q).reshape(-1, QK_K)


# --------------------------------------------------------------------------------------------------
# Blocks of the four kinds that are multiplied


def _in_q8_0(step: npt.NDArray[np.float16], q: npt.NDArray[np.int8]) -> U8:
    """Steps (n, 1) and int8 (n, 32) as blocks."""
    return np.concatenate([step.view(np.uint8), q.view(np.uint8)], axis=1)


def _rounded(values: F32) -> U8:
    """Weights as Q8_0: the step is each 32's largest / 127."""
    x = values.reshape(-1, QK)
    step = (np.abs(x).max(axis=1, keepdims=True) / np.float32(127)).astype("<f2")
    wide = step.astype(np.float32)
    q = np.divide(x, wide, out=np.zeros_like(x), where=wide > 0)
    return _in_q8_0(step, np.clip(np.rint(q), -127, 127).astype(np.int8))


def _of_q4_0(b: U8) -> U8:
    """(q - 8) d is q d + m with m = -8 d, a half as d is."""
    return np.concatenate(
        [b[:, :2], (-8 * _half(b, 0)).astype("<f2").view(np.uint8), b[:, 2:]], axis=1
    )


def _of_q4_k(b: U8) -> U8:
    """Eight blocks of Q4_1: nibbles as they lie there, low ones first."""
    scales, minima = _six_bits(b[:, 4:16])
    scale, low = _half(b, 0) * scales, -_half(b, 2) * minima
    q = _pairs_of_nibbles(b[:, 16:])
    packed = q[:, :, :16] | q[:, :, 16:] << 4
    heads = np.stack([scale, low], axis=2).astype("<f2").view(np.uint8)
    return np.concatenate([heads, packed], axis=2)


def _of_q5_0(b: U8) -> U8:
    q = _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]) << 4
    return _in_q8_0(b[:, :2].copy().view("<f2"), q.astype(np.int8) - 16)


def _of_iq4_nl(b: U8) -> U8:
    return _in_q8_0(b[:, :2].copy().view("<f2"), _IQ4[_nibbles(b[:, 2:])])


def _of_iq4_xs(b: U8) -> U8:
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = b[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high << 4).astype(np.float32) - 32
    step = (_half(b, 0) * scales).astype("<f2").reshape(-1, 1)
    q = b[:, 8:].reshape(-1, 16)
    return _in_q8_0(step, _IQ4[_nibbles(q)])


def _of_bf16(b: U8) -> U8:
    return (b.view("<u2").astype("<u4") << 16).view(np.uint8)


_CONVERT: dict[TensorKind, Callable[[U8], U8]] = {
    K.BF16: _of_bf16,
    K.Q4_0: _of_q4_0,
    K.Q5_0: _of_q5_0,
    K.IQ4_NL: _of_iq4_nl,
    K.Q4_K: _of_q4_k,
    K.IQ4_XS: _of_iq4_xs,
    K.Q5_1: lambda b: _rounded(_q5_1(b)),
    K.Q2_K: lambda b: _rounded(_q2_k(b)),
    K.Q3_K: lambda b: _rounded(_q3_k(b)),
    K.Q5_K: lambda b: _rounded(_q5_k(b)),
    K.Q6_K: lambda b: _rounded(_q6_k(b)),
}
