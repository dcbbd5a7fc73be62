"""C0's store and session: pages as RocksDB values keyed by (session, layer, KV head, page).

A value is one head's page as K1 lays it out: K tile, then V tile. An attend looks the pages of its
layer up, copies them into the store's work space, and runs K1's kernel over that; an append reads
the last page back, writes its rows and puts the page again. The database lies in a temporary folder
of its own, without a log or compression: nothing of a hot store outlives its process, and rows are
noise to a compressor.

Gaps: no holes, branches, slots, page table or spill, and every lookup allocates, since the binding
gives each value as a new `bytes`.

Decided where the contract is silent: what a rollback drops stays in its value until the next append
there; books alone say what is a row.
"""

cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import shutil
import struct
import tempfile
import weakref

import numpy as np
import rocksdict

from kvtrial.contract import InvalidArgument, KVError, OutOfRange, PoolExhausted
from kvtrial.hot.formats.fp32 import FP32

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
    layer_index,
)
from kvtrial.hot._gapless cimport GaplessSession, GaplessStore
from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE, KV_SPAN_SLOTS, kv_span, kv_span_fn
from kvtrial.hot._memory cimport Memory
from kvtrial.hot._rows cimport Layout, RowLayout, fill_pair, read_pair, write_pair

cnp.import_array()

#: Session, layer, KV head, page; big-endian, so that the pages of a head are neighbours.
_KEY = struct.Struct(">IHHI")


def _open_database(str folder):
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_allow_mmap_reads(True)
    database = rocksdict.Rdict(folder, options)
    without_log = rocksdict.WriteOptions()
    without_log.disable_wal = True
    database.set_write_options(without_log)
    return database


def _discard(database, str folder):
    database.close()
    shutil.rmtree(folder, ignore_errors=True)


cdef class RocksStore(GaplessStore):
    """RocksDB below K1's kernel.

    Parameters
    ----------
    spec : StoreSpec
    debug_poison : bool
        Rows without content are NaN, so that a use of one shows.

    Raises
    ------
    PoolExhausted
        The budget or its ledger has no room for a page in each layer.
    """

    cdef object _database, _discard, _row_layout, _kernel
    cdef kv_span_fn kernel
    cdef Memory _pages, _tables
    cdef int32_t *_ids
    cdef uint64_t *_words
    cdef float *_partials
    cdef Layout layout
    cdef int64_t tokens, value_bytes

    def __init__(self, spec, *, bint debug_poison=False):
        cdef int64_t page, pages, spans, partial
        cdef RowLayout rows
        self.tokens = spec.page_tokens
        self._row_layout = rows = RowLayout(FP32, self.tokens, spec.head_dim)
        self.layout = rows.c
        GaplessStore.__init__(
            self, spec,
            f"fp32/rocksdb/P{spec.page_tokens}/H{spec.local_kv_heads}/D{spec.head_dim}",
            self.layout.tiles.row_bytes, self.tokens, debug_poison,
        )
        self._kernel = FP32.kernel()
        self.kernel = <kv_span_fn>PyCapsule_GetPointer(self._kernel, KV_KERNEL_CAPSULE)
        self.value_bytes = self.layout.pair_bytes
        self.page_nbytes, self.pages = self.heads * self.value_bytes, self.units_total
        pages = self.units(self.capacity)
        # The joined partial, the queries, and a partial for each span of a full layer.
        spans = self.capacity // KV_SPAN_SLOTS + 4
        partial = partial_floats(self.heads * self.group, self.dim) * sizeof(float)
        try:
            self._pages = Memory(pages * self.page_nbytes)
            self._tables = Memory(pages * 16 + spans * partial)
        except PoolExhausted:
            self.close()
            raise
        # The work space holds one layer, page after page; the span's end says which rows there are.
        self._partials = <float *>self._tables.data
        self._words = <uint64_t *>(self._tables.data + spans * partial)
        self._ids = <int32_t *>(self._words + pages)
        for page in range(pages):
            self._words[page] = ~<uint64_t>0 >> (64 - self.tokens)
            self._ids[page] = <int32_t>page

    def open_session(self, position_holes_allowed=False):
        """A new, empty session."""
        cdef RocksSession session
        self.check_holes(position_holes_allowed)
        session = RocksSession.__new__(RocksSession)
        session.begin(self)
        return session

    def close(self):
        """Remove the database and release the reservation; sessions become stale."""
        GaplessStore.close(self)
        if self._discard is not None:
            self._discard()

    cdef object database(self):
        """The database, opened for the first row. Its folder goes with the store, closed or not."""
        if self._database is None:
            folder = tempfile.mkdtemp(prefix="kvtrial-C0-")
            try:
                self._database = _open_database(folder)
            except Exception as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise KVError(f"RocksDB can't be opened in {folder}: {error}; set TMPDIR") from error
            self._discard = weakref.finalize(self, _discard, self._database, folder)
        return self._database

    # Pages in the work space ------------------------------------------------------------------------

    cdef unsigned char *page_of(self, int64_t slot) noexcept:
        return self._pages.data + slot // self.tokens * self.page_nbytes

    cdef void blank(self, int64_t first, int64_t last) noexcept:
        """Pages [first, last) without a row."""
        memset(
            self._pages.data + first * self.page_nbytes, 0xFF if self.poison else 0,
            (last - first) * self.page_nbytes,
        )

    cdef int look_up(
        self, uint32_t session, int64_t lay, int64_t first, int64_t last, int64_t end
    ) except -1:
        """Copies pages [first, last) of a layer into place; rows from ``end`` on mean nothing."""
        cdef int64_t head, slot, page
        cdef unsigned char *at = self._pages.data + first * self.page_nbytes
        keys = [
            _KEY.pack(session, lay, head, page)
            for page in range(first, last)
            for head in range(self.heads)
        ]
        for key, value in zip(keys, self.database().get(keys) if keys else ()):
            if not isinstance(value, bytes) or PyBytes_GET_SIZE(value) != self.value_bytes:
                raise KVError(f"RocksDB gave {value!r:.40} for page {key.hex()}; close the store")
            memcpy(at, PyBytes_AS_STRING(value), self.value_bytes)
            at += self.value_bytes
        if self.poison:
            for slot in range(max(end, first * self.tokens), last * self.tokens):
                at = self.page_of(slot)
                for head in range(self.heads):
                    fill_pair(&self.layout, at + head * self.value_bytes, slot % self.tokens, 0xFF)
        return 0

    cdef int put(self, uint32_t session, int64_t lay, int64_t first, int64_t last) except -1:
        """Writes pages [first, last) of the work space as a layer's, all or none."""
        cdef int64_t head, page
        cdef unsigned char *at = self._pages.data + first * self.page_nbytes
        database, batch = self.database(), rocksdict.WriteBatch(raw_mode=True)
        for page in range(first, last):
            for head in range(self.heads):
                batch.put(
                    _KEY.pack(session, lay, head, page),
                    PyBytes_FromStringAndSize(<char *>at, self.value_bytes),
                )
                at += self.value_bytes
        try:
            database.write(batch)
        except Exception as error:
            raise KVError(f"RocksDB did not take an append: {error}; close the store") from error
        return 0


cdef class RocksSession(GaplessSession):
    """One sequence of a `RocksStore`; the verbs are described in `kvtrial.contract`."""

    def close(self):
        """Give every page back; any later verb is `StaleOwner`."""
        GaplessSession.close(self)
        cdef RocksStore store = <RocksStore>self.store
        if store._database is not None:
            store._database.delete_range(
                _KEY.pack(self.generation, 0, 0, 0), _KEY.pack(self.generation, 0xFFFF, 0xFFFF, 0)
            )

    # Rows -----------------------------------------------------------------------------------------

    def append(self, layer, positions, k, v):
        """Store rows k, v (n, H_kv, D) at the positions (n,) from the length on."""
        cdef RocksStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), i, first, kept, last
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), end = self.ends[lay]
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef float *k_rows = floats(k, "k", 3, n, store.heads, store.dim, False)
        cdef float *v_rows = floats(v, "v", 3, n, store.heads, store.dim, False)
        cdef unsigned char *page
        ascending(at, n)
        if n == 0:
            return
        self.check_append(lay, at, n)
        first, kept, last = end // store.tokens, store.units(end), store.units(end + n)
        store.look_up(self.generation, lay, first, kept, end)
        store.blank(kept, last)
        for i in range(n):
            page = store.page_of(end + i)
            for _ in range(store.heads):
                write_pair(&store.layout, page, (end + i) % store.tokens, k_rows, v_rows)
                page += store.value_bytes
                k_rows += store.dim
                v_rows += store.dim
        store.put(self.generation, lay, first, last)
        self.grow(lay, end + n)

    def reserve_slot(self, layer, positions):
        """None: a value in a database has no address."""
        self.opened()
        layer_index(layer, self.store.layers)
        return None

    def commit_slot(self, layer, positions):
        """`Unsupported`."""
        self._lacking("reservations")

    def read(self, layer, positions):
        """Copies of valid rows as float32 (n, H_kv, D)."""
        cdef RocksStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), i, out = 0
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), end = self.ends[lay]
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef unsigned char *page
        self.check_stored(lay, at, n)
        k = np.empty((n, store.heads, store.dim), np.float32)
        v = np.empty((n, store.heads, store.dim), np.float32)
        cdef float *k_rows = <float *>cnp.PyArray_DATA(k)
        cdef float *v_rows = <float *>cnp.PyArray_DATA(v)
        if n:
            store.look_up(self.generation, lay, 0, store.units(end), end)
        for i in range(n):
            page = store.page_of(at[i] - store.base)
            for _ in range(store.heads):
                read_pair(
                    &store.layout, k_rows + out, v_rows + out, page,
                    (at[i] - store.base) % store.tokens,
                )
                page += store.value_bytes
                out += store.dim
        return k, v

    # Attention ------------------------------------------------------------------------------------

    cdef kv_span whole(self, int64_t lay, const float *q, float scale) noexcept:
        """All rows and heads of a layer, with the joined partial in the store's work space."""
        cdef kv_span span
        cdef RocksStore store = <RocksStore>self.store
        span.pool, span.page_bytes = store._pages.data, store.page_nbytes
        span.page_ids, span.valid = store._ids, store._words
        span.first_slot, span.last_slot = 0, self.ends[lay]
        span.row_bytes, span.page_tokens = store.layout.tiles.row_bytes, <int32_t>store.tokens
        span.head_dim, span.group = <int32_t>store.dim, <int32_t>store.group
        span.kv_heads = span.last_head = <int32_t>store.heads
        span.first_head = 0
        span.scale, span.q = scale, q + store.first_query * store.dim
        place_partial(&span, store._partials)
        return span

    cdef int run(self, int64_t lay, const kv_span *span) except -1:
        """Looks the span's pages up and attends to them."""
        cdef RocksStore store = <RocksStore>self.store
        cdef float *work = store._partials
        work += partial_floats(store.heads * store.group, store.dim)
        store.look_up(
            self.generation, lay, span.first_slot // store.tokens, store.units(span.last_slot),
            self.ends[lay],
        )
        if attend_spans(span, store.kernel, work, 1):
            raise InvalidArgument("the kernel refused the span; see native/kv_kernel.h")
        return 0

    def attend(self, layer, q, out, scale):
        """Attention of q (H_q, D) over the layer's rows, into out (H_q, D)."""
        cdef RocksStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers)
        cdef float *queries = floats(q, "q", 2, 0, store.q_heads, store.dim, False)
        cdef float *rows = floats(out, "out", 2, 0, store.q_heads, store.dim, True)
        cdef kv_span span = self.whole(lay, queries, finite_scale(scale))
        self.run(lay, &span)
        store.divide(span.sum, span.output, rows)

    def attend_partial(self, layer, q, scale, *, kv_heads=None, positions=None):
        """Attention over KV heads [start, stop) and positions [start, stop), for `merge`."""
        cdef RocksStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers)
        cdef float *queries = floats(q, "q", 2, 0, store.q_heads, store.dim, False)
        cdef kv_span span = self.whole(lay, queries, finite_scale(scale))
        part = narrow(&span, store.spec, kv_heads, positions)
        self.run(lay, &span)
        return part

    def attend_block(self, layer, q, out, scale):
        """Causal attention of q (n, H_q, D), the newest n positions, into out."""
        cdef RocksStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), n = block_rows(q)
        cdef float *queries = floats(q, "q", 3, n, store.q_heads, store.dim, False)
        cdef float *rows = floats(out, "out", 3, n, store.q_heads, store.dim, True)
        cdef kv_span span = self.whole(lay, queries, finite_scale(scale))
        if n > span.last_slot:
            raise OutOfRange(f"q has {n} rows; layer {lay} has {span.last_slot} positions")
        if n:
            store.look_up(
                self.generation, lay, 0, store.units(span.last_slot), span.last_slot
            )
            attend_block(
                &span, &store.layout, n, store.q_heads * store.dim,
                rows + store.first_query * store.dim, 1,
            )
