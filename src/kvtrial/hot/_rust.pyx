"""The store and session of K3 and K3T: thin wrappers around the Rust library, one call a verb.

Arguments are checked here and turned into pointers; positions, steps and pages are checked behind
the boundary, whose codes become the errors of the contract here. The interpreter lock is held: the
work space of a store serves one call at a time, and threads are the ones of the pool.
"""

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

import numpy as np

from kvtrial.contract import (
    BranchDiverged,
    BranchesOpen,
    HoleNotAllowed,
    InvalidArgument,
    KVError,
    MemoryLedger,
    OutOfRange,
    PageTable,
    Partial,
    PoolExhausted,
    SlotCancelled,
    StaleOwner,
    StepIncomplete,
)
from kvtrial.contract.arguments import flag

from kvtrial._threads cimport parallel_for
from kvtrial.hot._door cimport (
    block_rows,
    bounds,
    finite_scale,
    floats,
    int64_positions,
    integer,
    restored_rows,
)
from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE
from kvtrial.hot._native cimport *

cnp.import_array()


#: Code of the boundary -> the contract's error and its message.
_ERRORS = {
    KVN_PANIC: (KVError, "the native store failed inside; close it and report a bug"),
    KVN_NO_MEMORY: (PoolExhausted, "the system refused {value} bytes; lower budget_bytes"),
    KVN_LAYER: (InvalidArgument, "layer is {value}; allowed: 0 to {high} - 1"),
    KVN_NOT_ASCENDING: (
        InvalidArgument, "position {value} follows {low}; give positions in ascending order, once"
    ),
    KVN_POSITION: (OutOfRange, "position is {value}; allowed: {low} to {high} - 1"),
    KVN_NOT_VALID: (
        OutOfRange, "no row is valid at position {value}; look at valid() for those that are"
    ),
    KVN_HOLE_NOT_ALLOWED: (
        HoleNotAllowed,
        "position {value} would be a hole; open the session with position_holes_allowed=True",
    ),
    KVN_NO_PAGES: (
        PoolExhausted,
        "{value} pages are needed and {low} of {high} are free; close or roll back a session, or "
        "open the store with more budget_bytes",
    ),
    KVN_NO_SLOTS: (
        PoolExhausted, "all {value} sessions and branches of the store are open; close one"
    ),
    KVN_STALE: (
        StaleOwner,
        "the session (generation {value}) is closed, its slot is at generation {low}; open another",
    ),
    KVN_STEP_INCOMPLETE: (
        StepIncomplete,
        "layer {value} stands at {low} and layer 0 at {high}; finish the step in every layer or "
        "call abandon_step",
    ),
    KVN_LAYER_AHEAD: (
        StepIncomplete,
        "layer {value} would reach {low}, past the layer before it at {high}; go through the "
        "layers in turn",
    ),
    KVN_BRANCHES_OPEN: (BranchesOpen, "{value} branches are open; close or commit them first"),
    KVN_BRANCH_DIVERGED: (
        BranchDiverged,
        "the parent has moved since the branch began at {value}; close the branch, begin another",
    ),
    KVN_NOT_A_BRANCH: (
        InvalidArgument, "the session is no branch; commit what begin_branch gave"
    ),
    KVN_COUNT: (OutOfRange, "count is {value}; allowed: {low} to {high}"),
    KVN_SLOT_CANCELLED: (
        SlotCancelled,
        "no reservation of just these rows from {value} on is open; another mutation cancelled it, "
        "reserve again",
    ),
    KVN_RESTORING: (
        StepIncomplete, "a restore of {value} rows is open; finish_restore or cancel_restore first"
    ),
    KVN_NOT_RESTORING: (InvalidArgument, "no restore is open; call begin_restore first"),
    KVN_NOT_EMPTY: (
        InvalidArgument,
        "the session is a branch or holds rows up to {value}; restore into a new one",
    ),
    KVN_PAGE_INDEX: (OutOfRange, "page index is {value}; allowed: 0 to {high} - 1"),
    KVN_HEADS: (OutOfRange, "kv_heads start at {value}; allowed: {low} to {high}"),
    KVN_SHAPE: (InvalidArgument, "the shape has {value}; allowed: {low} to {high}"),
    KVN_BUDGET: (
        PoolExhausted,
        "the budget holds {value} pages; allowed: {low} to {high}, so change budget_bytes",
    ),
}


def kernel_capsule():
    """The Rust kernel over FP32 pages of another owner, a ``kv_span_fn`` in a PyCapsule."""
    return PyCapsule_New(<void *>kvn_span_fp32, KV_KERNEL_CAPSULE, NULL)


cdef int check(int code, const kvn_fault *fault) except -1:
    """Raises what a call across the boundary ended with, unless it is 0."""
    if code:
        kind, text = _ERRORS[fault.code]
        raise kind(text.format(value=fault.value, low=fault.low, high=fault.high))
    return 0


cdef class _StoreHandle:
    """Owns the Rust store. Views into the pool hold it, so that their memory outlives `close`."""

    cdef kvn_store *handle

    def __cinit__(self):
        self.handle = NULL

    def __dealloc__(self):
        if self.handle is not NULL:
            kvn_free(self.handle)

    cdef object view(self, void *at, int ndim, cnp.npy_intp *shape, cnp.npy_intp *strides, int kind,
                     bint writable):
        """An array over pool memory that keeps the pool alive."""
        cdef int flags = cnp.NPY_ARRAY_WRITEABLE if writable else 0
        array = cnp.PyArray_New(
            cnp.ndarray, ndim, shape, kind, strides, at, 0, flags | cnp.NPY_ARRAY_ALIGNED, None
        )
        cnp.set_array_base(array, self)
        return array


cdef class RustStore:
    """K3 and K3T: pool, bookkeeping and kernel in Rust.

    Parameters
    ----------
    spec : StoreSpec
    format : kvtrial.hot.formats.RowFormat
        FP32, or FP32T with K transposed within the page. Its rows and kernel are Rust's own.
    debug_poison : bool
        Debug switch: rows without content are NaN, so that a use of one shows.

    Raises
    ------
    InvalidArgument
        There is no such format.
    PoolExhausted
        The budget or its ledger has no room for a page.
    """

    cdef readonly object spec
    cdef readonly str page_format
    cdef readonly int64_t row_bytes, page_nbytes
    cdef _StoreHandle memory
    cdef object _ledger, _reservation
    # Filled by the call that failed last: a store serves one call at a time.
    cdef kvn_fault fault
    # The spec's shape as integers of the machine: `heads` and `first_head` are this store's share.
    cdef int64_t q_heads, heads, first_head, dim, page_tokens, base, threads
    cdef int64_t pages

    def __init__(self, spec, *, format, bint debug_poison=False):
        cdef _StoreHandle memory = _StoreHandle()
        if format.name not in ("fp32", "fp32t"):
            raise InvalidArgument(f"format is {format.name!r}; allowed: fp32, fp32t")
        self.spec = spec
        self.q_heads, self.heads, self.dim = spec.q_heads, spec.local_kv_heads, spec.head_dim
        self.first_head = spec.heads[0] * spec.group
        self.page_tokens, self.base = spec.page_tokens, spec.base_position
        self.threads = spec.threads
        self.page_nbytes = kvn_page_nbytes(self.heads, self.dim, self.page_tokens)
        self.pages = min(spec.budget_bytes // self.page_nbytes, 2**31 - 1)
        self.row_bytes = self.page_nbytes // self.page_tokens
        # As the Cython pool names it: a page of K1 is a page of K3, one of K1T one of K3T.
        self.page_format = (
            f"{format.name}/head-major/P{self.page_tokens}/H{self.heads}/D{self.dim}"
        )
        if self.pages < 1:
            raise PoolExhausted(
                f"budget_bytes is {spec.budget_bytes}, and one page takes {self.page_nbytes}; give "
                "at least that"
            )
        self._ledger = spec.ledger or MemoryLedger(spec.budget_bytes)
        self._reservation = self._ledger.reserve(
            self.page_format, self.pages * self.page_nbytes
        )
        try:
            check(
                kvn_open(
                    spec.layers, self.heads, spec.group, self.dim, self.page_tokens,
                    format.name == "fp32t", self.base, self.pages, debug_poison, &memory.handle,
                    &self.fault,
                ),
                &self.fault,
            )
        except KVError:
            self._ledger.release(self._reservation)
            raise
        self.memory = memory

    cdef kvn_store *native(self) except NULL:
        if self.memory is None:
            raise StaleOwner("the store is closed; open another")
        return self.memory.handle

    def open_session(self, position_holes_allowed=False):
        """A new, empty session."""
        cdef kvn_handle handle
        cdef bint holes = flag(position_holes_allowed, "position_holes_allowed")
        check(kvn_open_session(self.native(), holes, &handle, &self.fault), &self.fault)
        return _session(self, handle, holes)

    def page_table(self, session, layer):
        """Page ids and length of a session's layer."""
        if not isinstance(session, RustSession) or (<RustSession>session).store is not self:
            raise InvalidArgument(f"{session!r} is no session of this store; give one of its own")
        return session.page_table(layer)

    def reference_counts(self):
        """int32 (pages,): page-table entries that point to each page."""
        cdef kvn_store *native = self.native()
        counts = np.empty(self.pages, np.int32)
        check(
            kvn_reference_counts(native, <uint32_t *>cnp.PyArray_DATA(counts), &self.fault),
            &self.fault,
        )
        return counts

    @property
    def pages_total(self):
        """Pages in the pool."""
        self.native()
        return self.pages

    @property
    def pages_free(self):
        """Pages that no session holds."""
        cdef int64_t pages
        check(kvn_pages_free(self.native(), &pages, &self.fault), &self.fault)
        return pages

    @property
    def resident_bytes(self):
        """Bytes of pages in use; a shared page counts once."""
        return (self.pages - self.pages_free) * self.page_nbytes

    def close(self):
        """Give the pool and its reservation back; sessions become stale.

        The memory itself goes when the last view into it does.
        """
        self.native()
        self.memory = None
        self._ledger.release(self._reservation)

    def _force_generation(self, uint64_t generation):
        """For tests: what every session slot that is free is opened with next."""
        check(kvn_force_generation(self.native(), generation, &self.fault), &self.fault)


cdef RustSession _session(RustStore store, kvn_handle handle, bint holes):
    cdef RustSession session = RustSession.__new__(RustSession)
    session.store = store
    session.fault = &store.fault
    session.handle = handle
    session.generation = handle.generation
    session.position_holes_allowed = holes
    return session


cdef class RustSession:
    """One sequence of a `RustStore`; the verbs are described in `kvtrial.contract`."""

    cdef readonly RustStore store
    cdef readonly object generation
    cdef readonly bint position_holes_allowed
    cdef kvn_handle handle
    cdef kvn_fault *fault  # the store's, which `store` keeps alive

    def __init__(self):
        raise TypeError("a session comes from open_session() or begin_branch() of its store")

    # Rows -----------------------------------------------------------------------------------------

    def append(self, layer, positions, k, v):
        """Store rows k, v (n, H_kv, D) at ascending positions (n,)."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer"), heads = self.store.heads, dim = self.store.dim
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef float *k_rows = floats(k, "k", 3, n, heads, dim, False)
        cdef float *v_rows = floats(v, "v", 3, n, heads, dim, False)
        check(kvn_append(native, self.handle, lay, at, n, k_rows, v_rows, self.fault), self.fault)

    def invalidate(self, layer, positions):
        """Make holes of stored positions."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer")
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        check(kvn_invalidate(native, self.handle, lay, at, n, self.fault), self.fault)

    def reserve_slot(self, layer, positions):
        """Writable K and V views (n, H_kv, D) inside the page, or None."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer")
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        cdef kvn_rows rows
        cdef cnp.npy_intp[3] shape
        cdef cnp.npy_intp[3] strides
        check(kvn_reserve(native, self.handle, lay, at, n, &rows, self.fault), self.fault)
        if rows.k is NULL:
            return None
        shape[0], shape[1], shape[2] = n, self.store.heads, self.store.dim
        strides[0], strides[1], strides[2] = 4 * rows.k_slot, 4 * rows.head, 4 * rows.k_element
        memory = self.store.memory
        k = memory.view(rows.k, 3, shape, strides, cnp.NPY_FLOAT32, True)
        strides[0], strides[2] = 4 * rows.v_slot, 4
        return k, memory.view(rows.v, 3, shape, strides, cnp.NPY_FLOAT32, True)

    def commit_slot(self, layer, positions):
        """Make the reserved rows valid."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer")
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        check(kvn_commit(native, self.handle, lay, at, n, self.fault), self.fault)

    def read(self, layer, positions):
        """Copies of valid rows as float32 (n, H_kv, D)."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer")
        where = int64_positions(positions)
        cdef int64_t n = cnp.PyArray_DIM(where, 0)
        cdef const int64_t *at = <const int64_t *>cnp.PyArray_DATA(where)
        k = np.empty((n, self.store.heads, self.store.dim), np.float32)
        v = np.empty_like(k)
        cdef float *k_rows = <float *>cnp.PyArray_DATA(k)
        cdef float *v_rows = <float *>cnp.PyArray_DATA(v)
        check(kvn_read(native, self.handle, lay, at, n, k_rows, v_rows, self.fault), self.fault)
        return k, v

    # Attention ------------------------------------------------------------------------------------

    cdef kvn_call _call(self, const float *q, float scale):
        cdef kvn_call call
        call.q = q
        call.q_heads = self.store.q_heads
        call.first_head = self.store.first_head
        call.scale = scale
        call.parallel_for = parallel_for
        call.threads = self.store.threads
        return call

    def attend(self, layer, q, out, scale):
        """Attention of q (H_q, D) over the layer's valid rows, into out (H_q, D)."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer"), heads = self.store.q_heads, dim = self.store.dim
        cdef float *queries = floats(q, "q", 2, 0, heads, dim, False)
        cdef float *rows = floats(out, "out", 2, 0, heads, dim, True)
        cdef kvn_call call = self._call(queries, finite_scale(scale))
        check(kvn_attend(native, self.handle, lay, call, rows, self.fault), self.fault)

    def attend_block(self, layer, q, out, scale):
        """Causal attention of q (n, H_q, D), the newest n positions, into out."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer"), heads = self.store.q_heads, dim = self.store.dim
        cdef int64_t n = block_rows(q)
        cdef float *queries = floats(q, "q", 3, n, heads, dim, False)
        cdef float *rows = floats(out, "out", 3, n, heads, dim, True)
        cdef kvn_call call = self._call(queries, finite_scale(scale))
        check(kvn_attend_block(native, self.handle, lay, call, n, rows, self.fault), self.fault)

    def attend_partial(self, layer, q, scale, *, kv_heads=None, positions=None):
        """Attention over KV heads [start, stop) and positions [start, stop), for `merge`.

        KV heads are the model's and must be the store's own; positions may reach past the length.
        """
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer"), heads = self.store.q_heads, dim = self.store.dim
        cdef float *queries = floats(q, "q", 2, 0, heads, dim, False)
        cdef kvn_call call = self._call(queries, finite_scale(scale))
        cdef int64_t first, last, start, stop
        own_first, own_last = self.store.spec.heads
        first, last = bounds(kv_heads, "kv_heads", own_first, own_last)
        start, stop = bounds(positions, "positions", 0, 2**62)
        part = Partial.empty(heads, dim)
        check(
            kvn_attend_partial(
                native, self.handle, lay, call, first - own_first, last - own_first, start, stop,
                <float *>cnp.PyArray_DATA(part.max), <float *>cnp.PyArray_DATA(part.sum),
                <float *>cnp.PyArray_DATA(part.output), self.fault,
            ),
            self.fault,
        )
        return part

    # What it shows --------------------------------------------------------------------------------

    def length(self, layer):
        """Highest valid or reserved position + 1."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer"), length
        check(kvn_length(native, self.handle, lay, &length, self.fault), self.fault)
        return length

    def valid(self, layer):
        """bool (length - base_position,): True where a row is valid."""
        cdef int64_t lay = integer(layer, "layer")
        bits = np.empty(self.length(lay) - self.store.base, np.bool_)
        cdef uint8_t *at = <uint8_t *>cnp.PyArray_DATA(bits)
        check(kvn_valid(self.store.native(), self.handle, lay, at, self.fault), self.fault)
        return bits

    def page_table(self, layer):
        """The layer's page ids, int32, from base_position on, and its length."""
        cdef int64_t lay = integer(layer, "layer")
        cdef int64_t length = self.length(lay), tokens = self.store.page_tokens
        ids = np.empty((length - self.store.base + tokens - 1) // tokens, np.int32)
        cdef int32_t *at = <int32_t *>cnp.PyArray_DATA(ids)
        check(kvn_page_table(self.store.native(), self.handle, lay, at, self.fault), self.fault)
        return PageTable(ids, length)

    # Branches and the ways back -------------------------------------------------------------------

    def begin_branch(self):
        """A copy-on-write child at the current length."""
        cdef kvn_handle child
        check(
            kvn_begin_branch(self.store.native(), self.handle, &child, self.fault), self.fault
        )
        return _session(self.store, child, self.position_holes_allowed)

    def commit_prefix(self, k):
        """Move the first k positions since the branch began into the parent; close the branch."""
        cdef int64_t n = integer(k, "k")
        check(kvn_commit_prefix(self.store.native(), self.handle, n, self.fault), self.fault)

    def rollback_tail(self, n):
        """Drop the last n positions."""
        cdef int64_t count = integer(n, "n")
        check(kvn_rollback_tail(self.store.native(), self.handle, count, self.fault), self.fault)

    def abandon_step(self):
        """Drop the rows of a step that not every layer has finished."""
        check(kvn_abandon_step(self.store.native(), self.handle, self.fault), self.fault)

    def close(self):
        """Give every page back; any later verb is `StaleOwner`."""
        check(kvn_close_session(self.store.native(), self.handle, self.fault), self.fault)

    # Spill and restore ----------------------------------------------------------------------------

    cdef object _page_view(self, void *page, bint writable):
        cdef cnp.npy_intp size = self.store.page_nbytes
        if page is NULL:
            return None
        return memoryview(
            self.store.memory.view(page, 1, &size, NULL, cnp.NPY_UINT8, writable)
        )

    def page_bytes(self, layer, index):
        """Page `index` of the layer, read-only; None for a page of holes."""
        cdef kvn_store *native = self.store.native()
        cdef int64_t lay = integer(layer, "layer"), i = integer(index, "index")
        cdef const float *page
        cdef uint64_t valid
        check(kvn_page(native, self.handle, lay, i, &page, &valid, self.fault), self.fault)
        if page is NULL or not ~valid << (64 - self.store.page_tokens):
            return self._page_view(<void *>page, False)
        copy = np.empty(self.store.page_nbytes, np.uint8)
        cdef float *into = <float *>cnp.PyArray_DATA(copy)
        check(kvn_copy_page(native, self.handle, lay, i, into, self.fault), self.fault)
        return memoryview(copy).toreadonly()

    def begin_restore(self, valid):
        """Take pages for the rows marked in valid (L, rows); writable views of each, by layer."""
        cdef kvn_store *native = self.store.native()
        layers = self.store.spec.layers
        bits = restored_rows(valid, layers)
        cdef int64_t rows = bits.shape[1], pages
        cdef const uint8_t *at = <const uint8_t *>cnp.PyArray_DATA(bits)
        check(kvn_begin_restore(native, self.handle, at, rows, self.fault), self.fault)
        pages = (rows + self.store.page_tokens - 1) // self.store.page_tokens
        return [[self._restore_page(lay, i) for i in range(pages)] for lay in range(layers)]

    cdef object _restore_page(self, int64_t lay, int64_t index):
        cdef float *page
        check(
            kvn_restore_page(self.store.native(), self.handle, lay, index, &page, self.fault),
            self.fault,
        )
        return self._page_view(page, True)

    def finish_restore(self):
        """Make the restored rows valid."""
        check(kvn_finish_restore(self.store.native(), self.handle, self.fault), self.fault)

    def cancel_restore(self):
        """Give the pages of an unfinished restore back."""
        check(kvn_cancel_restore(self.store.native(), self.handle, self.fault), self.fault)
