"""Declarations of the pool and its owners; see _pages.pyx."""

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

from kvtrial.hot._memory cimport Memory
from kvtrial.hot._tables cimport PageTables


ctypedef struct Owner:
    uint32_t generation
    bint open, holes
    int32_t parent  # -1: no branch
    int64_t fork
    uint64_t version, parent_version
    int32_t branches, reservations
    int64_t restoring  # rows, or -1


cdef class PagePool(PageTables):
    cdef Memory _owner_memory
    cdef Owner *owners

    cdef int32_t copy_on_write(self, int64_t s, int64_t l, int64_t index) noexcept
    cdef bint _reserved_only(self, int64_t s, int64_t l) noexcept
    cdef void cancel(self, int64_t s, int64_t l) noexcept
    cdef void cancel_all(self, int64_t s) noexcept
    cdef int at_boundary(self, int64_t s) except -1
    cdef int _in_turn(self, int64_t s, int64_t l, int64_t end) except -1
    cdef bint _takes_page(self, int64_t s, int64_t l, int64_t index) noexcept
    cdef int _room_for(self, int64_t s, int64_t needed) except -1
    cdef int _check_new(self, int64_t s, int64_t l, const int64_t *at, int64_t n) except -1
    cdef int prepare_append(self, int64_t s, int64_t l, const int64_t *at, int64_t n) except -1
    cdef void finish_append(self, int64_t s, int64_t l, int64_t end) noexcept
    cdef int invalidate(self, int64_t s, int64_t l, const int64_t *at, int64_t n) except -1
    cdef int reserve(
        self, int64_t s, int64_t l, const int64_t *at, int64_t n, int64_t *row
    ) except -2
    cdef int commit(self, int64_t s, int64_t l, const int64_t *at, int64_t n) except -1
    cdef int find_valid(self, int64_t s, int64_t l, const int64_t *at, int64_t n) except -1
    cdef int64_t open_owner(self, bint holes) except -1
    cdef int close_owner(self, int64_t s) except -1
    cdef int64_t begin_branch(self, int64_t s) except -1
    cdef int commit_prefix(self, int64_t s, int64_t k) except -1
    cdef void _move_pages(self, int64_t s, int64_t l, int64_t end) noexcept
    cdef void _discard(self, int64_t s) noexcept
    cdef int rollback_tail(self, int64_t s, int64_t n) except -1
    cdef void truncate(self, int64_t s, int64_t end) noexcept
    cdef int begin_restore(self, int64_t s, const unsigned char *valid, int64_t rows) except -1
    cdef int finish_restore(self, int64_t s) except -1
    cdef int cancel_restore(self, int64_t s) except -1
