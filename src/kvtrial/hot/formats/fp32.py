"""FP32: rows as they are. ``fp32t`` has K transposed within the page."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kvtrial import contract
from kvtrial.hot.formats import RowFormat
from kvtrial.hot.kernels import simd_kernel


def _rows() -> Any:
    import kvtrial.hot.formats._fp32 as _fp32

    return _fp32.rows()


FP32 = RowFormat(
    name="fp32",
    profile=contract.FP32,
    rows=_rows,
    kernel=partial(simd_kernel, "fp32"),
    in_place=True,
)

FP32T = replace(FP32, name="fp32t", kernel=partial(simd_kernel, "fp32t"), transposed=True)
