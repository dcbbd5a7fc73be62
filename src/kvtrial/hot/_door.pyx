"""Doors: Python arguments in, pointers out; everything unfit is refused by name.

Nothing here allocates for arrays of the right kind. A module of its own, not inline in the pxd: the
names that an inline function uses would be looked up in whoever includes it.
"""

cimport numpy as cnp
from cpython.number cimport PyNumber_Index
from libc.math cimport isfinite
from libc.stdint cimport int64_t

import numpy as np

from kvtrial.contract import InvalidArgument, OutOfRange, PoolExhausted
from kvtrial.contract.arguments import shown

cnp.import_array()


cdef int64_t integer(object value, str name) except? -1:
    """An integer of 64 bits; bool and float are refused."""
    if isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} is {shown(value)}; give an integer")
    try:
        return PyNumber_Index(value)
    except (TypeError, OverflowError):
        raise InvalidArgument(f"{name} is {shown(value)}; give an integer of 64 bits") from None


cdef int64_t layer_index(object value, int64_t layers) except -1:
    """A layer in [0, layers)."""
    cdef int64_t layer = integer(value, "layer")
    if not 0 <= layer < layers:
        raise InvalidArgument(f"layer is {layer}; allowed: 0 to {layers - 1}")
    return layer


cdef float finite_scale(object value) except? -1:
    """A finite float32."""
    cdef double scale
    if isinstance(value, (bool, str, bytes)):
        raise InvalidArgument(f"scale is {shown(value)}; give a number")
    try:
        scale = value
    except TypeError:
        raise InvalidArgument(f"scale is {shown(value)}; give a number") from None
    except OverflowError:
        raise InvalidArgument(f"scale is {shown(value)}; give a finite float32") from None
    if not isfinite(<float>scale):
        raise InvalidArgument(f"scale is {shown(value)}; give a finite float32")
    return <float>scale


cdef object int64_positions(object positions):
    """int64 (n,), C-contiguous; any other sequence of integers is converted."""
    if (
        cnp.PyArray_Check(positions)
        and cnp.PyArray_TYPE(positions) == cnp.NPY_INT64
        and cnp.PyArray_NDIM(positions) == 1
        and cnp.PyArray_ISCARRAY_RO(positions)
    ):
        return positions
    try:
        array = np.asarray(positions)
    except (TypeError, ValueError, OverflowError):
        array = None
    if array is not None and array.ndim == 1 and array.size == 0:
        return np.zeros(0, np.int64)
    if (
        array is None
        or array.ndim != 1
        or array.dtype.kind not in "iu"
        or (array is not positions and not {bool, np.bool_}.isdisjoint(map(type, positions)))
    ):
        raise InvalidArgument(f"positions are {shown(positions)}; give integers of shape (n,)")
    if array.dtype.kind == "u" and array.size and int(array.max()) >= 2**63:
        raise OutOfRange(f"position {int(array.max())} is past 2^63 - 1")
    return np.ascontiguousarray(array, np.int64)


cdef int ascending(const int64_t *at, int64_t n) except -1:
    """Refuses negative, repeated and falling positions."""
    cdef int64_t i
    if n and at[0] < 0:
        raise OutOfRange(f"position {at[0]} is negative; the lowest is base_position")
    for i in range(1, n):
        if at[i] <= at[i - 1]:
            raise InvalidArgument(
                f"position {at[i]} follows {at[i - 1]}; give ascending positions, each once"
            )
    return 0


cdef float *floats(
    object array, str name, int ndim, int64_t n, int64_t heads, int64_t dim, bint writable
) except NULL:
    """A float32 array of shape (n, heads, dim), or (heads, dim) where ndim is 2."""
    cdef cnp.npy_intp *shape
    cdef int lead = ndim - 2
    if cnp.PyArray_Check(array) and cnp.PyArray_TYPE(array) == cnp.NPY_FLOAT32:
        if cnp.PyArray_NDIM(array) == ndim and cnp.PyArray_ISCARRAY_RO(array):
            shape = cnp.PyArray_DIMS(array)
            if (not lead or shape[0] == n) and shape[lead] == heads and shape[lead + 1] == dim:
                if not writable or cnp.PyArray_ISWRITEABLE(array):
                    return <float *>cnp.PyArray_DATA(array)
    want = f"({n}, {heads}, {dim})" if lead else f"({heads}, {dim})"
    got = (
        f"{array.dtype} {array.shape}, strides {array.strides}, writable {array.flags.writeable}"
        if isinstance(array, np.ndarray) else repr(type(array))
    )
    raise InvalidArgument(
        f"{name} is {got}; give float32 {want}, C-contiguous and aligned"
        + (", writable" if writable else "")
    )


cdef object restored_rows(object valid, int64_t layers):
    """Which rows a restore will fill, bool (L, rows), C-contiguous."""
    if (
        not isinstance(valid, np.ndarray) or valid.dtype != np.bool_ or valid.ndim != 2
        or valid.shape[0] != layers
    ):
        raise InvalidArgument(f"valid is {shown(valid)}; give bool of shape ({layers}, rows)")
    try:
        return np.ascontiguousarray(valid)
    except MemoryError:
        raise PoolExhausted(
            f"valid has {valid.shape[1]} rows, and this machine has no memory to look at them; allowed: as "
            "many as the pool has"
        ) from None


cdef int64_t block_rows(object q) except -1:
    """n of a query block (n, H_q, D)."""
    if not cnp.PyArray_Check(q) or cnp.PyArray_NDIM(q) != 3:
        raise InvalidArgument("q of a block is no array of three dimensions; give (n, H_q, D)")
    return cnp.PyArray_DIM(q, 0)


cdef tuple bounds(object value, str name, int64_t low, int64_t high):
    """A [start, stop) given by the caller, or the whole where it is None."""
    if value is None:
        return low, high
    try:
        start, stop = value
    except (TypeError, ValueError):
        raise InvalidArgument(f"{name} is {shown(value)}; give (start, stop)") from None
    start, stop = integer(start, f"{name} start"), integer(stop, f"{name} stop")
    if not low <= start <= stop <= high:
        raise OutOfRange(f"{name} is {value}; allowed: start <= stop inside [{low}, {high}]")
    return start, stop


cdef tuple part_of(object spec, int64_t rows, object kv_heads, object positions):
    """What a partial takes: first and last of the store's own heads, first and last of its ``rows``.

    KV heads are the model's and must be the store's own; positions may reach past either end.
    """
    own_first, own_last = spec.heads
    first, last = bounds(kv_heads, "kv_heads", own_first, own_last)
    start, stop = bounds(positions, "positions", 0, 2**62)
    low = min(max(start - spec.base_position, 0), rows)
    high = min(max(stop - spec.base_position, low), rows)
    return first - own_first, last - own_first, low, high
