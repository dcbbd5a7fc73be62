"""Declarations of the books without holes; see _gapless.pyx."""

from libc.stdint cimport int64_t, uint32_t

from kvtrial.hot._memory cimport Memory


cdef class GaplessStore:
    cdef object __weakref__
    cdef readonly object spec
    cdef readonly str page_format
    cdef readonly int64_t row_bytes, page_nbytes
    cdef object _ledger, _reservation
    cdef bint open, poison
    cdef uint32_t generations
    # Room is counted in units of unit_tokens rows of one layer; capacity is a layer's, in tokens.
    cdef int64_t unit_tokens, units_total, units_used, capacity
    cdef int64_t pages  # 0 where there are none
    # The spec's shape as integers of the machine: `heads` and `first_query` are this store's share.
    cdef int64_t layers, q_heads, heads, group, dim, base, first_query

    cdef int check_open(self) except -1
    cdef int check_holes(self, object allowed) except -1
    cdef int64_t units(self, int64_t rows) noexcept
    cdef void divide(self, const float *sums, const float *outputs, float *out) noexcept


cdef class GaplessSession:
    cdef readonly GaplessStore store
    cdef readonly uint32_t generation
    cdef bint open
    cdef Memory _table
    cdef int64_t *ends

    cdef int begin(self, GaplessStore store) except -1
    cdef GaplessStore opened(self)
    cdef int at_boundary(self) except -1
    cdef int in_turn(self, int64_t lay, int64_t end) except -1
    cdef int room_for(self, int64_t lay, int64_t end) except -1
    cdef int check_append(self, int64_t lay, const int64_t *at, int64_t n) except -1
    cdef int check_stored(self, int64_t lay, const int64_t *at, int64_t n) except -1
    cdef void grow(self, int64_t lay, int64_t end) noexcept
    cdef int64_t reach(self, int64_t lay) noexcept
    cdef void cancel(self) noexcept
    cdef void drop(self, int64_t lay, int64_t first, int64_t last) noexcept
    cdef void truncate(self, int64_t end) noexcept
