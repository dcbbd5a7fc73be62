"""4 bits: blocks of 32 elements, a float32 step and 32 nibbles in whole steps, -7 to 7."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from kvtrial.contract import F64, Profile
from kvtrial.hot.formats import RowFormat
from kvtrial.hot.paged import K2, open_paged
from kvtrial_narrow import KERNEL, NOT_BUILT, ROWS, capsule

BLOCK = 32


def _bound(x: F64) -> F64:
    """Half a step of a seventh of the block's largest, and what three float32 roundings take."""
    bound = np.empty_like(x)
    for start in range(0, x.shape[-1], BLOCK):
        most = np.abs(x[..., start : start + BLOCK]).max(axis=-1, keepdims=True)
        bound[..., start : start + BLOCK] = most / 14 + 4 * 2.0**-24 * most + 2.0**-149
    return bound


Q4 = RowFormat(
    name="q4",
    profile=Profile("q4", limit=float("inf"), finite=True, bound=_bound),
    rows=partial(capsule, "q4_rows", ROWS),
    kernel=lambda: capsule("q4_attend", KERNEL),
)

B4 = replace(
    K2,
    name="B4",
    title="Paged, 4-bit rows in blocks of 32",
    language="C",
    profile=Q4.profile,
    open=partial(open_paged, format=Q4),
    not_built=NOT_BUILT,
)
