"""Page tables over one pool: memory, page ids, validity, reference counts. Integers only.

All memory is mapped when the pool opens; tables are touched as far as they are used. Arguments s and
lay are an owner's slot and a layer, `index` is an entry of a page table. `_pages` builds on this:
who owns a table, and what may be done to it when.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from kvtrial.hot._memory cimport Memory
from kvtrial.hot._rows cimport RowLayout, fill_pair
from kvtrial.hot._simd cimport kv_highest_bit


cdef class PageTables:
    """Invariants: references[p] counts the table entries that point to page p, and p is on the free
    list exactly when it is 0; an entry has page -1 exactly when its word is 0 and nothing in it is
    reserved; no word has a bit at or past its layer's end, but for an open restore."""

    def __cinit__(
        self, int64_t pages, int64_t page_bytes, RowLayout rows, int64_t layers, int64_t base,
        bint poison,
    ):
        cdef int64_t i
        self.pages, self.page_bytes, self.layout = pages, page_bytes, rows.c
        self.layers, self.tokens, self.base, self.poison = layers, rows.c.tiles.page_tokens, base, poison
        self.table_pages = max(pages, 65536 // self.tokens)
        self.memory = Memory(pages * page_bytes)
        self._table_memory = Memory(SESSIONS * layers * self.table_pages * sizeof(int32_t))
        self._word_memory = Memory(SESSIONS * layers * self.table_pages * sizeof(uint64_t))
        self._small = Memory(SESSIONS * layers * sizeof(LayerTable) + 2 * pages * sizeof(int32_t))
        self._ids = <int32_t *>self._table_memory.data
        self._words = <uint64_t *>self._word_memory.data
        self._layers = <LayerTable *>self._small.data
        self.references = <int32_t *>(self._layers + SESSIONS * layers)
        self._free = self.references + pages
        self.free = pages
        # The lowest ids are taken first.
        for i in range(pages):
            self._free[i] = <int32_t>(pages - 1 - i)
        if poison:
            memset(self.memory.data, 0xFF, pages * page_bytes)

    cdef LayerTable *layer(self, int64_t s, int64_t lay) noexcept:
        return self._layers + s * self.layers + lay

    cdef int32_t *ids(self, int64_t s, int64_t lay) noexcept:
        return self._ids + (s * self.layers + lay) * self.table_pages

    cdef uint64_t *words(self, int64_t s, int64_t lay) noexcept:
        return self._words + (s * self.layers + lay) * self.table_pages

    cdef unsigned char *page(self, int32_t page_id) noexcept:
        return self.memory.data + <int64_t>page_id * self.page_bytes

    cdef int64_t pages_for(self, int64_t rows) noexcept:
        return (rows + self.tokens - 1) // self.tokens

    cdef int64_t length(self, int64_t s, int64_t lay) noexcept:
        """Highest valid or reserved slot + 1."""
        cdef LayerTable *layer = self.layer(s, lay)
        if layer.slot == OPEN:
            return layer.slot_start + layer.slot_n
        return self.visible_length(s, lay)

    cdef int64_t visible_length(self, int64_t s, int64_t lay) noexcept:
        """Highest valid slot + 1."""
        cdef int64_t index
        for index in range(self.pages_for(self.layer(s, lay).end) - 1, -1, -1):
            if self.words(s, lay)[index]:
                return index * self.tokens + kv_highest_bit(self.words(s, lay)[index]) + 1
        return 0

    cdef void poison_rows(self, int32_t page_id, int64_t start, int64_t stop) noexcept:
        """NaN, in every format, into rows without content, where the pool was opened so."""
        cdef int64_t row
        if self.poison:
            for row in range(start, stop):
                self._fill(self.page(page_id), row, 0xFF)

    cdef void _fill(self, unsigned char *page, int64_t row, int byte) noexcept:
        cdef int64_t head, head_bytes = self.layout.pair_bytes
        for head in range(self.page_bytes // head_bytes):
            fill_pair(&self.layout, page + head * head_bytes, row, byte)

    cdef void copy_valid(self, int32_t page_id, uint64_t valid, unsigned char *into) noexcept:
        """A copy of a page, with zeros for rows whose bit is 0: what lies there may be another's."""
        cdef int64_t row
        memcpy(into, self.page(page_id), self.page_bytes)
        for row in range(self.tokens):
            if not valid >> row & 1:
                self._fill(into, row, 0)

    cdef int32_t take(self) noexcept:
        """A free page; the caller has made sure that there is one."""
        self.free -= 1
        cdef int32_t page_id = self._free[self.free]
        self.references[page_id] = 1
        return page_id

    cdef void give_back(self, int32_t page_id) noexcept:
        self.references[page_id] -= 1
        if self.references[page_id] == 0:
            self.poison_rows(page_id, 0, self.tokens)
            self._free[self.free] = page_id
            self.free += 1

    cdef void clear_entry(self, int64_t s, int64_t lay, int64_t index) noexcept:
        """Gives an entry's page back and leaves it empty."""
        cdef int32_t *page_id = self.ids(s, lay) + index
        if page_id[0] >= 0:
            self.give_back(page_id[0])
        page_id[0] = -1
        self.words(s, lay)[index] = 0

    cdef void release_from(self, int64_t s, int64_t lay, int64_t index) noexcept:
        """Ends the table before ``index``."""
        cdef int64_t i
        for i in range(index, self.layer(s, lay).pages):
            self.clear_entry(s, lay, i)
        self.layer(s, lay).pages = min(self.layer(s, lay).pages, index)

    cdef void extend_to(self, int64_t s, int64_t lay, int64_t index) noexcept:
        """Makes the table reach ``index``, with empty entries."""
        cdef LayerTable *layer = self.layer(s, lay)
        while layer.pages <= index:
            self.ids(s, lay)[layer.pages] = -1
            self.words(s, lay)[layer.pages] = 0
            layer.pages += 1
