"""The flat store and session of K0 and A1: K and V as `[position][kv_head][head_dim]` per layer.

A session is one buffer of the store's capacity, mapped when it opens and touched as it grows. The
budget is shared: the rows that all sessions hold never exceed it.

Decided where the contract is silent: an open reservation holds its rows of the budget; P plays no
part.
"""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

import numpy as np

from kvtrial.contract import (
    HoleNotAllowed,
    MemoryLedger,
    OutOfRange,
    Partial,
    PoolExhausted,
    SlotCancelled,
    StaleOwner,
    StepIncomplete,
    Unsupported,
)

from kvtrial.hot._door cimport (
    ascending,
    block_rows,
    bounds,
    finite_scale,
    floats,
    int64_positions,
    integer,
    layer_index,
)
from kvtrial.hot._flat_scalar cimport FlatRows, attend_grouped, attend_per_query
from kvtrial.hot._memory cimport Region

cnp.import_array()


cdef class FlatStore:
    """Flat FP32 storage.

    Parameters
    ----------
    spec : StoreSpec
    grouped : bool
        A1's kernel in place of K0's.

    Raises
    ------
    PoolExhausted
        The budget or its ledger has no room for one row in each layer.
    """

    cdef readonly object spec
    cdef readonly str page_format
    cdef readonly int64_t row_bytes, page_nbytes, pages_total, pages_free
    cdef object _ledger, _reservation
    cdef Region _work
    cdef bint open, grouped
    cdef uint32_t generations
    # Rows count per layer: a token in all layers is `layers` rows.
    cdef int64_t rows_total, rows_used, capacity, layers, q_heads, heads, group, dim, base
    cdef int64_t first_query

    def __init__(self, spec, *, bint grouped):
        self.spec, self.grouped = spec, grouped
        self.layers, self.q_heads, self.heads = spec.layers, spec.q_heads, spec.local_kv_heads
        self.group, self.dim, self.base = spec.group, spec.head_dim, spec.base_position
        self.first_query = spec.heads[0] * spec.group
        self.row_bytes = 2 * self.heads * self.dim * sizeof(float)
        self.page_format = f"fp32/flat/H{self.heads}/D{self.dim}"
        self.rows_total = spec.budget_bytes // self.row_bytes
        self.capacity = self.rows_total // self.layers
        if self.capacity < 1:
            raise PoolExhausted(
                f"budget_bytes is {spec.budget_bytes}, and one token takes "
                f"{self.row_bytes * self.layers}; give at least that"
            )
        self._ledger = spec.ledger or MemoryLedger(spec.budget_bytes)
        self._reservation = self._ledger.reserve(
            self.page_format, self.rows_total * self.row_bytes
        )
        try:
            self._work = Region(
                (self.capacity * self.group + self.heads * self.group * (self.dim + 2))
                * sizeof(float)
            )
        except PoolExhausted:
            self._ledger.release(self._reservation)
            raise
        self.open = True

    def open_session(self, position_holes_allowed=False):
        """A new, empty session."""
        cdef FlatSession session
        self.check_open()
        if position_holes_allowed:
            raise Unsupported(f"{self.page_format} has no holes; use a paged store")
        session = FlatSession.__new__(FlatSession)
        session.store = self
        session.memory = Region(self.layers * self.capacity * self.row_bytes)
        session.table = Region(self.layers * sizeof(FlatLayer))
        session.layers = <FlatLayer *>session.table.data
        self.generations += 1
        session.generation = self.generations
        return session

    cdef int check_open(self) except -1:
        if not self.open:
            raise StaleOwner("the store is closed; open another")
        return 0

    def page_table(self, session, layer):
        """`Unsupported`: there are no pages."""
        return session.page_table(layer)

    def reference_counts(self):
        """`Unsupported`: there are no pages."""
        raise Unsupported(f"{self.page_format} has no pages")

    @property
    def resident_bytes(self):
        """Bytes of the rows that sessions hold."""
        return self.rows_used * self.row_bytes

    def close(self):
        """Release the reservation; sessions become stale, memory goes with its last view."""
        self.check_open()
        self.open = False
        self._ledger.release(self._reservation)


ctypedef struct FlatLayer:
    int64_t end
    int64_t slot_start, slot_n  # slot_n 0: no reservation
    int64_t committed_start, committed_n


cdef class FlatSession:
    """One sequence of a `FlatStore`; the verbs are described in `kvtrial.contract`."""

    cdef readonly FlatStore store
    cdef readonly uint32_t generation
    cdef Region memory
    cdef Region table
    cdef FlatLayer *layers

    @property
    def position_holes_allowed(self):
        """False: a flat store has no holes."""
        return False

    cdef FlatStore opened(self):
        if self.memory is None:
            raise StaleOwner(f"the session (generation {self.generation}) is closed; open another")
        self.store.check_open()
        return self.store

    cdef float *rows(self, int64_t lay) noexcept:
        """K rows of a layer; its V rows follow them."""
        return <float *>(self.memory.data + lay * self.store.capacity * self.store.row_bytes)

    cdef int64_t row_floats(self) noexcept:
        return self.store.heads * self.store.dim

    # Steps ----------------------------------------------------------------------------------------

    cdef int at_boundary(self) except -1:
        cdef int64_t lay
        for lay in range(1, self.store.layers):
            if self.layers[lay].end != self.layers[0].end:
                raise StepIncomplete(
                    f"layer {lay} stands at {self.layers[lay].end + self.store.base} and layer 0 at "
                    f"{self.layers[0].end + self.store.base}; finish the step, or call abandon_step"
                )
        return 0

    cdef int in_turn(self, int64_t lay, int64_t end) except -1:
        if lay == 0:
            return self.at_boundary()
        if end > self.layers[lay - 1].end:
            raise StepIncomplete(
                f"layer {lay} would reach {end + self.store.base}, past layer {lay - 1} at "
                f"{self.layers[lay - 1].end + self.store.base}; go through the layers in turn"
            )
        return 0

    cdef void cancel_all(self) noexcept:
        cdef int64_t lay
        for lay in range(self.store.layers):
            self.store.rows_used -= self.layers[lay].slot_n
            self.layers[lay].slot_n = 0

    cdef int room_for(self, int64_t lay, int64_t n) except -1:
        """Room for n more rows, once reservations are cancelled."""
        cdef int64_t i, free = self.store.rows_total - self.store.rows_used
        for i in range(self.store.layers):
            free += self.layers[i].slot_n
        if n > free or self.layers[lay].end + n > self.store.capacity:
            raise PoolExhausted(
                f"{n} rows are needed; {min(free, self.store.capacity - self.layers[lay].end)} fit; "
                "close or roll back a session, or open the store with more budget_bytes"
            )
        return 0

    cdef void truncate(self, int64_t end) noexcept:
        cdef int64_t lay
        self.cancel_all()
        for lay in range(self.store.layers):
            if self.layers[lay].end > end:
                self.store.rows_used -= self.layers[lay].end - end
                self.layers[lay].end = end
                self.layers[lay].committed_n = 0

    # Rows -----------------------------------------------------------------------------------------

    def append(self, layer, positions, k, v):
        """Store rows k, v (n, H_kv, D) at the positions (n,) from the length on."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), row = self.row_floats()
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), low = self.layers[lay].end + store.base
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef float *k_rows = floats(k, "k", 3, n, store.heads, store.dim, False)
        cdef float *v_rows = floats(v, "v", 3, n, store.heads, store.dim, False)
        cdef float *mine = self.rows(lay)
        ascending(at, n)
        if n == 0:
            return
        if not low <= at[0] <= at[n - 1] < store.base + store.capacity + n:
            raise OutOfRange(
                f"positions {at[0]} to {at[n - 1]}; allowed: {low} to "
                f"{store.base + store.capacity - 1}"
            )
        if at[0] != low or at[n - 1] != low + n - 1:
            raise HoleNotAllowed(
                f"positions {at[0]} to {at[n - 1]} leave holes after {low}; a flat store has none"
            )
        self.in_turn(lay, self.layers[lay].end + n)
        self.room_for(lay, n)
        self.cancel_all()
        mine += self.layers[lay].end * row
        memcpy(mine, k_rows, n * row * sizeof(float))
        memcpy(mine + store.capacity * row, v_rows, n * row * sizeof(float))
        self.layers[lay].end += n
        self.layers[lay].committed_n = 0
        store.rows_used += n

    def reserve_slot(self, layer, positions):
        """Writable K and V views (n, H_kv, D) of the next n positions, or None."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), row = self.row_floats(), i
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), end = self.layers[lay].end
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef Py_ssize_t[3] shape
        cdef float *k = self.rows(lay) + end * row
        if n == 0 or at[0] != store.base + end or end + n > store.capacity:
            return None
        for i in range(1, n):
            if at[i] != at[0] + i:
                return None
        self.in_turn(lay, end + n)
        self.room_for(lay, n)
        self.cancel_all()
        self.layers[lay].slot_start, self.layers[lay].slot_n = end, n
        self.layers[lay].committed_n = 0
        store.rows_used += n
        shape[0], shape[1], shape[2] = n, store.heads, store.dim
        return (
            self.memory.view(k, 3, shape, NULL, cnp.NPY_FLOAT32, True),
            self.memory.view(k + store.capacity * row, 3, shape, NULL, cnp.NPY_FLOAT32, True),
        )

    def commit_slot(self, layer, positions):
        """Make the reserved rows valid."""
        cdef FlatStore store = self.opened()
        cdef FlatLayer *at = self.layers + layer_index(layer, store.layers)
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0), i, start
        cdef const int64_t *given = <const int64_t *>cnp.PyArray_DATA(where)
        if n == 0:
            return
        start = given[0] - store.base
        cdef bint is_open = at.slot_n == n and at.slot_start == start
        cdef bint matches = is_open or (at.committed_n == n and at.committed_start == start)
        for i in range(1, n):
            matches = matches and given[i] == given[0] + i
        if not matches:
            raise SlotCancelled(
                f"no reservation of just these rows from {given[0]} on is open; another mutation "
                "cancelled it, reserve again"
            )
        if is_open:
            at.committed_start, at.committed_n, at.slot_n = start, n, 0
            at.end = start + n

    def read(self, layer, positions):
        """Copies of valid rows as float32 (n, H_kv, D)."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), row = self.row_floats(), i
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef float *mine = self.rows(lay)
        for i in range(n):
            if not 0 <= at[i] - store.base < self.layers[lay].end:
                raise OutOfRange(
                    f"position is {at[i]}; allowed: {store.base} to "
                    f"{store.base + self.layers[lay].end - 1}"
                )
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
        cdef FlatStore store = self.store
        cdef int64_t queries = store.heads * store.group
        at.k = self.rows(lay)
        at.row_floats = self.row_floats()
        at.v = at.k + store.capacity * at.row_floats
        at.rows, at.head_dim, at.group = self.layers[lay].end, store.dim, store.group
        at.first_head, at.last_head = 0, store.heads
        at.q, at.scale = q + store.first_query * store.dim, scale
        at.max = <float *>store._work.data
        at.sum = at.max + queries
        at.output = at.sum + queries
        at.scores = at.output + queries * store.dim
        return at

    cdef void run(self, const FlatRows *at) noexcept:
        if self.store.grouped:
            attend_grouped(at)
        else:
            attend_per_query(at)

    cdef void run_and_divide(self, const FlatRows *at, float *out) noexcept:
        """Attention into the store's own heads of out (H_q, D)."""
        cdef int64_t h, d, dim = at.head_dim
        self.run(at)
        out += self.store.first_query * dim
        for h in range(self.store.heads * at.group):
            for d in range(dim):
                out[h * dim + d] = at.output[h * dim + d] / at.sum[h] if at.sum[h] != 0 else 0

    def attend(self, layer, q, out, scale):
        """Attention of q (H_q, D) over the layer's rows, into out (H_q, D)."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers)
        cdef float *queries = floats(q, "q", 2, 0, store.q_heads, store.dim, False)
        cdef float *rows = floats(out, "out", 2, 0, store.q_heads, store.dim, True)
        cdef FlatRows at = self.whole(lay, queries, finite_scale(scale))
        self.run_and_divide(&at, rows)

    def attend_block(self, layer, q, out, scale):
        """Causal attention of q (n, H_q, D), the newest n positions, into out."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), n = block_rows(q), i
        cdef int64_t stride = store.q_heads * store.dim, end = self.layers[lay].end
        cdef float *queries = floats(q, "q", 3, n, store.q_heads, store.dim, False)
        cdef float *rows = floats(out, "out", 3, n, store.q_heads, store.dim, True)
        cdef FlatRows at
        cdef float factor = finite_scale(scale)
        if n > end:
            raise OutOfRange(f"q has {n} rows; layer {lay} has {end} positions")
        for i in range(n):
            at = self.whole(lay, queries + i * stride, factor)
            at.rows = end - n + i + 1
            self.run_and_divide(&at, rows + i * stride)

    def attend_partial(self, layer, q, scale, *, kv_heads=None, positions=None):
        """Attention over KV heads [start, stop) and positions [start, stop), for `merge`."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers), first, last, start, stop
        cdef float *queries = floats(q, "q", 2, 0, store.q_heads, store.dim, False)
        cdef FlatRows at = self.whole(lay, queries, finite_scale(scale))
        own_first, own_last = store.spec.heads
        first, last = bounds(kv_heads, "kv_heads", own_first, own_last)
        start, stop = bounds(positions, "positions", 0, 2**62)
        start = min(max(start - store.base, <int64_t>0), at.rows)
        stop = min(max(stop - store.base, start), at.rows)
        at.k += start * at.row_floats
        at.v += start * at.row_floats
        at.rows = stop - start
        at.first_head, at.last_head = first - <int64_t>own_first, last - <int64_t>own_first
        part = Partial(
            np.full(store.q_heads, -np.inf, np.float32),
            np.zeros(store.q_heads, np.float32),
            np.zeros((store.q_heads, store.dim), np.float32),
        )
        at.max = <float *>cnp.PyArray_DATA(part.max) + store.first_query
        at.sum = <float *>cnp.PyArray_DATA(part.sum) + store.first_query
        at.output = <float *>cnp.PyArray_DATA(part.output) + store.first_query * store.dim
        self.run(&at)
        return part

    # What it shows, and the ways back -------------------------------------------------------------

    def length(self, layer):
        """Highest valid or reserved position + 1."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers)
        return store.base + self.layers[lay].end + self.layers[lay].slot_n

    def valid(self, layer):
        """bool (length - base_position,): True where a row is valid."""
        cdef FlatStore store = self.opened()
        cdef int64_t lay = layer_index(layer, store.layers)
        bits = np.zeros(self.layers[lay].end + self.layers[lay].slot_n, np.bool_)
        bits[: self.layers[lay].end] = True
        return bits

    def rollback_tail(self, n):
        """Drop the last n positions."""
        cdef int64_t count = 0
        self.opened()
        count = integer(n, "n")
        self.at_boundary()
        if not 0 <= count <= self.layers[0].end:
            raise OutOfRange(f"n is {count}; allowed: 0 to {self.layers[0].end}")
        if count:
            self.truncate(self.layers[0].end - count)

    def abandon_step(self):
        """Drop the rows of a step that not every layer has finished."""
        # No layer is ahead of the one before it.
        self.truncate(self.layers[self.opened().layers - 1].end)

    def close(self):
        """Give every row back; any later verb is `StaleOwner`."""
        self.opened()
        self.at_boundary()
        self.truncate(0)
        self.memory = None

    def _lacking(self, verb):
        self.opened()
        raise Unsupported(f"{self.store.page_format} has no {verb}; use a paged store")

    def invalidate(self, layer, positions):
        """`Unsupported`, but for the rule that holes need a session opened with them."""
        self.opened()
        raise HoleNotAllowed("a flat store has no holes; use a paged store")

    def page_table(self, layer):
        """`Unsupported`."""
        self._lacking("page table")

    def begin_branch(self):
        """`Unsupported`."""
        self._lacking("branches")

    def commit_prefix(self, k):
        """`Unsupported`."""
        self._lacking("branches")

    def page_bytes(self, layer, index):
        """`Unsupported`."""
        self._lacking("pages")

    def begin_restore(self, valid):
        """`Unsupported`."""
        self._lacking("restore")

    def finish_restore(self):
        """`Unsupported`."""
        self._lacking("restore")

    def cancel_restore(self):
        """`Unsupported`."""
        self._lacking("restore")
