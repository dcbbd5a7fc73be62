"""FP16: halves, rounded to nearest even. ``fp16t`` has K transposed within the page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvtrial.contract import F32, F64, Profile
from kvtrial.hot.formats import RowFormat, compiled


def _bound(x: F64) -> F64:
    """Half a unit in the last of 11 places; half of the smallest subnormal, 2^-24."""
    return np.maximum(np.abs(x) * 2.0**-11, 2.0**-25)


def _rounded(x: F32) -> F32:
    return x.astype(np.float16).astype(np.float32)


FP16 = RowFormat(
    name="fp16",
    # 65520 lies half-way between the largest half and the next one, if there were one.
    profile=Profile("fp16", limit=65520.0, bound=_bound, rounded=_rounded),
    rows=lambda: compiled("formats._fp16").rows()["fp16"],
    kernel=lambda: compiled("_kernels_simd").kernels()["fp16"],
)

FP16T = replace(
    FP16,
    name="fp16t",
    rows=lambda: compiled("formats._fp16").rows()["fp16t"],
    kernel=lambda: compiled("_kernels_panel_simd").kernels()["fp16t"],
)
