"""The orthonormal Hadamard transform that spreads outliers over a row. It is its own inverse."""

from libc.math cimport sqrtf
from libc.stdint cimport int64_t


cdef inline int64_t rotation_block(int64_t dim) noexcept nogil:
    """Elements that are mixed with each other: the largest power of two that divides ``dim``."""
    return dim & -dim


cdef inline void rotate(float *row, int64_t dim) noexcept nogil:
    """A row of ``dim`` floats in place, block by block; with blocks of one it stays as it is."""
    cdef int64_t size = rotation_block(dim), half = 1, pair, first, i
    cdef float x, y, scale = 1 / sqrtf(<float>size)
    while half < size:
        for pair in range(dim // (2 * half)):
            first = 2 * half * pair
            for i in range(first, first + half):
                x, y = row[i], row[i + half]
                row[i], row[i + half] = x + y, x - y
        half *= 2
    for i in range(dim):
        row[i] *= scale
