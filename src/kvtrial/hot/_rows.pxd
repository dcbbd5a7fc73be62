"""Rows in and out of pages, by format: the only place that knows how a row is stored."""

from libc.math cimport INFINITY, fabsf, isfinite
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint16_t
from libc.string cimport memcpy


cdef extern from "simd.h" nogil:
    ctypedef float vector "kv_vf"
    vector kv_zero()
    vector kv_splat(float)
    vector kv_load_head(const float *, int32_t lanes)
    vector kv_fma(vector, vector, vector)
    vector kv_mul(vector, vector)
    vector kv_add(vector, vector)
    vector kv_sub(vector, vector)
    vector kv_max(vector, vector)
    float kv_hsum(vector)
    float kv_hmax(vector)
    void kv_store_int16(int16_t *, vector)
    uint16_t kv_to_half(float)
    float kv_from_half(uint16_t)


cdef enum Format:
    FP32, FP16, Q8_0


cdef enum:
    STEP_CANDIDATES = 16  # halves from max / 127 upwards; 1.5 % of it at most


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


cdef inline vector q8_steps(vector x, float step) noexcept nogil:
    """x in whole steps, to nearest, at most 127 of them: a step that rounded down may ask for 128."""
    cdef vector low = kv_splat(-127), shift = kv_splat(12582912)  # 1.5 * 2^23: no fraction is left
    x = kv_max(kv_mul(x, kv_splat(1 / step)), low)
    x = kv_sub(kv_zero(), kv_max(kv_sub(kv_zero(), x), low))
    return kv_sub(kv_add(x, shift), shift)


cdef inline uint16_t best_step(const vector *x, uint16_t smallest) noexcept nogil:
    """Of some halves from ``smallest`` up, the step with the least squared error over 32 elements.

    They all leave errors up to half a step, but how the elements fall between the steps differs:
    the best of 16 takes an eighth off the squared error of the plain max / 127.
    """
    cdef uint16_t best = smallest, half
    cdef float least = INFINITY, error, step
    cdef vector sums, off
    cdef int32_t i
    for half in range(smallest, min(smallest + STEP_CANDIDATES, 0x7C00)):
        step = kv_from_half(half)
        sums = kv_zero()
        for i in range(4):
            off = kv_fma(q8_steps(x[i], step), kv_splat(-step), x[i])
            sums = kv_fma(off, off, sums)
        error = kv_hsum(sums)
        if error < least:
            least, best = error, half
    return best


cdef inline void write_q8(unsigned char *at, const float *row, int64_t dim) noexcept nogil:
    cdef int64_t block
    cdef int32_t i
    cdef vector[4] x
    cdef vector most
    cdef uint16_t half
    cdef int16_t[32] steps
    for block in range((dim + 31) // 32):
        most = kv_zero()
        for i in range(4):
            x[i] = kv_load_head(
                row + 32 * block + 8 * i,
                <int32_t>max(min(dim - 32 * block - 8 * i, 8), 0),
            )
            most = kv_max(kv_max(x[i], kv_sub(kv_zero(), x[i])), most)
        half = kv_to_half(kv_hmax(most) / 127)
        # Below half of the smallest half there is nothing but zeros.
        if half:
            half = best_step(x, half)
        memcpy(at + 34 * block, &half, 2)
        for i in range(4):
            kv_store_int16(
                steps + 8 * i, q8_steps(x[i], kv_from_half(half)) if half else kv_zero()
            )
        for i in range(32):
            (<int8_t *>at)[34 * block + 2 + i] = <int8_t>steps[i]


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
