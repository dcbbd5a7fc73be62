"""Q8_0: blocks of 32 elements, each a binary16 step and 32 int8 in whole steps."""

from __future__ import annotations

import numpy as np

from kvtrial.contract import F64, Profile
from kvtrial.hot.formats import RowFormat, compiled

BLOCK = 32
_U = 2.0**-24  # of FP32: half a unit of 24 places


def _bound(x: F64) -> F64:
    """Half a step, and 127 times what rounding takes off the step, a half too.

    A store may choose a larger step as long as it stays within that.
    """
    size = np.abs(x)
    bound = np.empty_like(size)
    for start in range(0, size.shape[-1], BLOCK):
        block = size[..., start : start + BLOCK]
        step = block.max(axis=-1, keepdims=True) / 127
        scale_error = np.maximum(step * 2.0**-11, 2.0**-25)
        bound[..., start : start + BLOCK] = step / 2 + 127 * scale_error + 4 * _U * 127 * step
    return bound


def _query(q: F64) -> F64:
    """Half of a step of max / 32767 over the query, whose reciprocal, product and step are rounded."""
    size = np.abs(q)
    largest = np.maximum(size.max(axis=-1, keepdims=True), 1e-30)
    return np.broadcast_to(largest * (0.5 / 32767 + 4 * _U), size.shape)


Q8_0 = RowFormat(
    name="q8_0",
    # The step, a half, is the block's largest magnitude / 127.
    profile=Profile("q8_0", limit=127 * 65520.0, finite=True, bound=_bound, query=_query),
    rows=lambda: compiled("formats._q8_0").rows(),
    kernel=lambda: compiled("_kernels_simd").kernels()["q8_0"],
)
