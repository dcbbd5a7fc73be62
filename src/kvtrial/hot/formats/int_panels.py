"""Int8 and 4-bit codes in blocks of 32, as panels for integer products: scores and values of integers.

``int8rp`` has int8 with K rotated by a Hadamard transform of head_dim, whose outliers spread over the row; in
``int4rp`` K and V have 4 bits and are rotated; ``int4p`` is the same without it. ``int8r4rp`` has K as int8rp does,
and V as int4rp. The query is rounded in blocks of 32 too, and the weights of 32 rows together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np

from kvtrial.contract import F64, Profile
from kvtrial.hot.formats import RowFormat, compiled

BLOCK = 32
#: Codes go from -127 or from -8; a step is the block's largest magnitude / this, or smaller.
LEVELS = {8: 127, 4: 7}
#: What a query or a weight is rounded to, where codes have so many bits.
FACTOR_LEVELS = {8: 32767, 4: 127}
_U = 2.0**-24  # of FP32: half a unit of 24 places


def _largest(x: F64) -> F64:
    """Each element's largest magnitude of its block."""
    size = np.abs(x)
    largest = np.empty_like(size)
    for start in range(0, size.shape[-1], BLOCK):
        block = size[..., start : start + BLOCK]
        largest[..., start : start + BLOCK] = block.max(axis=-1, keepdims=True)
    return largest


def _step(largest: F64, bits: int) -> F64:
    """What a step may be at most: a half, and of 8 bits 16 of its last places more (see in_int8)."""
    step = largest / LEVELS[bits]
    return step * (1 + 2.0**-6 + 2.0**-11) + 17 * 2.0**-24


def _stored(x: F64, bits: int) -> F64:
    """Half a step, and what rounding the step takes off the codes; as Q8_0 has it."""
    step = _largest(x) / LEVELS[bits]
    step_error = np.maximum(step * 2.0**-11, 2.0**-25)
    return step / 2 + (LEVELS[bits] + 1) * (step_error + 4 * _U * step)


def _asked(q: F64, bits: int) -> F64:
    """Half of a step of the block's largest / 32767 or 127, whose reciprocal, product and step are rounded."""
    return np.maximum(_largest(q), 1e-30) * (0.5 / FACTOR_LEVELS[bits] + 4 * _U)


def _weighted(v: F64, bits: int) -> F64:
    """A code times half of a weight's step, 1 / 32767 or 1 / 127 of the largest weight, times V's own step."""
    step = _step(_largest(v), bits)
    return (LEVELS[bits] + 1) * step * (0.5 / FACTOR_LEVELS[bits] + 4 * _U)


@cache
def hadamard(size: int) -> F64:
    """The orthonormal Hadamard matrix (size, size), size a power of two: symmetric, its own inverse."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def _by_rotation(x: F64, bound: Callable[[F64], F64]) -> F64:
    """A bound of rotated elements for those that are turned back, D being whole blocks of a rotation.

    An element is a sum of ``size`` others over the root of it: off by that root times the largest error of
    them at most. Rotating takes log2(size) additions and a product twice, in FP32.
    """
    size = x.shape[-1] & -x.shape[-1]
    split = x.reshape(*x.shape[:-1], x.shape[-1] // size, size)
    rotated = split @ hadamard(size)
    error = bound(rotated.reshape(x.shape)).reshape(split.shape).max(axis=-1, keepdims=True)
    rounding = 4 * (np.log2(size) + 2) * _U * np.sqrt((split**2).sum(axis=-1, keepdims=True))
    worst = np.sqrt(size) * (error + rounding)
    return np.broadcast_to(worst, split.shape).reshape(x.shape)


def _bound(x: F64, bits: int, rotated: bool) -> F64:
    stored = partial(_stored, bits=bits)
    return _by_rotation(x, stored) if rotated else stored(x)


def _query(q: F64, bits: int, rotated: bool) -> F64:
    asked = partial(_asked, bits=bits)
    return _by_rotation(q, asked) if rotated else asked(q)


def _weights(v: F64, bits: int, rotated: bool) -> F64:
    weighted = partial(_weighted, bits=bits)
    return _by_rotation(v, weighted) if rotated else weighted(v)


def _format(
    name: str, limit: float, key_bits: int, value_bits: int, *, turned: str = ""
) -> RowFormat:
    """A format of panels. ``turned`` has K, V or both, whichever is rotated."""
    # One bound for K and V: the larger, that of fewer bits, rotated where either is.
    bits = min(key_bits, value_bits)
    return RowFormat(
        name=name,
        profile=Profile(
            name,
            limit=limit,
            finite=True,
            bound=partial(_bound, bits=bits, rotated=bool(turned)),
            query=partial(_query, bits=key_bits, rotated="K" in turned),
            weights=partial(_weights, bits=value_bits, rotated="V" in turned),
        ),
        rows=lambda: compiled("formats._int_panels").rows()[name],
        kernel=lambda: compiled("_kernels_int_panel_simd").kernels()[name],
    )


# The limits are those of _int_panels.pyx.
INT8RP = _format("int8rp", 510000.0, 8, 8, turned="K")
INT4P = _format("int4p", 7 * 65520.0, 4, 4)
INT4RP = _format("int4rp", 28000.0, 4, 4, turned="KV")
INT8R4RP = _format("int8r4rp", 28000.0, 8, 4, turned="KV")
