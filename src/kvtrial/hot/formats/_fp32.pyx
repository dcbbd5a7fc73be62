"""FP32 rows: head_dim floats as they are, padded to whole vectors of eight; K as rows or transposed."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from kvtrial.hot._rows cimport (
    KV_ROWS_CAPSULE,
    fill_transposed,
    kv_key_row,
    kv_rows,
    kv_tiles,
    kv_value_row,
)


cdef int64_t row_bytes(const kv_rows *format, int64_t dim) noexcept nogil:
    return (dim + 7) // 8 * 32


cdef int64_t first_unfit(const kv_rows *format, const float *values, int64_t n) noexcept nogil:
    return -1


cdef void write(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, const float *k,
    const float *v,
) noexcept nogil:
    memcpy(at + kv_key_row(tiles, token), k, tiles.head_dim * sizeof(float))
    memcpy(at + kv_value_row(tiles, token), v, tiles.head_dim * sizeof(float))


cdef void read(
    const kv_rows *format, const kv_tiles *tiles, const unsigned char *at, int64_t token, float *k,
    float *v,
) noexcept nogil:
    memcpy(k, at + kv_key_row(tiles, token), tiles.head_dim * sizeof(float))
    memcpy(v, at + kv_value_row(tiles, token), tiles.head_dim * sizeof(float))


cdef int64_t key_offset(const kv_tiles *tiles, int64_t token, int64_t element) noexcept nogil:
    return kv_key_row(tiles, token) + element * <int64_t>sizeof(float)


cdef void write_transposed(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, const float *k,
    const float *v,
) noexcept nogil:
    cdef int64_t i
    for i in range(tiles.head_dim):
        (<float *>at)[i * tiles.page_tokens + token] = k[i]
    memcpy(at + kv_value_row(tiles, token), v, tiles.head_dim * sizeof(float))


cdef void read_transposed(
    const kv_rows *format, const kv_tiles *tiles, const unsigned char *at, int64_t token, float *k,
    float *v,
) noexcept nogil:
    cdef int64_t i
    for i in range(tiles.head_dim):
        k[i] = (<const float *>at)[i * tiles.page_tokens + token]
    memcpy(v, at + kv_value_row(tiles, token), tiles.head_dim * sizeof(float))


cdef void fill(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, int byte
) noexcept nogil:
    fill_transposed(tiles, at, token, byte, sizeof(float))


cdef int64_t key_offset_transposed(
    const kv_tiles *tiles, int64_t token, int64_t element
) noexcept nogil:
    return (element * tiles.page_tokens + token) * <int64_t>sizeof(float)


cdef kv_rows fp32
fp32.row_bytes = row_bytes
fp32.first_unfit = first_unfit
fp32.write = write
fp32.read = read
fp32.key_offset = key_offset

cdef kv_rows fp32t = fp32
fp32t.write = write_transposed
fp32t.read = read_transposed
fp32t.fill = fill
fp32t.key_offset = key_offset_transposed


def rows():
    """Format to its ``kv_rows`` in a capsule."""
    return {
        "fp32": PyCapsule_New(&fp32, KV_ROWS_CAPSULE, NULL),
        "fp32t": PyCapsule_New(&fp32t, KV_ROWS_CAPSULE, NULL),
    }
