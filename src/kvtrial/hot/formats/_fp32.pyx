"""FP32 rows: head_dim floats as they are, padded to whole vectors of eight."""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from kvtrial.hot._rows cimport KV_ROWS_CAPSULE, kv_rows


cdef int64_t row_bytes(int64_t dim) noexcept nogil:
    return (dim + 7) // 8 * 32


cdef int64_t first_unfit(const float *values, int64_t n) noexcept nogil:
    return -1


cdef void write(
    unsigned char *at, int64_t step, const float *row, int64_t dim
) noexcept nogil:
    cdef int64_t i
    if step == sizeof(float):
        memcpy(at, row, dim * sizeof(float))
        return
    for i in range(dim):
        (<float *>(at + i * step))[0] = row[i]


cdef void read(
    float *row, const unsigned char *at, int64_t step, int64_t dim
) noexcept nogil:
    cdef int64_t i
    if step == sizeof(float):
        memcpy(row, at, dim * sizeof(float))
        return
    for i in range(dim):
        row[i] = (<const float *>(at + i * step))[0]


cdef kv_rows fp32
fp32.element_bytes = sizeof(float)
fp32.row_bytes = row_bytes
fp32.first_unfit = first_unfit
fp32.write = write
fp32.read = read


def rows():
    """The format's ``kv_rows`` in a capsule."""
    return PyCapsule_New(&fp32, KV_ROWS_CAPSULE, NULL)
