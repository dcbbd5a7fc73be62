"""FP16 rows: halves, rounded to nearest even, padded to whole vectors of eight; K as rows or transposed."""

from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport fabsf, isfinite
from libc.stdint cimport int64_t, uint16_t

from kvtrial.hot._rows cimport (
    KV_ROWS_CAPSULE,
    fill_transposed,
    kv_key_row,
    kv_rows,
    kv_tiles,
    kv_value_row,
)
from kvtrial.hot._simd cimport kv_from_half, kv_to_half


cdef int64_t row_bytes(const kv_rows *format, int64_t dim) noexcept nogil:
    return (dim + 7) // 8 * 16


cdef int64_t first_unfit(const kv_rows *format, const float *values, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        if isfinite(values[i]) and fabsf(values[i]) >= 65520:
            return i
    return -1


cdef inline void put(
    unsigned char *at, int64_t step, const float *row, int64_t dim
) noexcept nogil:
    """A row into halves that are ``step`` elements apart."""
    cdef int64_t i
    for i in range(dim):
        (<uint16_t *>at)[i * step] = kv_to_half(row[i])


cdef inline void take(
    float *row, const unsigned char *at, int64_t step, int64_t dim
) noexcept nogil:
    cdef int64_t i
    for i in range(dim):
        row[i] = kv_from_half((<const uint16_t *>at)[i * step])


cdef void write(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, const float *k,
    const float *v,
) noexcept nogil:
    put(at + kv_key_row(tiles, token), 1, k, tiles.head_dim)
    put(at + kv_value_row(tiles, token), 1, v, tiles.head_dim)


cdef void read(
    const kv_rows *format, const kv_tiles *tiles, const unsigned char *at, int64_t token, float *k,
    float *v,
) noexcept nogil:
    take(k, at + kv_key_row(tiles, token), 1, tiles.head_dim)
    take(v, at + kv_value_row(tiles, token), 1, tiles.head_dim)


cdef void write_transposed(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, const float *k,
    const float *v,
) noexcept nogil:
    put(at + token * sizeof(uint16_t), tiles.page_tokens, k, tiles.head_dim)
    put(at + kv_value_row(tiles, token), 1, v, tiles.head_dim)


cdef void read_transposed(
    const kv_rows *format, const kv_tiles *tiles, const unsigned char *at, int64_t token, float *k,
    float *v,
) noexcept nogil:
    take(k, at + token * sizeof(uint16_t), tiles.page_tokens, tiles.head_dim)
    take(v, at + kv_value_row(tiles, token), 1, tiles.head_dim)


cdef void fill(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, int byte
) noexcept nogil:
    fill_transposed(tiles, at, token, byte, sizeof(uint16_t))


cdef kv_rows fp16
fp16.row_bytes = row_bytes
fp16.first_unfit = first_unfit
fp16.write = write
fp16.read = read

cdef kv_rows fp16t = fp16
fp16t.write = write_transposed
fp16t.read = read_transposed
fp16t.fill = fill


def rows():
    """Format to its ``kv_rows`` in a capsule."""
    return {
        "fp16": PyCapsule_New(&fp16, KV_ROWS_CAPSULE, NULL),
        "fp16t": PyCapsule_New(&fp16t, KV_ROWS_CAPSULE, NULL),
    }
