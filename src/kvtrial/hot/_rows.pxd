"""Rows in and out of pages, by format: the only place that knows how a row is stored."""

from libc.math cimport fabsf, isfinite
from libc.stdint cimport int8_t, int32_t, int64_t, uint16_t
from libc.string cimport memcpy


cdef extern from "simd.h" nogil:
    uint16_t kv_to_half(float)
    float kv_from_half(uint16_t)


cdef enum Format:
    FP32, FP16, Q8_0


cdef inline int64_t row_nbytes(Format form, int64_t dim) noexcept nogil:
    """Bytes of one row of one head as it lies in a page."""
    if form == FP32:
        return (dim + 7) // 8 * 32
    if form == FP16:
        return (dim + 7) // 8 * 16
    return (dim + 31) // 32 * 34


cdef inline int64_t first_unfit(Format form, const float *row, int64_t n) noexcept nogil:
    """Index of the first value that the format can't hold, or -1."""
    cdef int64_t i
    if form == FP16:
        for i in range(n):
            if isfinite(row[i]) and fabsf(row[i]) >= 65520:
                return i
    elif form == Q8_0:
        for i in range(n):
            # The scale is the block's largest value / 127.
            if not (fabsf(row[i]) / 127 < 65520):
                return i
    return -1


cdef inline void write_q8(unsigned char *at, const float *row, int64_t dim) noexcept nogil:
    cdef int64_t block, i, n
    cdef float most, scale, x
    cdef uint16_t half
    cdef int8_t *values
    for block in range((dim + 31) // 32):
        n = min(32, dim - 32 * block)
        most = 0
        for i in range(n):
            most = max(most, fabsf(row[32 * block + i]))
        half = kv_to_half(most / 127)
        scale = kv_from_half(half)
        memcpy(at + 34 * block, &half, 2)
        values = <int8_t *>(at + 34 * block + 2)
        for i in range(32):
            x = row[32 * block + i] / scale if i < n and scale > 0 else 0
            # A scale that rounded down may ask for 128.
            x = min(max(x, -127), 127)
            values[i] = <int8_t>(x + 0.5 if x >= 0 else x - 0.5)


cdef inline void write_row(
    Format form, unsigned char *at, const float *row, int64_t dim
) noexcept nogil:
    """One head's row; what stands behind ``dim`` is left as it was."""
    cdef int64_t i
    if form == FP32:
        memcpy(at, row, dim * sizeof(float))
    elif form == FP16:
        for i in range(dim):
            (<uint16_t *>at)[i] = kv_to_half(row[i])
    else:
        write_q8(at, row, dim)


cdef inline void read_row(
    Format form, float *row, const unsigned char *at, int64_t dim
) noexcept nogil:
    """One head's row as FP32."""
    cdef int64_t i
    cdef uint16_t half
    cdef float scale = 0
    if form == FP32:
        memcpy(row, at, dim * sizeof(float))
    elif form == FP16:
        for i in range(dim):
            row[i] = kv_from_half((<const uint16_t *>at)[i])
    else:
        for i in range(dim):
            if i % 32 == 0:
                memcpy(&half, at + 34 * (i // 32), 2)
                scale = kv_from_half(half)
            row[i] = scale * (<const int8_t *>at)[34 * (i // 32) + 2 + i % 32]
