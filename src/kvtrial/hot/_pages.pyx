"""The page pool and its owners: steps, reservations, branches, restores.

Tables are kept in `_tables`, rows go in and out in `_paged`. Every verb checks first and changes
afterwards, so that an error changes nothing. Arguments s and lay are an owner's slot and a layer,
`index` is an entry of a page table, `at` holds absolute positions; ends and lengths inside count from
base_position.

Decided where the contract is silent: a session has room for 64 Ki positions or the whole pool,
whichever is more; an open reservation neither blocks a branch nor is seen by it; a reservation of
one layer cancels those of the others.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy, memset

from kvtrial.contract import (
    BranchDiverged,
    BranchesOpen,
    HoleNotAllowed,
    InvalidArgument,
    OutOfRange,
    PoolExhausted,
    SlotCancelled,
    StepIncomplete,
)

from kvtrial.hot._memory cimport Memory
from kvtrial.hot._tables cimport COMMITTED, IDLE, OPEN, SESSIONS, LayerTable, PageTables, low_bits


cdef class PagePool(PageTables):
    """Page tables with owners, of which each has a generation."""

    def __cinit__(self, *args):
        self._owner_memory = Memory(SESSIONS * sizeof(Owner))
        self.owners = <Owner *>self._owner_memory.data

    cdef int32_t copy_on_write(self, int64_t s, int64_t lay, int64_t index) noexcept:
        """The page of an entry, to be written: this owner's alone; a copy where it was shared, new where
        there was none.

        The page that a fork lies in always carries the parent's rows, even where the branch had
        given it back, and the parent too: `commit_prefix` then moves a page and never a row.
        """
        self.extend_to(s, lay, index)
        cdef int32_t *entry = self.ids(s, lay) + index
        cdef int32_t old = entry[0], source = old
        cdef int64_t branch = s
        if old >= 0 and self.references[old] == 1:
            return old
        while source < 0 and self.owners[branch].parent >= 0:
            if index != self.owners[branch].fork // self.tokens:
                break
            branch = self.owners[branch].parent
            if index < self.layer(branch, lay).pages:
                source = self.ids(branch, lay)[index]
        entry[0] = self.take()
        if source >= 0:
            memcpy(self.page(entry[0]), self.page(source), self.page_bytes)
        if old >= 0:
            self.give_back(old)
        return entry[0]

    # Reservations ---------------------------------------------------------------------------------

    cdef bint _reserved_only(self, int64_t s, int64_t lay) noexcept:
        """Whether an open reservation alone holds its page."""
        cdef LayerTable *layer = self.layer(s, lay)
        return layer.slot == OPEN and not self.words(s, lay)[layer.slot_start // self.tokens]

    cdef void cancel(self, int64_t s, int64_t lay) noexcept:
        cdef LayerTable *layer = self.layer(s, lay)
        if layer.slot == OPEN:
            if self._reserved_only(s, lay):
                self.clear_entry(s, lay, layer.slot_start // self.tokens)
            self.release_from(s, lay, self.pages_for(layer.end))
            self.owners[s].reservations -= 1
        layer.slot = IDLE

    cdef void cancel_all(self, int64_t s) noexcept:
        cdef int64_t lay
        if self.owners[s].reservations:
            for lay in range(self.layers):
                if self.layer(s, lay).slot == OPEN:
                    self.cancel(s, lay)

    # Checks ---------------------------------------------------------------------------------------

    cdef int at_boundary(self, int64_t s) except -1:
        cdef int64_t lay, first = self.layer(s, 0).end
        for lay in range(1, self.layers):
            if self.layer(s, lay).end != first:
                raise StepIncomplete(
                    f"layer {lay} stands at {self.layer(s, lay).end + self.base} and layer 0 at "
                    f"{first + self.base}; finish the step in every layer, or call abandon_step"
                )
        return 0

    cdef int _in_turn(self, int64_t s, int64_t lay, int64_t end) except -1:
        if lay == 0:
            return self.at_boundary(s)
        if end > self.layer(s, lay - 1).end:
            raise StepIncomplete(
                f"layer {lay} would reach {end + self.base}, past layer {lay - 1} at "
                f"{self.layer(s, lay - 1).end + self.base}; go through the layers in turn"
            )
        return 0

    cdef bint _takes_page(self, int64_t s, int64_t lay, int64_t index) noexcept:
        """Whether writing to an entry takes a page, once every reservation is cancelled."""
        if index >= self.layer(s, lay).pages:
            return True
        cdef int32_t page_id = self.ids(s, lay)[index]
        return page_id < 0 or self.references[page_id] > 1 or not self.words(s, lay)[index]

    cdef int _room_for(self, int64_t s, int64_t needed) except -1:
        cdef int64_t lay, free = self.free
        if self.owners[s].reservations:
            for lay in range(self.layers):
                free += self._reserved_only(s, lay)
        if needed > free:
            raise PoolExhausted(
                f"{needed} pages are needed and {free} of {self.pages} are free; close or roll back "
                "a session, or open the store with more budget_bytes"
            )
        return 0

    cdef int _check_new(self, int64_t s, int64_t lay, const int64_t *at, int64_t n) except -1:
        """New positions: from the end on, inside capacity, gapless where holes aren't allowed."""
        cdef int64_t i, low = self.layer(s, lay).end + self.base, expected = low
        cdef int64_t high = self.base + self.table_pages * self.tokens
        for i in range(n):
            if not low <= at[i] < high:
                raise OutOfRange(f"position is {at[i]}; allowed: {low} to {high - 1}")
            if at[i] != expected and not self.owners[s].holes:
                raise HoleNotAllowed(
                    f"position {expected} would be a hole; open the session with "
                    "position_holes_allowed=True"
                )
            expected = at[i] + 1
        return 0

    # Rows -----------------------------------------------------------------------------------------

    cdef int prepare_append(self, int64_t s, int64_t lay, const int64_t *at, int64_t n) except -1:
        """Checks an append of n > 0 ascending positions and cancels reservations.

        Afterwards `own` can't fail for these positions; `finish_append` ends it.
        """
        cdef int64_t i, index, previous = -1, needed = 0
        self._check_new(s, lay, at, n)
        self._in_turn(s, lay, at[n - 1] - self.base + 1)
        for i in range(n):
            index = (at[i] - self.base) // self.tokens
            if index != previous:
                needed += self._takes_page(s, lay, index)
                previous = index
        self._room_for(s, needed)
        self.cancel_all(s)
        self.layer(s, lay).slot = IDLE
        return 0

    cdef void finish_append(self, int64_t s, int64_t lay, int64_t end) noexcept:
        self.layer(s, lay).end = end
        self.owners[s].version += 1

    cdef int invalidate(self, int64_t s, int64_t lay, const int64_t *at, int64_t n) except -1:
        """Makes holes; a page that holds nothing else goes back. No page is copied for a hole."""
        cdef int64_t i, index, end = self.layer(s, lay).end
        cdef uint64_t *word
        if not self.owners[s].holes:
            raise HoleNotAllowed(
                "the session was opened without holes; open it with position_holes_allowed=True"
            )
        for i in range(n):
            if not 0 <= at[i] - self.base < end:
                raise OutOfRange(
                    f"position is {at[i]}; allowed: {self.base} to {self.base + end - 1}"
                )
        if not n:
            return 0
        self.cancel_all(s)
        self.layer(s, lay).slot = IDLE
        for i in range(n):
            index = (at[i] - self.base) // self.tokens
            word = self.words(s, lay) + index
            word[0] &= ~((<uint64_t>1) << ((at[i] - self.base) % self.tokens))
            if not word[0]:
                self.clear_entry(s, lay, index)
        self.owners[s].version += 1
        return 0

    cdef int reserve(
        self, int64_t s, int64_t lay, const int64_t *at, int64_t n, int64_t *row
    ) except -2:
        """The page of a reservation and its first row in it; -1 where there can't be one."""
        cdef LayerTable *layer = self.layer(s, lay)
        cdef int64_t i, start, index
        if not n or at[n - 1] >= self.base + self.table_pages * self.tokens:
            return -1
        for i in range(1, n):
            if at[i] != at[i - 1] + 1:
                return -1
        start = at[0] - self.base
        if start < layer.end or (start > layer.end and not self.owners[s].holes):
            return -1
        index, row[0] = start // self.tokens, start % self.tokens
        if row[0] + n > self.tokens:
            return -1
        self._in_turn(s, lay, start + n)
        self._room_for(s, self._takes_page(s, lay, index))
        self.cancel_all(s)
        cdef int32_t page_id = self.copy_on_write(s, lay, index)
        self.poison_rows(page_id, row[0], row[0] + n)
        layer.slot, layer.slot_start, layer.slot_n = OPEN, start, n
        self.owners[s].reservations += 1
        self.owners[s].version += 1
        return page_id

    cdef int commit(self, int64_t s, int64_t lay, const int64_t *at, int64_t n) except -1:
        cdef LayerTable *layer = self.layer(s, lay)
        cdef int64_t i, start
        if not n:
            return 0
        start = at[0] - self.base
        cdef bint matches = layer.slot != IDLE and layer.slot_start == start and layer.slot_n == n
        for i in range(1, n):
            matches = matches and at[i] == at[i - 1] + 1
        if not matches:
            raise SlotCancelled(
                f"no reservation of just these rows from {at[0]} on is open in layer {lay}; another "
                "mutation cancelled it, reserve again"
            )
        if layer.slot == OPEN:
            self.words(s, lay)[start // self.tokens] |= low_bits(n) << (start % self.tokens)
            layer.slot = COMMITTED
            layer.end = start + n
            self.owners[s].reservations -= 1
            self.owners[s].version += 1
        return 0

    cdef int find_valid(self, int64_t s, int64_t lay, const int64_t *at, int64_t n) except -1:
        """`OutOfRange` unless a row is valid at every position."""
        cdef int64_t i, slot, end = self.layer(s, lay).end
        for i in range(n):
            slot = at[i] - self.base
            if not 0 <= slot < end:
                raise OutOfRange(
                    f"position is {at[i]}; allowed: {self.base} to {self.base + end - 1}"
                )
            if not self.words(s, lay)[slot // self.tokens] >> (slot % self.tokens) & 1:
                raise OutOfRange(f"position {at[i]} is a hole; valid() shows which rows there are")
        return 0

    # Owners and branches --------------------------------------------------------------------------

    cdef int64_t open_owner(self, bint holes) except -1:
        cdef int64_t s, lay
        cdef Owner *owner
        for s in range(SESSIONS):
            owner = self.owners + s
            if not owner.open:
                owner.open, owner.holes = True, holes
                owner.parent, owner.restoring = -1, -1
                owner.version, owner.branches, owner.reservations = 0, 0, 0
                for lay in range(self.layers):
                    memset(self.layer(s, lay), 0, sizeof(LayerTable))
                return s
        raise PoolExhausted(
            f"all {SESSIONS} sessions and branches of the store are open; close one"
        )

    cdef int close_owner(self, int64_t s) except -1:
        self.at_boundary(s)
        if self.owners[s].branches:
            raise BranchesOpen(
                f"{self.owners[s].branches} branches are open; close or commit them first"
            )
        self._discard(s)
        return 0

    cdef void _discard(self, int64_t s) noexcept:
        cdef Owner *owner = self.owners + s
        cdef int64_t lay
        for lay in range(self.layers):
            self.release_from(s, lay, 0)
        if owner.parent >= 0:
            self.owners[owner.parent].branches -= 1
        owner.open = False
        # A stale handle differs from the next owner's, past 2^32 openings of a slot too.
        owner.generation += 1

    cdef int64_t begin_branch(self, int64_t s) except -1:
        cdef int64_t child, lay, index, fork = self.layer(s, 0).end
        self.at_boundary(s)
        child = self.open_owner(self.owners[s].holes)
        self.owners[s].branches += 1
        self.owners[child].parent = <int32_t>s
        self.owners[child].fork = fork
        self.owners[child].parent_version = self.owners[s].version
        for lay in range(self.layers):
            for index in range(min(self.pages_for(fork), self.layer(s, lay).pages)):
                self.extend_to(child, lay, index)
                if self.words(s, lay)[index]:
                    self.words(child, lay)[index] = self.words(s, lay)[index]
                    self.ids(child, lay)[index] = self.ids(s, lay)[index]
                    self.references[self.ids(s, lay)[index]] += 1
            self.layer(child, lay).end = fork
        return child

    cdef int commit_prefix(self, int64_t s, int64_t k) except -1:
        cdef Owner *owner = self.owners + s
        cdef int64_t lay, appended
        if owner.parent < 0:
            raise InvalidArgument("the session is no branch; commit what begin_branch gave")
        self.at_boundary(s)
        if owner.branches:
            raise BranchesOpen(f"{owner.branches} branches are open; close or commit them first")
        appended = self.layer(s, 0).end - owner.fork
        if not 0 <= k <= appended:
            raise OutOfRange(f"k is {k}; allowed: 0 to {appended}")
        if self.owners[owner.parent].version != owner.parent_version:
            raise BranchDiverged(
                f"the parent has moved since the branch began at {owner.fork + self.base}; close "
                "the branch and begin another"
            )
        if k:
            self.cancel_all(s)
            self.cancel_all(owner.parent)
            for lay in range(self.layers):
                self._move_pages(s, lay, owner.fork + k)
            self.owners[owner.parent].version += 1
        self._discard(s)
        return 0

    cdef void _move_pages(self, int64_t s, int64_t lay, int64_t end) noexcept:
        """The branch's pages from the fork on become the parent's, cut at ``end``."""
        cdef int64_t parent = self.owners[s].parent, fork = self.owners[s].fork
        cdef int64_t index, first
        cdef uint64_t kept, wanted
        for index in range(fork // self.tokens, self.pages_for(end)):
            first = index * self.tokens
            kept = low_bits(fork - first)
            wanted = low_bits(end - first) & ~kept
            self.extend_to(parent, lay, index)
            if index >= self.layer(s, lay).pages or not self.words(s, lay)[index] & wanted:
                continue
            # Invariant of `own`: the branch's page carries the parent's rows below the fork.
            kept &= self.words(parent, lay)[index]
            wanted &= self.words(s, lay)[index]
            self.clear_entry(parent, lay, index)
            self.ids(parent, lay)[index] = self.ids(s, lay)[index]
            self.words(parent, lay)[index] = kept | wanted
            self.ids(s, lay)[index] = -1
            self.words(s, lay)[index] = 0
            self.poison_rows(self.ids(parent, lay)[index], min(end - first, self.tokens), self.tokens)
        self.layer(parent, lay).end = end
        self.layer(parent, lay).slot = IDLE

    cdef int rollback_tail(self, int64_t s, int64_t n) except -1:
        cdef int64_t child, end = self.layer(s, 0).end
        cdef int64_t fork = self.owners[s].fork if self.owners[s].parent >= 0 else 0
        self.at_boundary(s)
        if not 0 <= n <= end - fork:
            raise OutOfRange(f"n is {n}; allowed: 0 to {end - fork}")
        if not n:
            return 0
        for child in range(SESSIONS):
            if self.owners[child].open and self.owners[child].parent == s:
                if self.owners[child].fork > end - n:
                    raise BranchesOpen(
                        f"a branch forks at {self.owners[child].fork + self.base}, past "
                        f"{end - n + self.base}; close it first"
                    )
        self.truncate(s, end - n)
        return 0

    cdef void truncate(self, int64_t s, int64_t end) noexcept:
        """Drops rows and reservations from ``end`` on, in every layer. No row is copied."""
        cdef int64_t lay, index = end // self.tokens, rows = end % self.tokens
        self.cancel_all(s)
        for lay in range(self.layers):
            if self.layer(s, lay).end <= end:
                continue
            self.layer(s, lay).slot = IDLE
            self.release_from(s, lay, self.pages_for(end))
            if rows and index < self.layer(s, lay).pages:
                self.words(s, lay)[index] &= low_bits(rows)
                if not self.words(s, lay)[index]:
                    self.clear_entry(s, lay, index)
                elif self.references[self.ids(s, lay)[index]] == 1:
                    self.poison_rows(self.ids(s, lay)[index], rows, self.tokens)
            self.layer(s, lay).end = end
            self.owners[s].version += 1

    # Restores -------------------------------------------------------------------------------------

    cdef int begin_restore(self, int64_t s, const unsigned char *valid, int64_t rows) except -1:
        cdef Owner *owner = self.owners + s
        cdef int64_t lay, i, needed = 0, last
        if owner.restoring >= 0:
            raise StepIncomplete("a restore is open; finish_restore or cancel_restore first")
        if owner.parent >= 0 or self.layer(s, 0).end:
            raise InvalidArgument("the session is a branch or holds rows; restore into a new one")
        if owner.branches:  # whose commit would replace the pages that are being filled
            raise BranchesOpen(f"{owner.branches} branches are open; close them first")
        if rows > self.table_pages * self.tokens:
            raise OutOfRange(
                f"valid has {rows} rows; allowed: 0 to {self.table_pages * self.tokens}"
            )
        for lay in range(self.layers):
            last = -1
            for i in range(rows):
                if not valid[lay * rows + i]:
                    if not owner.holes:
                        raise HoleNotAllowed(
                            f"position {self.base + i} of layer {lay} is a hole; open the session "
                            "with position_holes_allowed=True"
                        )
                elif i // self.tokens != last:
                    last = i // self.tokens
                    needed += 1
        self._room_for(s, needed)
        self.cancel_all(s)
        for lay in range(self.layers):
            if rows:
                self.extend_to(s, lay, self.pages_for(rows) - 1)
            for i in range(rows):
                if valid[lay * rows + i]:
                    if self.ids(s, lay)[i // self.tokens] < 0:
                        self.ids(s, lay)[i // self.tokens] = self.take()
                    self.words(s, lay)[i // self.tokens] |= (<uint64_t>1) << (i % self.tokens)
        owner.restoring = rows
        return 0

    cdef int finish_restore(self, int64_t s) except -1:
        cdef int64_t lay
        if self.owners[s].restoring < 0:
            raise InvalidArgument("no restore is open; call begin_restore first")
        for lay in range(self.layers):
            self.layer(s, lay).end = self.owners[s].restoring
        self.owners[s].restoring = -1
        self.owners[s].version += 1
        return 0

    cdef int cancel_restore(self, int64_t s) except -1:
        cdef int64_t lay
        if self.owners[s].restoring < 0:
            raise InvalidArgument("no restore is open; call begin_restore first")
        for lay in range(self.layers):
            self.release_from(s, lay, 0)
        self.owners[s].restoring = -1
        return 0
