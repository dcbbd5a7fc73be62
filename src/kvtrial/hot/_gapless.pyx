"""The books of stores without holes and branches: an end per layer, and the verbs that follow from it.

`_flat` (K0, A1) and `_rocks` (C0) say where rows lie; steps, room, rollback and what such stores
lack is here. Ends count from base_position. Every verb checks first and changes afterwards, so that
an error changes nothing.
"""

cimport numpy as cnp
from libc.stdint cimport int64_t, uint32_t

import numpy as np

from kvtrial.contract import (
    HoleNotAllowed,
    MemoryLedger,
    OutOfRange,
    PoolExhausted,
    StaleOwner,
    StepIncomplete,
    Unsupported,
)
from kvtrial.contract.arguments import flag

from kvtrial.hot._door cimport integer, layer_index
from kvtrial.hot._memory cimport Memory

cnp.import_array()


cdef class GaplessStore:
    """Shape, budget and ledger.

    Parameters
    ----------
    spec : StoreSpec
    page_format : str
    head_row_bytes : int
        Bytes of one head's K row as it is stored.
    unit_tokens : int
        Rows of one layer that are taken and given back together.
    debug_poison : bool
        Rows without content are NaN, so that a use of one shows.

    Raises
    ------
    PoolExhausted
        The budget or its ledger has no room for one unit in each layer.
    """

    def __init__(
        self, spec, str page_format, int64_t head_row_bytes, int64_t unit_tokens, bint debug_poison
    ):
        self.spec, self.page_format, self.poison = spec, page_format, debug_poison
        self.layers, self.q_heads, self.heads = spec.layers, spec.q_heads, spec.local_kv_heads
        self.group, self.dim, self.base = spec.group, spec.head_dim, spec.base_position
        self.first_query = spec.heads[0] * spec.group
        self.row_bytes = 2 * self.heads * head_row_bytes
        self.unit_tokens = unit_tokens
        self.units_total = spec.budget_bytes // (self.row_bytes * unit_tokens)
        self.capacity = self.units_total // self.layers * unit_tokens
        if self.capacity < 1:
            raise PoolExhausted(
                f"budget_bytes is {spec.budget_bytes}, and {unit_tokens} tokens take "
                f"{self.row_bytes * unit_tokens * self.layers}; give at least that"
            )
        self._ledger = spec.ledger or MemoryLedger(spec.budget_bytes)
        self._reservation = self._ledger.reserve(
            page_format, self.units_total * unit_tokens * self.row_bytes
        )
        self.open = True

    cdef int check_open(self) except -1:
        if not self.open:
            raise StaleOwner("the store is closed; open another")
        return 0

    cdef int check_holes(self, object allowed) except -1:
        """What a new session may ask for: no holes."""
        self.check_open()
        if flag(allowed, "position_holes_allowed"):
            raise Unsupported(f"{self.page_format} has no holes; use a store with a page table")
        return 0

    cdef int64_t units(self, int64_t rows) noexcept:
        return (rows + self.unit_tokens - 1) // self.unit_tokens

    cdef void divide(self, const float *sums, const float *outputs, float *out) noexcept:
        """Partials of the store's own heads into their rows of out (H_q, D)."""
        cdef int64_t h, d
        out += self.first_query * self.dim
        for h in range(self.heads * self.group):
            for d in range(self.dim):
                out[h * self.dim + d] = outputs[h * self.dim + d] / sums[h] if sums[h] != 0 else 0

    def page_table(self, session, layer):
        """`Unsupported`: pages, if there are any, have no ids."""
        raise Unsupported(f"{self.page_format} has no page table")

    def reference_counts(self):
        """`Unsupported`: nothing is shared."""
        raise Unsupported(f"{self.page_format} has no page table")

    @property
    def pages_total(self):
        """Pages in the pool; 0 where there are none at all."""
        self.check_open()
        return self.pages

    @property
    def pages_free(self):
        """Pages that no session holds; 0 where there are none at all."""
        self.check_open()
        return self.units_total - self.units_used if self.pages else 0

    @property
    def resident_bytes(self):
        """Bytes of the units that sessions hold."""
        self.check_open()
        return self.units_used * self.unit_tokens * self.row_bytes

    def close(self):
        """Release the reservation; sessions become stale, memory goes with its last view."""
        self.check_open()
        self.open = False
        self._ledger.release(self._reservation)

    def _force_generation(self, uint32_t generation):
        """For tests: what the next session is opened with."""
        self.generations = generation - 1


cdef class GaplessSession:
    """Steps, room and rollback; the verbs are described in `kvtrial.contract`.

    Invariant of the store: units_used is the sum of units(reach) over all sessions and layers.
    """

    def __init__(self):
        raise TypeError("a session comes from open_session() of its store")

    cdef int begin(self, GaplessStore store) except -1:
        """Makes a new object the store's newest session, empty."""
        self._table = Memory(store.layers * sizeof(int64_t))
        self.ends = <int64_t *>self._table.data
        self.store = store
        store.generations += 1
        self.generation = store.generations
        self.open = True
        return 0

    @property
    def position_holes_allowed(self):
        """False: there are none."""
        return False

    cdef GaplessStore opened(self):
        if not self.open:
            raise StaleOwner(f"the session (generation {self.generation}) is closed; open another")
        self.store.check_open()
        return self.store

    # For a subclass that has reservations, or rows to poison ----------------------------------------

    cdef int64_t reach(self, int64_t lay) noexcept:
        """Rows of a layer, reserved ones included."""
        return self.ends[lay]

    cdef void cancel(self) noexcept:
        """Cancels reservations of every layer."""

    cdef void drop(self, int64_t lay, int64_t first, int64_t last) noexcept:
        """Rows [first, last) lose their content."""

    # Checks ---------------------------------------------------------------------------------------

    cdef int at_boundary(self) except -1:
        cdef int64_t lay
        for lay in range(1, self.store.layers):
            if self.ends[lay] != self.ends[0]:
                raise StepIncomplete(
                    f"layer {lay} stands at {self.ends[lay] + self.store.base} and layer 0 at "
                    f"{self.ends[0] + self.store.base}; finish the step, or call abandon_step"
                )
        return 0

    cdef int in_turn(self, int64_t lay, int64_t end) except -1:
        if lay == 0:
            return self.at_boundary()
        if end > self.ends[lay - 1]:
            raise StepIncomplete(
                f"layer {lay} would reach {end + self.store.base}, past layer {lay - 1} at "
                f"{self.ends[lay - 1] + self.store.base}; go through the layers in turn"
            )
        return 0

    cdef int room_for(self, int64_t lay, int64_t end) except -1:
        """Room for a layer up to ``end``, once reservations are cancelled."""
        cdef GaplessStore store = self.store
        cdef int64_t i, free = store.units_total - store.units_used
        cdef int64_t needed = store.units(end) - store.units(self.ends[lay])
        for i in range(store.layers):
            free += store.units(self.reach(i)) - store.units(self.ends[i])
        if needed > free or end > store.capacity:
            raise PoolExhausted(
                f"{needed} x {store.unit_tokens} rows are needed in layer {lay}; {free} are free, "
                f"and a layer holds {store.capacity} rows at most; close or roll back a session, or "
                "open the store with more budget_bytes"
            )
        return 0

    cdef int check_append(self, int64_t lay, const int64_t *at, int64_t n) except -1:
        """Whether n > 0 ascending positions can be appended to a layer now."""
        cdef int64_t low = self.ends[lay] + self.store.base
        cdef int64_t high = self.store.base + self.store.capacity
        if not low <= at[0] <= at[n - 1] < high + n:
            raise OutOfRange(
                f"positions {at[0]} to {at[n - 1]}; allowed: {low} to {high - 1}"
            )
        if at[n - 1] != low + n - 1:
            raise HoleNotAllowed(
                f"positions {at[0]} to {at[n - 1]} leave holes after {low}; "
                f"{self.store.page_format} has none"
            )
        self.in_turn(lay, self.ends[lay] + n)
        self.room_for(lay, self.ends[lay] + n)
        return 0

    cdef int check_stored(self, int64_t lay, const int64_t *at, int64_t n) except -1:
        """`OutOfRange` unless there is a row at every position."""
        cdef int64_t i, base = self.store.base
        for i in range(n):
            if not 0 <= at[i] - base < self.ends[lay]:
                raise OutOfRange(
                    f"position is {at[i]}; allowed: {base} to {base + self.ends[lay] - 1}"
                )
        return 0

    # Changes --------------------------------------------------------------------------------------

    cdef void grow(self, int64_t lay, int64_t end) noexcept:
        self.store.units_used += self.store.units(end) - self.store.units(self.ends[lay])
        self.ends[lay] = end

    cdef void truncate(self, int64_t end) noexcept:
        """Drops rows and reservations from ``end`` on, in every layer."""
        cdef int64_t lay
        self.cancel()
        for lay in range(self.store.layers):
            if self.ends[lay] > end:
                self.drop(lay, end, self.ends[lay])
                self.grow(lay, end)

    def rollback_tail(self, n):
        """Drop the last n positions."""
        self.opened()
        cdef int64_t count = integer(n, "n")
        self.at_boundary()
        if not 0 <= count <= self.ends[0]:
            raise OutOfRange(f"n is {count}; allowed: 0 to {self.ends[0]}")
        if count:
            self.truncate(self.ends[0] - count)

    def abandon_step(self):
        """Drop the rows of a step that not every layer has finished."""
        self.opened()
        # No layer is ahead of the one before it.
        self.truncate(self.ends[self.store.layers - 1])

    def close(self):
        """Give every row back; any later verb is `StaleOwner`."""
        self.opened()
        self.at_boundary()
        self.truncate(0)
        self.open = False

    # What it shows --------------------------------------------------------------------------------

    def length(self, layer):
        """Highest valid or reserved position + 1."""
        self.opened()
        return self.store.base + self.reach(layer_index(layer, self.store.layers))

    def valid(self, layer):
        """bool (length - base_position,): True where a row is valid."""
        self.opened()
        cdef int64_t lay = layer_index(layer, self.store.layers)
        bits = np.zeros(self.reach(lay), np.bool_)
        bits[: self.ends[lay]] = True
        return bits

    # What there is not ----------------------------------------------------------------------------

    def _lacking(self, verb):
        self.opened()
        raise Unsupported(f"{self.store.page_format} has no {verb}; use a store with a page table")

    def invalidate(self, layer, positions):
        """`HoleNotAllowed`: no session can be opened with holes."""
        self.opened()
        raise HoleNotAllowed(f"{self.store.page_format} has no holes; use a store with a page table")

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
        self._lacking("spill")

    def begin_restore(self, valid):
        """`Unsupported`."""
        self._lacking("restore")

    def finish_restore(self):
        """`Unsupported`."""
        self._lacking("restore")

    def cancel_restore(self):
        """`Unsupported`."""
        self._lacking("restore")
