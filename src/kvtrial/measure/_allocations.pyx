"""Reads the counters of native/alloc_count.c where it was loaded before the C library."""

from libc.stdint cimport int64_t, uint64_t


cdef extern from *:
    """
    #include <dlfcn.h>
    #include <stdlib.h>
    #ifndef RTLD_DEFAULT
    #define RTLD_DEFAULT ((void *)0)
    #endif
    static void *find_symbol(const char *name) { return dlsym(RTLD_DEFAULT, name); }

    /* volatile: the compiler may drop an allocation that nobody sees. */
    static void malloc_and_free(size_t size)
    {
        void *volatile block = malloc(size);
        free(block);
    }
    """
    void *find_symbol(const char *name) nogil
    void malloc_and_free(size_t size) noexcept nogil

ctypedef uint64_t (*reader_t)() noexcept nogil

cdef reader_t read_here = <reader_t> find_symbol("kvtrial_allocations_here")
cdef reader_t read_everywhere = <reader_t> find_symbol("kvtrial_allocations_everywhere")


def preloaded():
    """Whether this process counts."""
    return read_here != NULL


def count_calls(function, tuple args, bint every_thread):
    """Allocation calls during ``function(*args)``; -1 where nothing counts.

    Between the two readings nothing but the call itself runs.
    """
    cdef uint64_t before, after
    cdef reader_t reader = read_everywhere if every_thread else read_here
    if reader == NULL:
        return -1
    before = reader()
    function(*args)
    after = reader()
    return <int64_t> (after - before)


def planted_malloc(size_t size):
    """Call malloc and free once, so that a test sees the counter catch it."""
    with nogil:
        malloc_and_free(size)
