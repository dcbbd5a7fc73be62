"""FP32: rows as they are. ``fp32t`` has K transposed within the page."""

from __future__ import annotations

from dataclasses import replace

from kvtrial import contract
from kvtrial.hot.formats import RowFormat, compiled

FP32 = RowFormat(
    name="fp32",
    profile=contract.FP32,
    rows=lambda: compiled("formats._fp32").rows()["fp32"],
    kernel=lambda: compiled("_kernels_simd").kernels()["fp32"],
)

FP32T = replace(
    FP32,
    name="fp32t",
    rows=lambda: compiled("formats._fp32").rows()["fp32t"],
    kernel=lambda: compiled("_kernels_panel_simd").kernels()["fp32t"],
)
