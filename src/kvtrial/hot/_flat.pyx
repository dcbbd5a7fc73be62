"""The flat store and session of K0 and A1: K and V as `[position][kv_head][head_dim]` per layer.

A session is one buffer of the store's capacity, mapped when it opens and touched as it grows. The
budget is shared: the rows that all sessions hold never exceed it.

Decided where the contract is silent: an open reservation holds its rows of the budget; P plays no
part.
"""

cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

import numpy as np

from kvtrial.contract import OutOfRange, Partial, PoolExhausted, SlotCancelled

from kvtrial.hot._door cimport (
    ascending,
    block_rows,
    finite_scale,
    floats,
    int64_positions,
    layer_index,
    part_of,
)
from kvtrial.hot._flat_scalar cimport FlatRows, attend_grouped, attend_per_query
from kvtrial.hot._gapless cimport GaplessSession, GaplessStore
from kvtrial.hot._memory cimport Memory

cnp.import_array()


cdef class FlatStore(GaplessStore):
    """Flat FP32 storage.

    Parameters
    ----------
    spec : StoreSpec
    grouped : bool
        A1's kernel in place of K0's.
    debug_poison : bool
        Rows without content are NaN, so that a use of one shows.

    Raises
    ------
    PoolExhausted
        The budget or its ledger has no room for one row in each layer.
    """

    cdef Memory _work
    cdef bint grouped

    def __init__(self, spec, *, bint grouped, bint debug_poison=False):
        GaplessStore.__init__(
            self, spec, f"fp32/flat/H{spec.local_kv_heads}/D{spec.head_dim}",
            spec.head_dim * sizeof(float), 1, debug_poison,
        )
        self.grouped = grouped
        try:
            self._work = Memory(
                (self.capacity * self.group + self.heads * self.group * (self.dim + 2))
                * sizeof(float)
            )
        except PoolExhausted:
            self.close()
            raise

    def open_session(self, position_holes_allowed=False):
        """A new, empty session."""
        cdef FlatSession session
        self.check_holes(position_holes_allowed)
        session = FlatSession.__new__(FlatSession)
        session.memory = Memory(self.layers * self.capacity * self.row_bytes)
        if self.poison:
            memset(session.memory.data, 0xFF, session.memory.nbytes)
        session.slot_table = Memory(self.layers * sizeof(FlatSlot))
        session.slots = <FlatSlot *>session.slot_table.data
        session.begin(self)
        return session


ctypedef struct FlatSlot:
    int64_t start, n  # n 0: no reservation
    int64_t committed_start, committed_n


cdef class FlatSession(GaplessSession):
    """One sequence of a `FlatStore`; the verbs are described in `kvtrial.contract`."""

    cdef Memory memory
    cdef Memory slot_table
    cdef FlatSlot *slots

    cdef float *rows(self, int64_t lay) noexcept:
        """K rows of a layer; its V rows follow them."""
        return <float *>(self.memory.data + lay * self.store.capacity * self.store.row_bytes)

    cdef int64_t row_floats(self) noexcept:
        return self.store.heads * self.store.dim

    cdef int64_t reach(self, int64_t lay) noexcept:
        return self.ends[lay] + self.slots[lay].n

    cdef void cancel(self) noexcept:
        cdef int64_t lay
        cdef FlatSlot *slot
        for lay in range(self.store.layers):
            slot = self.slots + lay
            if slot.n:
                self.poison_rows(lay, slot.start, slot.start + slot.n)
                self.store.units_used -= slot.n
                slot.n = 0

    cdef void drop(self, int64_t lay, int64_t first, int64_t last) noexcept:
        self.poison_rows(lay, first, last)
        self.slots[lay].committed_n = 0

    cdef void poison_rows(self, int64_t lay, int64_t first, int64_t last) noexcept:
        """NaN into rows without content, where the store was opened so."""
        cdef int64_t row = self.row_floats()
        cdef float *k = self.rows(lay) + first * row
        if self.store.poison:
            memset(k, 0xFF, (last - first) * row * sizeof(float))
            memset(k + self.store.capacity * row, 0xFF, (last - first) * row * sizeof(float))

    def close(self):
        """Give every row back; any later verb is `StaleOwner`."""
        GaplessSession.close(self)
        self.memory = None

    # Rows -----------------------------------------------------------------------------------------

    def append(self, layer, positions, k, v):
        """Store rows k, v (n, H_kv, D) at the positions (n,) from the length on."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), row = self.row_floats()
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef float *k_rows = floats(k, "k", 3, n, store.heads, store.dim, False)
        cdef float *v_rows = floats(v, "v", 3, n, store.heads, store.dim, False)
        cdef float *mine = self.rows(lay)
        ascending(at, n)
        if n == 0:
            return
        self.check_append(lay, at, n)
        self.cancel()
        mine += self.ends[lay] * row
        memcpy(mine, k_rows, n * row * sizeof(float))
        memcpy(mine + store.capacity * row, v_rows, n * row * sizeof(float))
        self.grow(lay, self.ends[lay] + n)
        self.slots[lay].committed_n = 0

    def reserve_slot(self, layer, positions):
        """Writable K and V views (n, H_kv, D) of the next n positions, or None."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), row = self.row_floats(), i
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), end = self.ends[lay]
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef Py_ssize_t[3] shape
        cdef float *k = self.rows(lay) + end * row
        if n == 0 or at[0] != store.base + end or end + n > store.capacity:
            return None
        for i in range(1, n):
            if at[i] != at[0] + i:
                return None
        self.in_turn(lay, end + n)
        self.room_for(lay, end + n)
        self.cancel()
        self.slots[lay].start, self.slots[lay].n = end, n
        self.slots[lay].committed_n = 0
        store.units_used += n
        shape[0], shape[1], shape[2] = n, store.heads, store.dim
        return (
            self.memory.view(k, 3, shape, NULL, cnp.NPY_FLOAT32, True),
            self.memory.view(k + store.capacity * row, 3, shape, NULL, cnp.NPY_FLOAT32, True),
        )

    def commit_slot(self, layer, positions):
        """Make the reserved rows valid."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers)
        cdef FlatSlot *slot = self.slots + lay
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), i, start
        cdef const int64_t *given = <const int64_t *>cnp.PyArray_DATA(where)
        if n == 0:
            return
        start = given[0] - store.base
        cdef bint is_open = slot.n == n and slot.start == start
        cdef bint matches = is_open or (slot.committed_n == n and slot.committed_start == start)
        for i in range(1, n):
            matches = matches and given[i] == given[0] + i
        if not matches:
            raise SlotCancelled(
                f"no reservation of just these rows from {given[0]} on is open; another mutation "
                "cancelled it, reserve again"
            )
        if is_open:
            slot.committed_start, slot.committed_n, slot.n = start, n, 0
            self.ends[lay] = start + n

    def read(self, layer, positions):
        """Copies of valid rows as float32 (n, H_kv, D)."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), row = self.row_floats(), i
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef float *mine = self.rows(lay)
        self.check_stored(lay, at, n)
        k = np.empty((n, store.heads, store.dim), np.float32)
        v = np.empty((n, store.heads, store.dim), np.float32)
        for i in range(n):
            memcpy(<float *>cnp.PyArray_DATA(k) + i * row, mine + (at[i] - store.base) * row,
                   row * sizeof(float))
            memcpy(<float *>cnp.PyArray_DATA(v) + i * row,
                   mine + (store.capacity + at[i] - store.base) * row, row * sizeof(float))
        return k, v

    # Attention ------------------------------------------------------------------------------------

    cdef FlatRows whole(self, int64_t lay, const float *q, float scale) noexcept:
        """All rows and heads of a layer, with the partial in the store's work space."""
        cdef FlatRows at
        cdef FlatStore store = <FlatStore>self.store
        cdef int64_t queries = store.heads * store.group
        at.k = self.rows(lay)
        at.row_floats = self.row_floats()
        at.v = at.k + store.capacity * at.row_floats
        at.rows, at.head_dim, at.group = self.ends[lay], store.dim, store.group
        at.first_head, at.last_head = 0, store.heads
        at.q, at.scale = q + store.first_query * store.dim, scale
        at.max = <float *>store._work.data
        at.sum = at.max + queries
        at.output = at.sum + queries
        at.scores = at.output + queries * store.dim
        return at

    cdef void run(self, const FlatRows *at) noexcept:
        if (<FlatStore>self.store).grouped:
            attend_grouped(at)
        else:
            attend_per_query(at)

    def attend(self, layer, q, out, scale):
        """Attention of q (H_q, D) over the layer's rows, into out (H_q, D)."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers)
        cdef float *queries = floats(q, "q", 2, 0, store.q_heads, store.dim, False)
        cdef float *rows = floats(out, "out", 2, 0, store.q_heads, store.dim, True)
        cdef FlatRows at = self.whole(lay, queries, finite_scale(scale))
        self.run(&at)
        store.divide(at.sum, at.output, rows)

    def attend_block(self, layer, q, out, scale):
        """Causal attention of q (n, H_q, D), the newest n positions, into out."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), n = block_rows(q), i
        cdef int64_t stride = store.q_heads * store.dim, end = self.ends[lay]
        cdef float *queries = floats(q, "q", 3, n, store.q_heads, store.dim, False)
        cdef float *rows = floats(out, "out", 3, n, store.q_heads, store.dim, True)
        cdef FlatRows at
        cdef float factor = finite_scale(scale)
        if n > end:
            raise OutOfRange(f"q has {n} rows; layer {lay} has {end} positions")
        for i in range(n):
            at = self.whole(lay, queries + i * stride, factor)
            at.rows = end - n + i + 1
            self.run(&at)
            store.divide(at.sum, at.output, rows + i * stride)

    def attend_partial(self, layer, q, scale, *, kv_heads=None, positions=None):
        """Attention over KV heads [start, stop) and positions [start, stop), for `merge`."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), start, stop
        cdef float *queries = floats(q, "q", 2, 0, store.q_heads, store.dim, False)
        cdef FlatRows at = self.whole(lay, queries, finite_scale(scale))
        at.first_head, at.last_head, start, stop = part_of(
            store.spec, at.rows, kv_heads, positions
        )
        at.k += start * at.row_floats
        at.v += start * at.row_floats
        at.rows = stop - start
        part = Partial.empty(store.q_heads, store.dim)
        at.max = <float *>cnp.PyArray_DATA(part.max) + store.first_query
        at.sum = <float *>cnp.PyArray_DATA(part.sum) + store.first_query
        at.output = <float *>cnp.PyArray_DATA(part.output) + store.first_query * store.dim
        self.run(&at)
        return part
