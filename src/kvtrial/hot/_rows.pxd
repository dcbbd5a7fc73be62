"""Rows in and out of pages. How they lie in a head's tiles, and how they are stored, their format knows."""

from libc.stdint cimport int64_t
from libc.string cimport memset


cdef extern from "kv_rows.h" nogil:
    const char *KV_ROWS_CAPSULE

    ctypedef struct kv_tiles:
        int64_t page_tokens, head_dim, row_bytes

    ctypedef struct kv_rows:
        int64_t (*row_bytes)(const kv_rows *, int64_t dim) noexcept nogil
        int64_t (*first_unfit)(const kv_rows *, const float *values, int64_t n) noexcept nogil
        void (*write)(
            const kv_rows *, const kv_tiles *, unsigned char *at, int64_t token, const float *k,
            const float *v,
        ) noexcept nogil
        void (*read)(
            const kv_rows *, const kv_tiles *, const unsigned char *at, int64_t token, float *k,
            float *v,
        ) noexcept nogil
        void (*fill)(
            const kv_rows *, const kv_tiles *, unsigned char *at, int64_t token, int byte
        ) noexcept nogil
        int64_t (*key_offset)(const kv_tiles *, int64_t token, int64_t element) noexcept nogil

    int64_t kv_key_row(const kv_tiles *, int64_t token)
    int64_t kv_value_row(const kv_tiles *, int64_t token)


# The rows of one head in one page, K and V: `pair_bytes`.
ctypedef struct Layout:
    const kv_rows *rows
    kv_tiles tiles
    int64_t pair_bytes


cdef void *from_capsule(object capsule, str what, const char *name) except NULL


cdef class RowLayout:
    """A format's rows of a head in a page of so many tokens."""

    cdef Layout c
    cdef object _rows  # keeps the capsule

    cdef int check(self, object format, int64_t dim) except -1


cdef inline void write_pair(
    const Layout *layout, unsigned char *tiles, int64_t row, const float *k, const float *v
) noexcept nogil:
    """K and V row of the head whose tiles begin at ``tiles``."""
    layout.rows.write(layout.rows, &layout.tiles, tiles, row, k, v)


cdef inline void read_pair(
    const Layout *layout, float *k, float *v, const unsigned char *tiles, int64_t row
) noexcept nogil:
    """The head's K and V row as FP32."""
    layout.rows.read(layout.rows, &layout.tiles, tiles, row, k, v)


cdef inline void fill_pair(
    const Layout *layout, unsigned char *tiles, int64_t row, int byte
) noexcept nogil:
    """One byte into all of the head's K and V row and their padding; 0xFF is NaN in every format."""
    if layout.rows.fill:
        layout.rows.fill(layout.rows, &layout.tiles, tiles, row, byte)
        return
    memset(tiles + kv_key_row(&layout.tiles, row), byte, layout.tiles.row_bytes)
    memset(tiles + kv_value_row(&layout.tiles, row), byte, layout.tiles.row_bytes)


cdef inline void fill_transposed(
    const kv_tiles *tiles, unsigned char *at, int64_t token, int byte, int64_t element
) noexcept nogil:
    """`fill_pair` where K lies [head_dim][token], in elements of so many bytes."""
    cdef int64_t i
    for i in range(tiles.row_bytes // element):
        memset(at + (i * tiles.page_tokens + token) * element, byte, element)
    memset(at + kv_value_row(tiles, token), byte, tiles.row_bytes)
