"""Declarations of the doors; see _door.pyx."""

from libc.stdint cimport int64_t


cdef int64_t integer(object value, str name) except? -1
cdef int64_t layer_index(object value, int64_t layers) except -1
cdef float finite_scale(object value) except? -1
cdef object int64_positions(object positions)
cdef int ascending(const int64_t *at, int64_t n) except -1
cdef float *floats(
    object array, str name, int ndim, int64_t n, int64_t heads, int64_t dim, bint writable
) except NULL
cdef object restored_rows(object valid, int64_t layers)
cdef int64_t block_rows(object q) except -1
cdef tuple bounds(object value, str name, int64_t low, int64_t high)
cdef tuple part_of(object spec, int64_t rows, object kv_heads, object positions)
