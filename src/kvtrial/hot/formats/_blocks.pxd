"""Blocks of 32 elements in whole steps of a binary16: int8 or 4 bits, the step that errs least.

Sixteen steps are tried at once, each in a lane of its own.
"""

from libc.math cimport INFINITY, fabsf
from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t, uint32_t
from libc.string cimport memcpy, memset

from kvtrial.hot._simd cimport (
    LANES,
    kv_add,
    kv_fma,
    kv_from_half,
    kv_hmax,
    kv_load,
    kv_load_head,
    kv_load_half,
    kv_max,
    kv_min,
    kv_splat,
    kv_store,
    kv_store_int16,
    kv_sub,
    kv_to_half,
    kv_zero,
    vector,
)


cdef enum:
    CANDIDATES = 16  # of 8 bits halves from max / 127 upwards, 1.5 % of it at most; of 4 bits see in_int4


cdef inline int64_t first_beyond(const float *values, int64_t n, float limit) noexcept nogil:
    """Index of the first value that is not below ``limit`` in magnitude, or -1."""
    cdef int64_t i
    cdef int32_t beyond = 0
    for i in range(n):
        beyond |= not fabsf(values[i]) < limit
    if beyond:
        for i in range(n):
            if not fabsf(values[i]) < limit:
                return i
    return -1


cdef inline vector magnitude(vector x) noexcept nogil:
    return kv_max(x, kv_sub(kv_zero(), x))


cdef inline vector whole_steps(vector x, vector inverse, int bits) noexcept nogil:
    """x in whole steps, to nearest; of 4 bits from -8 to 7, since some steps ask for more."""
    cdef vector shift = kv_splat(12582912)  # 1.5 * 2^23: no fraction is left
    x = kv_sub(kv_fma(x, inverse, shift), shift)
    return x if bits == 8 else kv_max(kv_min(x, kv_splat(7)), kv_splat(-8))


cdef inline float load_block(const float *row, int64_t n, float *block) noexcept nogil:
    """A block of n <= 32 elements, zeros behind them; returns the largest magnitude."""
    cdef int32_t i
    cdef vector x, most = kv_zero()
    for i in range(32 // LANES):
        if LANES * (i + 1) <= n:
            x = kv_load(row + LANES * i)
        else:
            x = kv_load_head(row + LANES * i, <int32_t>max(n - LANES * i, 0))
        kv_store(block + LANES * i, x)
        most = kv_max(magnitude(x), most)
    return kv_hmax(most)


# What a block is off in eight steps, a lane each.
ctypedef struct Off:
    vector squared, most


cdef inline void add_off(Off *off, vector x, vector step, vector inverse, int bits) noexcept nogil:
    """What x is off its nearest whole steps; ``step`` is their negative."""
    cdef vector rest = kv_fma(whole_steps(x, inverse, bits), step, x)
    off.squared = kv_fma(rest, rest, off.squared)
    if bits == 4:
        off.most = kv_max(magnitude(rest), off.most)


cdef inline int32_t least_of(const float *x) noexcept nogil:
    """Which of CANDIDATES numbers, none of them negative, is least to 19 places; NaN is more than all."""
    cdef uint32_t[16] ranks  # CANDIDATES
    cdef uint32_t least = 0xFFFFFFFF, i
    # Such floats' bits are in their order. The lowest four hold which it is.
    memcpy(ranks, x, sizeof(ranks))
    for i in range(CANDIDATES):
        least = min(least, ranks[i] & ~<uint32_t>15 | i)
    return least & 15


cdef inline uint16_t in_best(
    const float *block, const uint16_t *halves, float limit, int16_t *steps, int bits
) noexcept nogil:
    """A block of 32 in that of CANDIDATES steps which leaves the least squared error; returns the step.

    Of 4 bits, none may be off by more than ``limit``; the first is taken where all are.
    """
    cdef float[16] each, inverse, squared, most  # CANDIDATES
    cdef vector step, by
    cdef Off even, odd  # two sums, as each waits for its last addition
    cdef int32_t i, best
    for i in range(CANDIDATES // LANES):
        kv_store(each + LANES * i, kv_load_half(halves + LANES * i))
    for i in range(CANDIDATES):
        inverse[i] = 1 / each[i]
    for best in range(CANDIDATES // LANES):
        step, by = kv_sub(kv_zero(), kv_load(each + LANES * best)), kv_load(inverse + LANES * best)
        even.squared = even.most = odd.squared = odd.most = kv_zero()
        for i in range(0, 32, 2):
            add_off(&even, kv_splat(block[i]), step, by, bits)
            add_off(&odd, kv_splat(block[i + 1]), step, by, bits)
        kv_store(squared + LANES * best, kv_add(even.squared, odd.squared))
        kv_store(most + LANES * best, kv_max(even.most, odd.most))
    if bits == 4:
        for i in range(CANDIDATES):
            squared[i] = INFINITY if most[i] > limit else squared[i]
    best = least_of(squared)
    by = kv_splat(inverse[best])
    for i in range(32 // LANES):
        kv_store_int16(steps + LANES * i, whole_steps(kv_load(block + LANES * i), by, bits))
    return halves[best]


cdef inline uint16_t in_int8(const float *row, int64_t n, int16_t *steps) noexcept nogil:
    """A block of n <= 32 elements in 32 int8; returns their step, a half.

    Of some halves from max / 127 up, the step with the least squared error. They all leave errors up to
    half a step, but how the elements fall between the steps differs: the best of 16 takes an eighth off
    the squared error of the plain max / 127.
    """
    cdef float[32] block
    cdef uint16_t[16] halves  # CANDIDATES
    cdef float most = load_block(row, n, block)
    cdef uint16_t first = kv_to_half(most * <float>(1 / 127.0))
    cdef int32_t i
    if not first:  # all elements lie below 64 of the smallest half
        memset(steps, 0, 32 * sizeof(int16_t))
        return 0
    # A subnormal that rounded down may ask for more than 127.
    if most > <float>127.4 * kv_from_half(first):
        first += 1
    for i in range(CANDIDATES):
        halves[i] = <uint16_t>(first + i)
    return in_best(block, halves, INFINITY, steps, 8)


cdef inline uint16_t in_int4(const float *row, int64_t n, int16_t *steps) noexcept nogil:
    """A block of n <= 32 elements in 32 integers from -8 to 7; returns their step, a half of either sign.

    The first is max / 7. Of smaller ones, with -8 for the largest element, that with the least squared
    error is taken, unless it cuts one off by more than max / 7 would.
    """
    cdef float[32] block
    cdef uint16_t[16] halves  # CANDIDATES: max over 7 to 8.75 by quarters, of either sign
    cdef float most = load_block(row, n, block)
    cdef int32_t i
    for i in range(CANDIDATES):
        halves[i] = kv_to_half((-most if i % 2 else most) * (<float>1 / (7 + <float>0.25 * (i // 2))))
    if not halves[0]:
        memset(steps, 0, 32 * sizeof(int16_t))
        return 0
    # A 14th, and what rounding the step to a half adds.
    return in_best(block, halves, <float>0.0715 * most, steps, 4)
