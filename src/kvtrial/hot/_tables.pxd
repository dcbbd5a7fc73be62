"""Declarations of the page tables; see _tables.pyx."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from kvtrial.hot._memory cimport Memory
from kvtrial.hot._rows cimport Layout


cdef enum:
    SESSIONS = 64  # as the contract has it: sessions and branches that can be open at once

cdef enum SlotState:
    IDLE, OPEN, COMMITTED

# `end` is where the layer's next row goes: past its last appended position, hole or not.
ctypedef struct LayerTable:
    int64_t end, pages
    SlotState slot
    int64_t slot_start, slot_n


cdef inline uint64_t low_bits(int64_t n) noexcept:
    """The n lowest bits; n is clamped to [0, 64]."""
    if n <= 0:
        return 0
    return ~<uint64_t>0 if n >= 64 else ((<uint64_t>1) << n) - 1


cdef class PageTables:
    cdef readonly int64_t pages, page_bytes, layers, tokens, base, table_pages, free
    cdef Layout layout
    cdef bint poison
    cdef Memory memory
    cdef Memory _table_memory, _word_memory, _small
    cdef LayerTable *_layers
    cdef int32_t *_ids
    cdef uint64_t *_words
    cdef int32_t *references
    cdef int32_t *_free

    cdef LayerTable *layer(self, int64_t s, int64_t l) noexcept
    cdef int32_t *ids(self, int64_t s, int64_t l) noexcept
    cdef uint64_t *words(self, int64_t s, int64_t l) noexcept
    cdef unsigned char *page(self, int32_t page_id) noexcept
    cdef int64_t length(self, int64_t s, int64_t l) noexcept
    cdef int64_t visible_length(self, int64_t s, int64_t l) noexcept
    cdef int64_t pages_for(self, int64_t rows) noexcept
    cdef void _fill(self, unsigned char *page, int64_t row, int byte) noexcept
    cdef void poison_rows(self, int32_t page_id, int64_t start, int64_t stop) noexcept
    cdef void copy_valid(self, int32_t page_id, uint64_t valid, unsigned char *into) noexcept
    cdef int32_t take(self) noexcept
    cdef void give_back(self, int32_t page_id) noexcept
    cdef void clear_entry(self, int64_t s, int64_t l, int64_t index) noexcept
    cdef void release_from(self, int64_t s, int64_t l, int64_t index) noexcept
    cdef void extend_to(self, int64_t s, int64_t l, int64_t index) noexcept
