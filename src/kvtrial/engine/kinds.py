"""Tensor kinds of GGUF files: their blocks, and where in one lie the numbers that have to be finite.

How a kind is packed for its products is in native/units.h and native/panels.h: each is linear in units of 32 or
16 weights, so no weight moves. Layouts are those of ggml's quantisations (llama.cpp, ``ggml-quants.c``).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

QK = 32  # weights per quantised block, and per sub-block of most
QK_K = 256  # weights per super-block of the K kinds


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
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
    33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
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
