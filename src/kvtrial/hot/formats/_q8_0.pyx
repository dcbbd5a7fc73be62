"""Q8_0 rows: blocks of 32 elements, a binary16 step and 32 int8 in whole steps; a tail is zeros."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int8_t, int16_t, int64_t, uint16_t
from libc.string cimport memcpy

from kvtrial.hot._rows cimport KV_ROWS_CAPSULE, kv_key_row, kv_rows, kv_tiles, kv_value_row
from kvtrial.hot._simd cimport kv_from_half
from kvtrial.hot.formats._blocks cimport first_beyond, in_int8


cdef int64_t row_bytes(const kv_rows *format, int64_t dim) noexcept nogil:
    return (dim + 31) // 32 * 34


cdef int64_t first_unfit(const kv_rows *format, const float *values, int64_t n) noexcept nogil:
    # The step is the block's largest value / 127, and a half.
    return first_beyond(values, n, 127 * 65520)


cdef void put(unsigned char *at, const float *row, int64_t dim) noexcept nogil:
    cdef int64_t block, i
    cdef uint16_t half
    cdef int16_t[32] steps
    for block in range((dim + 31) // 32):
        half = in_int8(row + 32 * block, min(dim - 32 * block, <int64_t>32), steps)
        memcpy(at + 34 * block, &half, 2)
        for i in range(32):
            (<int8_t *>at)[34 * block + 2 + i] = <int8_t>steps[i]


cdef void take(float *row, const unsigned char *at, int64_t dim) noexcept nogil:
    cdef int64_t i
    cdef uint16_t half
    cdef float scale = 0
    for i in range(dim):
        if i % 32 == 0:
            memcpy(&half, at + 34 * (i // 32), 2)
            scale = kv_from_half(half)
        row[i] = scale * (<const int8_t *>at)[34 * (i // 32) + 2 + i % 32]


cdef void write(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, const float *k,
    const float *v,
) noexcept nogil:
    put(at + kv_key_row(tiles, token), k, tiles.head_dim)
    put(at + kv_value_row(tiles, token), v, tiles.head_dim)


cdef void read(
    const kv_rows *format, const kv_tiles *tiles, const unsigned char *at, int64_t token, float *k,
    float *v,
) noexcept nogil:
    take(k, at + kv_key_row(tiles, token), tiles.head_dim)
    take(v, at + kv_value_row(tiles, token), tiles.head_dim)


cdef kv_rows q8_0
q8_0.row_bytes = row_bytes
q8_0.first_unfit = first_unfit
q8_0.write = write
q8_0.read = read


def rows():
    """The format's ``kv_rows`` in a capsule."""
    return PyCapsule_New(&q8_0, KV_ROWS_CAPSULE, NULL)
