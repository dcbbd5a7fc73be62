"""bf16: the upper half of each float32, rounded to nearest even."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from kvtrial.contract import F32, F64, Profile
from kvtrial.hot.formats import RowFormat
from kvtrial.hot.paged import K2, open_paged
from kvtrial_narrow import KERNEL, NOT_BUILT, ROWS, capsule


def _bound(x: F64) -> F64:
    """Half a unit in the last of 8 places; half of the smallest subnormal, 2^-133."""
    return np.maximum(np.abs(x) * 2.0**-8, 2.0**-134)


def _rounded(x: F32) -> F32:
    bits = np.ascontiguousarray(x).view(np.uint32)
    # Half a unit less one, and one where the last place that stays is odd: ties go to even.
    kept = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), kept.view(np.float32))


BF16 = RowFormat(
    name="bf16",
    # Half-way between the largest bf16, 0x7F7F, and the next one, if there were one.
    profile=Profile("bf16", limit=float.fromhex("0x1.ffp127"), bound=_bound, rounded=_rounded),
    rows=partial(capsule, "bf16_rows", ROWS),
    kernel=lambda: capsule("bf16_attend", KERNEL),
)

B16 = replace(
    K2,
    name="B16",
    title="Paged, bf16 rows",
    language="C",
    profile=BF16.profile,
    open=partial(open_paged, format=BF16),
    not_built=NOT_BUILT,
)
