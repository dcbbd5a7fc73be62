"""The orthonormal Hadamard transform that spreads outliers over a row. It is its own inverse."""

from libc.math cimport sqrtf
from libc.stdint cimport int64_t


cdef inline int64_t rotation_block(int64_t dim) noexcept nogil:
    """Elements that are mixed with each other: the largest power of two that divides ``dim``."""
    return dim & -dim


cdef inline void mix(float *row, int64_t dim, int64_t half) noexcept nogil:
    """Sums and differences of elements that are ``half`` apart."""
    cdef int64_t _, i
    cdef float x, y
    for _ in range(dim // (2 * half)):
        for i in range(half):
            x, y = row[i], row[i + half]
            row[i], row[i + half] = x + y, x - y
        row += 2 * half


cdef inline void rotate(float *row, int64_t dim) noexcept nogil:
    """A row of ``dim`` floats in place, block by block; with blocks of one it stays as it is."""
    cdef int64_t size = rotation_block(dim), half = 8, i
    cdef float scale = 1 / sqrtf(<float>size)
    # Those within a vector have a constant distance, so that the compiler shuffles.
    if size > 1:
        mix(row, dim, 1)
    if size > 2:
        mix(row, dim, 2)
    if size > 4:
        mix(row, dim, 4)
    while half < size:
        mix(row, dim, half)
        half *= 2
    for i in range(dim):
        row[i] *= scale
