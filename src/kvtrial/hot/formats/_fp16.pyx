"""FP16 rows: head_dim halves, rounded to nearest even, padded to whole vectors of eight."""

from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport fabsf, isfinite
from libc.stdint cimport int64_t, uint16_t

from kvtrial.hot._rows cimport KV_ROWS_CAPSULE, kv_rows
from kvtrial.hot._simd cimport kv_from_half, kv_to_half


cdef int64_t row_bytes(int64_t dim) noexcept nogil:
    return (dim + 7) // 8 * 16


cdef int64_t first_unfit(const float *values, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        if isfinite(values[i]) and fabsf(values[i]) >= 65520:
            return i
    return -1


cdef void write(
    unsigned char *at, int64_t step, const float *row, int64_t dim
) noexcept nogil:
    cdef int64_t i
    for i in range(dim):
        (<uint16_t *>(at + i * step))[0] = kv_to_half(row[i])


cdef void read(
    float *row, const unsigned char *at, int64_t step, int64_t dim
) noexcept nogil:
    cdef int64_t i
    for i in range(dim):
        row[i] = kv_from_half((<const uint16_t *>(at + i * step))[0])


cdef kv_rows fp16
fp16.element_bytes = sizeof(uint16_t)
fp16.row_bytes = row_bytes
fp16.first_unfit = first_unfit
fp16.write = write
fp16.read = read


def rows():
    """The format's ``kv_rows`` in a capsule."""
    return PyCapsule_New(&fp16, KV_ROWS_CAPSULE, NULL)
