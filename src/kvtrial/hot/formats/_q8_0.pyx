"""Q8_0 rows: blocks of 32 elements, a binary16 step and 32 int8 in whole steps; a tail is zeros."""

from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport INFINITY, fabsf
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint16_t
from libc.string cimport memcpy

from kvtrial.hot._rows cimport KV_ROWS_CAPSULE, kv_rows
from kvtrial.hot._simd cimport (
    kv_add,
    kv_fma,
    kv_from_half,
    kv_hmax,
    kv_hsum,
    kv_load_head,
    kv_max,
    kv_mul,
    kv_splat,
    kv_store_int16,
    kv_sub,
    kv_to_half,
    kv_zero,
    vector,
)


cdef enum:
    STEP_CANDIDATES = 16  # halves from max / 127 upwards; 1.5 % of it at most


cdef int64_t row_bytes(int64_t dim) noexcept nogil:
    return (dim + 31) // 32 * 34


cdef int64_t first_unfit(const float *values, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        # The scale is the block's largest value / 127.
        if not (fabsf(values[i]) / 127 < 65520):
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


cdef void write(
    unsigned char *at, int64_t step, const float *row, int64_t dim
) noexcept nogil:
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


cdef void read(
    float *row, const unsigned char *at, int64_t step, int64_t dim
) noexcept nogil:
    cdef int64_t i
    cdef uint16_t half
    cdef float scale = 0
    for i in range(dim):
        if i % 32 == 0:
            memcpy(&half, at + 34 * (i // 32), 2)
            scale = kv_from_half(half)
        row[i] = scale * (<const int8_t *>at)[34 * (i // 32) + 2 + i % 32]


cdef kv_rows q8_0
q8_0.element_bytes = 0
q8_0.row_bytes = row_bytes
q8_0.first_unfit = first_unfit
q8_0.write = write
q8_0.read = read


def rows():
    """The format's ``kv_rows`` in a capsule."""
    return PyCapsule_New(&q8_0, KV_ROWS_CAPSULE, NULL)
