"""Memory for pools and tables: mapped once, zero, touched lazily, the same policy for every arm."""

cimport numpy as cnp
from libc.stdint cimport int64_t

from kvtrial.contract import PoolExhausted

cnp.import_array()

cdef extern from *:
    """
    #include <sys/mman.h>

    /* Aligned to 2 MiB, so that huge pages can back all of it. Address space is free: NORESERVE. */
    static unsigned char *kv_map(int64_t nbytes) {
        const uintptr_t huge = (uintptr_t)1 << 21;
    #ifdef MAP_NORESERVE
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    #else
        const int flags = MAP_PRIVATE | MAP_ANON;
    #endif
        unsigned char *at = mmap(0, nbytes + huge, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED) return 0;
        uintptr_t lead = -(uintptr_t)at & (huge - 1);
        if (lead) munmap(at, lead);
        if (huge - lead) munmap(at + lead + nbytes, huge - lead);
    #ifdef MADV_HUGEPAGE
        madvise(at + lead, nbytes, MADV_HUGEPAGE);
    #endif
        return at + lead;
    }
    """
    unsigned char *kv_map(int64_t nbytes) nogil


cdef extern from "<sys/mman.h>":
    int munmap(void *, size_t) nogil


cdef class Memory:
    """``nbytes`` of zeros (rounded up to whole pages). Views hold it, and outlive a closed store."""

    def __cinit__(self, int64_t nbytes):
        self.nbytes = (nbytes + 65535) & ~<int64_t>65535
        self.data = kv_map(self.nbytes)
        if self.data is NULL:
            self.nbytes = 0
            raise PoolExhausted(f"the system refused {nbytes} bytes; lower budget_bytes")

    def __dealloc__(self):
        if self.data is not NULL:
            munmap(self.data, self.nbytes)

    cdef object view(
        self, void *at, int ndim, Py_ssize_t *shape, Py_ssize_t *strides, int kind, bint writable
    ):
        """An array over part of the memory that keeps it alive."""
        cdef int flags = cnp.NPY_ARRAY_WRITEABLE if writable else 0
        array = cnp.PyArray_New(
            cnp.ndarray, ndim, <cnp.npy_intp *>shape, kind, <cnp.npy_intp *>strides, at, 0,
            flags | cnp.NPY_ARRAY_ALIGNED, None,
        )
        cnp.set_array_base(array, self)
        return array
