"""Rows in and out of pages: where a row lies in its page. How it is stored, its format knows."""

from libc.stdint cimport int64_t
from libc.string cimport memset


cdef extern from "kv_rows.h":
    const char *KV_ROWS_CAPSULE

    ctypedef struct kv_rows:
        int64_t element_bytes
        int64_t (*row_bytes)(int64_t dim) noexcept nogil
        int64_t (*first_unfit)(const float *values, int64_t n) noexcept nogil
        void (*write)(
            unsigned char *at, int64_t step, const float *row, int64_t dim
        ) noexcept nogil
        void (*read)(
            float *row, const unsigned char *at, int64_t step, int64_t dim
        ) noexcept nogil


# The rows of one head in one page: a K tile, then a V tile of as many bytes. V rows lie one after the
# other, and so do those of K; `transposed`, K lies [head_dim][token].
ctypedef struct Layout:
    const kv_rows *rows
    bint transposed
    int64_t tokens, dim
    int64_t row_bytes, tile_bytes


cdef void *from_capsule(object capsule, str what, const char *name) except NULL


cdef class RowLayout:
    """A format's rows of a head in a page of so many tokens."""

    cdef Layout c
    cdef object _rows  # keeps the capsule

    cdef int check(self, object format, int64_t dim) except -1


cdef inline int64_t key_offset(const Layout *layout, int64_t row) noexcept nogil:
    """Bytes from the beginning of a K tile to the first element of a row."""
    return row * (layout.rows.element_bytes if layout.transposed else layout.row_bytes)


cdef inline int64_t key_step(const Layout *layout) noexcept nogil:
    """Bytes from one element of a K row to the next."""
    return (layout.tokens if layout.transposed else 1) * layout.rows.element_bytes


cdef inline void write_pair(
    const Layout *layout, unsigned char *tiles, int64_t row, const float *k, const float *v
) noexcept nogil:
    """K and V row of the head whose K tile begins at ``tiles``."""
    layout.rows.write(tiles + key_offset(layout, row), key_step(layout), k, layout.dim)
    layout.rows.write(
        tiles + layout.tile_bytes + row * layout.row_bytes, layout.rows.element_bytes, v, layout.dim
    )


cdef inline void read_pair(
    const Layout *layout, float *k, float *v, const unsigned char *tiles, int64_t row
) noexcept nogil:
    """The head's K and V row as FP32."""
    layout.rows.read(k, tiles + key_offset(layout, row), key_step(layout), layout.dim)
    layout.rows.read(
        v, tiles + layout.tile_bytes + row * layout.row_bytes, layout.rows.element_bytes, layout.dim
    )


cdef inline void fill_pair(
    const Layout *layout, unsigned char *tiles, int64_t row, int byte
) noexcept nogil:
    """One byte into all of the head's K and V row and their padding; 0xFF is NaN in every format."""
    cdef unsigned char *key = tiles + key_offset(layout, row)
    cdef int64_t i, element = layout.rows.element_bytes
    if layout.transposed:
        for i in range(layout.row_bytes // element):
            memset(key + i * key_step(layout), byte, element)
    else:
        memset(key, byte, layout.row_bytes)
    memset(tiles + layout.tile_bytes + row * layout.row_bytes, byte, layout.row_bytes)
