"""Blocks of 32 elements in whole steps of a binary16: int8 or 4 bits, the step that errs least."""

from libc.math cimport INFINITY
from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t

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
    DIVISORS = 8  # of 4 bits: 7 to 8.75 by quarters, of either sign


cdef inline vector magnitude(vector x) noexcept nogil:
    return kv_max(x, kv_sub(kv_zero(), x))


cdef inline vector steps_of(vector x, float step, float low, float high) noexcept nogil:
    """x in whole steps, to nearest, from ``low`` to ``high``: a step that rounded down may ask for more."""
    cdef vector shift = kv_splat(12582912)  # 1.5 * 2^23: no fraction is left
    x = kv_max(kv_mul(x, kv_splat(1 / step)), kv_splat(low))
    x = kv_sub(kv_zero(), kv_max(kv_sub(kv_zero(), x), kv_splat(-high)))
    return kv_sub(kv_add(x, shift), shift)


cdef inline float load_block(const float *row, int64_t n, vector *x) noexcept nogil:
    """A block of n <= 32 elements, zeros behind them; returns the largest magnitude."""
    cdef int32_t i
    cdef vector most = kv_zero()
    for i in range(4):
        x[i] = kv_load_head(row + 8 * i, <int32_t>max(min(n - 8 * i, 8), 0))
        most = kv_max(magnitude(x[i]), most)
    return kv_hmax(most)


cdef inline float error_of(
    const vector *x, float step, float low, float high, float *largest
) noexcept nogil:
    """Squared error of a block in such steps, and its largest error."""
    cdef int32_t i
    cdef vector off, sums = kv_zero(), most = kv_zero()
    for i in range(4):
        off = kv_fma(steps_of(x[i], step, low, high), kv_splat(-step), x[i])
        sums = kv_fma(off, off, sums)
        most = kv_max(magnitude(off), most)
    largest[0] = kv_hmax(most)
    return kv_hsum(sums)


cdef inline void store_block(
    const vector *x, uint16_t half, float low, float high, int16_t *steps
) noexcept nogil:
    """The block's 32 elements in whole steps. A step of 0 has nothing but zeros."""
    cdef int32_t i
    for i in range(4):
        kv_store_int16(
            steps + 8 * i, steps_of(x[i], kv_from_half(half), low, high) if half else kv_zero()
        )


cdef inline uint16_t in_int8(const float *row, int64_t n, int16_t *steps) noexcept nogil:
    """A block of n <= 32 elements in 32 int8; returns their step, a half.

    Of some halves from max / 127 up, the step with the least squared error. They all leave errors up to
    half a step, but how the elements fall between the steps differs: the best of 16 takes an eighth off
    the squared error of the plain max / 127.
    """
    cdef vector[4] x
    cdef float least = INFINITY, error, largest
    cdef uint16_t smallest = kv_to_half(load_block(row, n, x) / 127), best = smallest, half
    # Below half of the smallest half there is nothing but zeros.
    if smallest:
        for half in range(smallest, min(smallest + STEP_CANDIDATES, 0x7C00)):
            error = error_of(x, kv_from_half(half), -127, 127, &largest)
            if error < least:
                least, best = error, half
    store_block(x, best, -127, 127, steps)
    return best


cdef inline uint16_t in_int4(const float *row, int64_t n, int16_t *steps) noexcept nogil:
    """A block of n <= 32 elements in 32 integers from -8 to 7; returns their step, a half of either sign.

    The first is max / 7. Of smaller ones, with -8 for the largest element, that with the least squared
    error is taken, unless it cuts one off by more than max / 7 would.
    """
    cdef vector[4] x
    cdef float most = load_block(row, n, x), least, error, largest
    cdef uint16_t best = kv_to_half(most / 7), half
    cdef int32_t i
    if best & 0x7FFF:
        least = error_of(x, kv_from_half(best), -8, 7, &largest)
        for i in range(2 * DIVISORS):
            half = kv_to_half((most if i % 2 else -most) / (7 + 0.25 * (i // 2)))
            if not half & 0x7FFF:
                continue
            error = error_of(x, kv_from_half(half), -8, 7, &largest)
            if error < least and largest <= most / 14:
                least, best = error, half
    store_block(x, best, -8, 7, steps)
    return best
