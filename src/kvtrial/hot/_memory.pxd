from libc.stdint cimport int64_t


cdef class Memory:
    cdef unsigned char *data
    cdef readonly int64_t nbytes

    cdef object view(
        self, void *at, int ndim, Py_ssize_t *shape, Py_ssize_t *strides, int kind, bint writable
    )
