"""Where int8 and 4-bit codes lie in a head's tiles, as panels for integer products.

A K tile and a V tile each are a panel of codes, and behind it the steps of its blocks of 32:

    K  panel: depth head_dim (padded to whole blocks), columns page_tokens
    V  panel: depth page_tokens, columns head_dim (padded)
    steps: halves [block][token], blocks along head_dim in both

A product multiplies along depth, so codes that are neighbours in depth lie together: of each column two int8,
or eight 4-bit codes in four bytes, the first four in the low nibbles. A nibble is its code + 8.
"""

from libc.stdint cimport int64_t


cdef enum:
    BLOCK = 32


cdef inline int64_t blocks_of(int64_t dim) noexcept nogil:
    return (dim + BLOCK - 1) // BLOCK


cdef inline int64_t panel_bytes(int64_t tokens, int64_t dim, int bits) noexcept nogil:
    """A panel's codes, and so where its steps begin."""
    return tokens * blocks_of(dim) * BLOCK * bits // 8


cdef inline int64_t tile_bytes(int64_t tokens, int64_t dim, int bits) noexcept nogil:
    """A panel and its steps."""
    return panel_bytes(tokens, dim, bits) + 2 * tokens * blocks_of(dim)


cdef inline int64_t code_at(int64_t columns, int64_t depth, int64_t column, int bits) noexcept nogil:
    """The byte that a code lies in."""
    if bits == 8:
        return (depth // 2 * columns + column) * 2 + depth % 2
    return (depth // 8 * columns + column) * 4 + depth % 4


cdef inline int nibble_shift(int64_t depth) noexcept nogil:
    """The code's place in its byte, where codes have 4 bits."""
    return depth % 8 // 4 * 4
