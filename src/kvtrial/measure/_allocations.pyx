"""Reads the counters of native/alloc_count.c where it was loaded before the C library."""

from libc.stdint cimport int64_t, uint64_t


cdef extern from *:
    """
    #include <dlfcn.h>
    #include <stdlib.h>
    #include <string.h>
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

    /* through a pointer, or the compiler copies in place */
    static void copy_bytes(char *to, const char *from, size_t size)
    {
        void *(*volatile copy)(void *, const void *, size_t) = memcpy;
        copy(to, from, size);
    }
    """
    void *find_symbol(const char *name) nogil
    void malloc_and_free(size_t size) noexcept nogil
    void copy_bytes(char *to, const char *source, size_t size) noexcept nogil

ctypedef uint64_t (*reader_t)() noexcept nogil

cdef reader_t read_here = <reader_t> find_symbol("kvtrial_allocations_here")
cdef reader_t read_everywhere = <reader_t> find_symbol("kvtrial_allocations_everywhere")
cdef reader_t read_copied = <reader_t> find_symbol("kvtrial_copied_bytes_here")


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


def count_copied_bytes(function, tuple args):
    """Bytes that memcpy and memmove moved during ``function(*args)``; -1 where nothing counts."""
    cdef uint64_t before
    if read_copied == NULL:
        return -1
    before = read_copied()
    function(*args)
    return <int64_t> (read_copied() - before)


def planted_copy(size_t size):
    """Copy up to 4096 bytes once, so that a test sees the counter catch it."""
    cdef char[4096] source
    cdef char[4096] to
    with nogil:
        source[0] = 0
        copy_bytes(to, source, min(size, <size_t> 4096))


def planted_malloc(size_t size):
    """Call malloc and free once, so that a test sees the counter catch it."""
    with nogil:
        malloc_and_free(size)
