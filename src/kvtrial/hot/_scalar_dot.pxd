"""The dot product of the scalar arms K0, A1 and A2."""

from libc.stdint cimport int64_t


cdef inline float scalar_dot(const float *a, const float *b, int64_t n) noexcept nogil:
    """Four sums, so that a multiply-add does not wait for the one before it: what SIMD brings is
    then measured against scalar arithmetic, not against the latency of one addition."""
    cdef float first = 0, second = 0, third = 0, fourth = 0
    cdef int64_t d, whole = n - n % 4
    for d in range(0, whole, 4):
        first += a[d] * b[d]
        second += a[d + 1] * b[d + 1]
        third += a[d + 2] * b[d + 2]
        fourth += a[d + 3] * b[d + 3]
    for d in range(whole, n):
        first += a[d] * b[d]
    return (first + second) + (third + fourth)
