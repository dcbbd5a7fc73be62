"""The paged store and session of A2, K1, K2, K5, K1T and K2T, and of K4 with a foreign kernel.

`_pages` keeps the books, `_rows` knows the formats and layouts, `_attend` runs a kernel over spans;
this module is the contract's verbs. The interpreter lock is held throughout a verb: one call at a
time uses a store's work space, and threads are those of one attend.
"""

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

from kvtrial.contract import (
    InvalidArgument,
    MemoryLedger,
    NumericRange,
    OutOfRange,
    PageTable,
    PoolExhausted,
    StaleOwner,
    StepIncomplete,
)
from kvtrial.contract.arguments import flag
from kvtrial.hot._attend cimport (
    attend_block,
    attend_spans,
    narrow,
    partial_floats,
    place_partial,
)
from kvtrial.hot._door cimport (
    ascending,
    block_rows,
    finite_scale,
    floats,
    int64_positions,
    integer,
    layer_index,
    restored_rows,
)
from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE, KV_SPAN_SLOTS, kv_span, kv_span_fn
from kvtrial.hot._memory cimport Memory
from kvtrial.hot._pages cimport Owner, PagePool
from kvtrial.hot._rows cimport (
    Layout,
    RowLayout,
    from_capsule,
    kv_value_row,
    kv_tiles,
    read_pair,
    write_pair,
)
from kvtrial.hot._tables cimport SESSIONS, low_bits

cnp.import_array()


cdef class PagedStore:
    """A bounded pool of head-major pages (native/kv_kernel.h has their layout).

    Parameters
    ----------
    spec : StoreSpec
    format : kvtrial.hot.formats.RowFormat
        How rows are stored, and the kernel that reads them.
    debug_poison : bool
        Rows without content are NaN, so that a use of one shows.

    Raises
    ------
    PoolExhausted
        The budget or its ledger has no room for a page.
    """

    cdef readonly object spec
    cdef readonly str page_format
    cdef readonly int64_t row_bytes, page_nbytes
    cdef PagePool pool
    cdef Layout layout
    cdef kv_span_fn kernel
    cdef object _row_layout, _kernel, _ledger, _reservation
    cdef Memory _work
    # The spec's shape as integers of the machine: `heads` and `first_query` are this store's share.
    cdef int64_t q_heads, heads, first_query, group, dim, tokens, base, layers
    cdef int threads

    def __init__(self, spec, *, format, bint debug_poison=False):
        cdef int64_t pages
        cdef RowLayout rows
        self.spec = spec
        self.layers, self.q_heads, self.heads = spec.layers, spec.q_heads, spec.local_kv_heads
        self.group, self.dim, self.tokens = spec.group, spec.head_dim, spec.page_tokens
        self.first_query, self.base = spec.heads[0] * spec.group, spec.base_position
        self.threads = spec.threads
        self._row_layout = rows = RowLayout(format, self.tokens, self.dim)
        self.layout = rows.c
        self.row_bytes = 2 * self.heads * self.layout.tiles.row_bytes
        self.page_nbytes = self.row_bytes * self.tokens
        self.page_format = f"{format.name}/head-major/P{self.tokens}/H{self.heads}/D{self.dim}"
        self._kernel = format.native("kernel")
        self.kernel = <kv_span_fn>from_capsule(
            self._kernel, f"kernel of format {format.name}", KV_KERNEL_CAPSULE
        )
        pages = min(spec.budget_bytes // self.page_nbytes, 2**31 - 1)
        if pages < 1:
            raise PoolExhausted(
                f"budget_bytes is {spec.budget_bytes}, and one page takes {self.page_nbytes}; give "
                "at least that"
            )
        self._ledger = spec.ledger or MemoryLedger(spec.budget_bytes)
        self._reservation = self._ledger.reserve(self.page_format, pages * self.page_nbytes)
        try:
            self.pool = PagePool(
                pages, self.page_nbytes, rows, self.layers, self.base, debug_poison
            )
            # The joined partial, the queries, and a partial for each span of the longest layer.
            self._work = Memory(
                (self.pool.table_pages * self.tokens // KV_SPAN_SLOTS + 4)
                * partial_floats(self.heads * self.group, self.dim) * sizeof(float)
            )
        except PoolExhausted:
            self._ledger.release(self._reservation)
            raise

    cdef PagePool opened(self):
        if self.pool is None:
            raise StaleOwner("the store is closed; open another")
        return self.pool

    cdef kv_span whole(self, int64_t s, int64_t lay, const float *q, float scale) noexcept:
        """All rows and heads of a layer, with the joined partial in the store's work space."""
        cdef kv_span span
        span.pool, span.page_bytes = self.pool.memory.data, self.page_nbytes
        span.page_ids, span.valid = self.pool.ids(s, lay), self.pool.words(s, lay)
        span.first_slot = 0
        # Entries of a reservation or an open restore lie behind the end.
        span.last_slot = min(self.pool.layer(s, lay).end, self.pool.layer(s, lay).pages * self.tokens)
        span.row_bytes, span.page_tokens = self.layout.tiles.row_bytes, <int32_t>self.tokens
        span.head_dim, span.group = <int32_t>self.dim, <int32_t>self.group
        span.kv_heads = span.last_head = <int32_t>self.heads
        span.first_head = 0
        span.scale, span.q = scale, q + self.first_query * self.dim
        place_partial(&span, <float *>self._work.data)
        return span

    cdef int attend_whole(self, const kv_span *span) except -1:
        cdef float *work = <float *>self._work.data
        work += partial_floats(self.heads * self.group, self.dim)
        if attend_spans(span, self.kernel, work, self.threads):
            raise InvalidArgument("the kernel refused the span; see its own documentation")
        return 0

    def open_session(self, position_holes_allowed=False):
        """A new, empty session."""
        return _handle(self, self.opened().open_owner(flag(position_holes_allowed, "position_holes_allowed")))

    def page_table(self, session, layer):
        """Page ids and length of a session's layer."""
        if not isinstance(session, PagedSession) or session.store is not self:
            raise InvalidArgument(f"{session!r} is no session of this store; give one of its own")
        return session.page_table(layer)

    def reference_counts(self):
        """int32 (pages,): page-table entries that point to each page."""
        cdef PagePool pool = self.opened()
        counts = np.empty(pool.pages, np.int32)
        memcpy(cnp.PyArray_DATA(counts), pool.references, pool.pages * sizeof(int32_t))
        return counts

    @property
    def pages_total(self):
        """Pages in the pool."""
        return self.opened().pages

    @property
    def pages_free(self):
        """Pages that no session holds."""
        return self.opened().free

    @property
    def resident_bytes(self):
        """Bytes of pages in use; a shared page counts once."""
        return (self.opened().pages - self.pool.free) * self.page_nbytes

    def close(self):
        """Give the pool and its reservation back; sessions become stale.

        The memory itself goes when the last view into it does.
        """
        self.opened()
        self.pool = None
        self._ledger.release(self._reservation)

    def _force_generation(self, uint32_t generation):
        """For tests: what every session slot that is free is opened with next."""
        cdef int64_t s
        for s in range(SESSIONS):
            if not self.pool.owners[s].open:
                self.pool.owners[s].generation = generation


cdef PagedSession _handle(PagedStore store, int64_t s):
    cdef PagedSession session = PagedSession.__new__(PagedSession)
    session.store, session.slot = store, s
    session.generation = store.pool.owners[s].generation
    session.position_holes_allowed = store.pool.owners[s].holes
    return session


cdef class PagedSession:
    """One sequence of a `PagedStore`; the verbs are described in `kvtrial.contract`."""

    cdef readonly PagedStore store
    cdef readonly uint32_t generation
    cdef readonly bint position_holes_allowed
    cdef int64_t slot

    def __init__(self):
        raise TypeError("a session comes from open_session() or begin_branch() of its store")

    cdef PagePool pool(self):
        """The pool, if this handle still owns its slot."""
        cdef PagePool pool = self.store.opened()
        cdef Owner *owner = pool.owners + self.slot
        if not owner.open or owner.generation != self.generation:
            raise StaleOwner(
                f"the session (generation {self.generation}) is closed, its slot is at generation "
                f"{owner.generation}; open another"
            )
        return pool

    cdef PagePool settled(self):
        """The pool, if no restore is open either."""
        cdef PagePool pool = self.pool()
        if pool.owners[self.slot].restoring >= 0:
            raise StepIncomplete("a restore is open; finish_restore or cancel_restore first")
        return pool

    # Rows -----------------------------------------------------------------------------------------

    def append(self, layer, positions, k, v):
        """Store rows k, v (n, H_kv, D) at ascending positions (n,)."""
        cdef PagedStore store = self.store
        cdef PagePool pool = self.settled()
        cdef int64_t lay = layer_index(layer, store.layers)
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), i, h, slot, unfit
        cdef int64_t row = store.heads * store.dim
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef float *k_rows = floats(k, "k", 3, n, store.heads, store.dim, False)
        cdef float *v_rows = floats(v, "v", 3, n, store.heads, store.dim, False)
        cdef unsigned char *page
        ascending(at, n)
        if n == 0:
            return
        for name, values in (("k", <size_t>k_rows), ("v", <size_t>v_rows)):
            unfit = store.layout.rows.first_unfit(
                store.layout.rows, <const float *><size_t>values, n * row
            )
            if unfit >= 0:
                raise NumericRange(
                    f"{name} has {(<const float *><size_t>values)[unfit]} at position "
                    f"{at[unfit // row]}, which {store.page_format} can't hold; scale it, or use fp32"
                )
        pool.prepare_append(self.slot, lay, at, n)
        for i in range(n):
            slot = at[i] - store.base
            page = pool.page(pool.copy_on_write(self.slot, lay, slot // store.tokens))
            for h in range(store.heads):
                write_pair(
                    &store.layout, page, slot % store.tokens,
                    k_rows + i * row + h * store.dim, v_rows + i * row + h * store.dim,
                )
                page += store.layout.pair_bytes
            pool.words(self.slot, lay)[slot // store.tokens] |= (
                (<uint64_t>1) << (slot % store.tokens)
            )
        pool.finish_append(self.slot, lay, at[n - 1] - store.base + 1)

    def invalidate(self, layer, positions):
        """Make holes of stored positions."""
        cdef PagePool pool = self.settled()
        cdef int64_t lay = layer_index(layer, self.store.layers)
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        ascending(<const int64_t *>cnp.PyArray_DATA(where), n)
        pool.invalidate(self.slot, lay, <const int64_t *>cnp.PyArray_DATA(where), n)

    def reserve_slot(self, layer, positions):
        """Writable K and V views (n, H_kv, D) inside the page, or None."""
        cdef PagedStore store = self.store
        cdef PagePool pool = self.settled()
        cdef int64_t lay = layer_index(layer, store.layers)
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), row = 0
        cdef int page_id
        cdef const kv_tiles *tiles = &store.layout.tiles
        cdef unsigned char *k
        cdef unsigned char *v
        cdef Py_ssize_t[3] shape
        cdef Py_ssize_t[3] k_strides
        cdef Py_ssize_t[3] v_strides
        if not store.layout.rows.key_offset:
            return None
        page_id = pool.reserve(
            self.slot, lay, <const int64_t *>cnp.PyArray_DATA(where), n, &row
        )
        if page_id < 0:
            return None
        k = pool.page(page_id) + store.layout.rows.key_offset(tiles, row, 0)
        v = pool.page(page_id) + kv_value_row(tiles, row)
        shape[0], shape[1], shape[2] = n, store.heads, store.dim
        k_strides[0] = store.layout.rows.key_offset(tiles, 1, 0)
        k_strides[2] = store.layout.rows.key_offset(tiles, 0, 1)
        v_strides[0], v_strides[2] = tiles.row_bytes, sizeof(float)
        k_strides[1] = v_strides[1] = store.layout.pair_bytes
        return (
            pool.memory.view(k, 3, shape, k_strides, cnp.NPY_FLOAT32, True),
            pool.memory.view(v, 3, shape, v_strides, cnp.NPY_FLOAT32, True),
        )

    def commit_slot(self, layer, positions):
        """Make the reserved rows valid."""
        cdef PagePool pool = self.settled()
        cdef int64_t lay = layer_index(layer, self.store.layers)
        where = int64_positions(positions)
        pool.commit(
            self.slot, lay, <const int64_t *>cnp.PyArray_DATA(where), cnp.PyArray_DIM(where, 0)
        )

    def read(self, layer, positions):
        """Copies of valid rows as float32 (n, H_kv, D)."""
        cdef PagedStore store = self.store
        cdef PagePool pool = self.pool()
        cdef int64_t lay = layer_index(layer, store.layers)
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), i, slot, out = 0
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef const unsigned char *page
        pool.find_valid(self.slot, lay, at, n)
        k = np.empty((n, store.heads, store.dim), np.float32)
        v = np.empty((n, store.heads, store.dim), np.float32)
        cdef float *k_rows = <float *>cnp.PyArray_DATA(k)
        cdef float *v_rows = <float *>cnp.PyArray_DATA(v)
        for i in range(n):
            slot = at[i] - store.base
            page = pool.page(pool.ids(self.slot, lay)[slot // store.tokens])
            for _ in range(store.heads):
                read_pair(&store.layout, k_rows + out, v_rows + out, page, slot % store.tokens)
                page += store.layout.pair_bytes
                out += store.dim
        return k, v

    # Attention ------------------------------------------------------------------------------------

    def attend(self, layer, q, out, scale):
        """Attention of q (H_q, D) over the layer's valid rows, into out (H_q, D)."""
        cdef PagedStore store = self.store
        self.pool()
        cdef int64_t lay = layer_index(layer, store.layers), h, d
        cdef float *queries = floats(q, "q", 2, 0, store.q_heads, store.dim, False)
        cdef float *rows = floats(out, "out", 2, 0, store.q_heads, store.dim, True)
        cdef kv_span span = store.whole(self.slot, lay, queries, finite_scale(scale))
        cdef float total
        store.attend_whole(&span)
        rows += store.first_query * store.dim
        for h in range(store.heads * store.group):
            total = span.sum[h]
            for d in range(store.dim):
                rows[h * store.dim + d] = (
                    span.output[h * store.dim + d] / total if total != 0 else 0
                )

    def attend_partial(self, layer, q, scale, *, kv_heads=None, positions=None):
        """Attention over KV heads [start, stop) and positions [start, stop), for `merge`.

        KV heads are the model's and must be the store's own; positions may reach past the length.
        """
        cdef PagedStore store = self.store
        self.pool()
        cdef int64_t lay = layer_index(layer, store.layers)
        cdef float *queries = floats(q, "q", 2, 0, store.q_heads, store.dim, False)
        cdef kv_span span = store.whole(self.slot, lay, queries, finite_scale(scale))
        part = narrow(&span, store.spec, kv_heads, positions)
        store.attend_whole(&span)
        return part

    def attend_block(self, layer, q, out, scale):
        """Causal attention of q (n, H_q, D), the newest n positions, into out."""
        cdef PagedStore store = self.store
        cdef PagePool pool = self.pool()
        cdef int64_t lay = layer_index(layer, store.layers), n = block_rows(q)
        cdef float *queries = floats(q, "q", 3, n, store.q_heads, store.dim, False)
        cdef float *rows = floats(out, "out", 3, n, store.q_heads, store.dim, True)
        cdef kv_span span = store.whole(self.slot, lay, queries, finite_scale(scale))
        span.last_slot = pool.visible_length(self.slot, lay)
        if n > span.last_slot:
            raise OutOfRange(f"q has {n} rows; layer {lay} has {span.last_slot} positions")
        if n:
            attend_block(
                &span, &store.layout, n, store.q_heads * store.dim,
                rows + store.first_query * store.dim, store.threads,
            )

    # What it shows --------------------------------------------------------------------------------

    def length(self, layer):
        """Highest valid or reserved position + 1."""
        cdef PagePool pool = self.pool()
        return self.store.base + pool.length(self.slot, layer_index(layer, self.store.layers))

    def valid(self, layer):
        """bool (length - base_position,): True where a row is valid."""
        cdef PagePool pool = self.pool()
        cdef int64_t lay = layer_index(layer, self.store.layers), i, tokens = self.store.tokens
        bits = np.zeros(pool.length(self.slot, lay), np.bool_)
        cdef unsigned char *at = <unsigned char *>cnp.PyArray_DATA(bits)
        for i in range(cnp.PyArray_DIM(bits, 0)):
            at[i] = pool.words(self.slot, lay)[i // tokens] >> (i % tokens) & 1
        return bits

    def page_table(self, layer):
        """The layer's page ids, int32, from base_position on, and its length."""
        cdef PagePool pool = self.pool()
        cdef int64_t lay = layer_index(layer, self.store.layers)
        cdef int64_t length = pool.length(self.slot, lay), n = pool.pages_for(length)
        ids = np.empty(n, np.int32)
        memcpy(cnp.PyArray_DATA(ids), pool.ids(self.slot, lay), n * sizeof(int32_t))
        return PageTable(ids, self.store.base + length)

    # Branches and the ways back -------------------------------------------------------------------

    def begin_branch(self):
        """A copy-on-write child at the current length."""
        return _handle(self.store, self.settled().begin_branch(self.slot))

    def commit_prefix(self, k):
        """Move the first k positions since the branch began into the parent; close the branch."""
        self.settled().commit_prefix(self.slot, integer(k, "k"))

    def rollback_tail(self, n):
        """Drop the last n positions."""
        self.settled().rollback_tail(self.slot, integer(n, "n"))

    def abandon_step(self):
        """Drop the rows of a step that not every layer has finished."""
        cdef PagePool pool = self.settled()
        # No layer is ahead of the one before it.
        pool.truncate(self.slot, pool.layer(self.slot, self.store.layers - 1).end)

    def close(self):
        """Give every page back, those of an open restore too; any later verb is `StaleOwner`."""
        cdef PagePool pool = self.pool()
        pool.close_owner(self.slot)

    # Spill and restore ----------------------------------------------------------------------------

    cdef object _page_view(self, int32_t page_id, bint writable):
        cdef Py_ssize_t size = self.store.page_nbytes
        cdef PagePool pool = self.store.pool
        if page_id < 0:
            return None
        return memoryview(
            pool.memory.view(pool.page(page_id), 1, &size, NULL, cnp.NPY_UINT8, writable)
        )

    def page_bytes(self, layer, index):
        """Page `index` of the layer, read-only; None for a page of holes."""
        cdef PagePool pool = self.settled()
        cdef int64_t lay = layer_index(layer, self.store.layers), i = integer(index, "index")
        cdef int64_t n = pool.pages_for(pool.length(self.slot, lay))
        pool.at_boundary(self.slot)
        if not 0 <= i < n:
            raise OutOfRange(f"page index is {i}; allowed: 0 to {n - 1}")
        # A page that a reservation alone holds has nothing to show.
        cdef uint64_t valid = pool.words(self.slot, lay)[i]
        if not valid:
            return None
        if valid == low_bits(pool.tokens):
            return self._page_view(pool.ids(self.slot, lay)[i], False)
        copy = np.empty(self.store.page_nbytes, np.uint8)
        pool.copy_valid(
            pool.ids(self.slot, lay)[i], valid, <unsigned char *>cnp.PyArray_DATA(copy)
        )
        return memoryview(copy).toreadonly()

    def begin_restore(self, valid):
        """Take pages for the rows marked in valid (L, rows); writable views of each, by layer."""
        cdef PagePool pool = self.pool()
        cdef int64_t lay, i, rows
        bits = restored_rows(valid, self.store.layers)
        rows = bits.shape[1]
        pool.begin_restore(self.slot, <const unsigned char *>cnp.PyArray_DATA(bits), rows)
        return [
            [
                self._page_view(pool.ids(self.slot, lay)[i], True)
                for i in range(pool.pages_for(rows))
            ]
            for lay in range(self.store.layers)
        ]

    def finish_restore(self):
        """Make the restored rows valid."""
        self.pool().finish_restore(self.slot)

    def cancel_restore(self):
        """Give the pages of an unfinished restore back."""
        self.pool().cancel_restore(self.slot)
