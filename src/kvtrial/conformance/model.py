"""A store as a dictionary: position -> row, per layer, with the contract's rules and nothing else.

`ModelSession` says of each verb whether a store must refuse it, and with what (`Refusal`), and what
it does otherwise. Pages are opaque objects in lists: two tables share a page if they hold the same
object. A store is right when it shows the same rows, and its page ids form the same pattern.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvtrial.contract import (
    F32,
    BranchDiverged,
    BranchesOpen,
    HoleNotAllowed,
    InvalidArgument,
    KVError,
    OutOfRange,
    StepIncomplete,
)

Row = tuple[F32, F32]
Errors = frozenset[type[KVError]]
NONE: Errors = frozenset()


@dataclass(frozen=True)
class Refusal:
    """Errors of which one must be raised; and errors that the contract leaves open."""

    must: Errors = NONE
    may: Errors = NONE


class Page:
    """One page; only its identity matters."""


@dataclass(eq=False)
class ModelStore:
    """All open sessions of one store."""

    layers: int
    page_tokens: int
    base: int = 0
    sessions: list[ModelSession] = field(default_factory=list)

    def open_session(self, holes_allowed: bool) -> ModelSession:
        return ModelSession(self, holes_allowed)

    def references(self, page: Page) -> int:
        """Page-table entries that hold the page, over all sessions."""
        return sum(p is page for s in self.sessions for table in s.tables for p in table)

    @property
    def pages_used(self) -> int:
        return len({p for s in self.sessions for table in s.tables for p in table if p is not None})


class ModelSession:
    """One sequence: rows and page tables by layer."""

    def __init__(
        self, store: ModelStore, holes_allowed: bool, parent: ModelSession | None = None
    ) -> None:
        self.store = store
        self.holes_allowed = holes_allowed
        self.parent = parent
        self.children: list[ModelSession] = []
        #: Counts what moves a parent away from its branches.
        self.moves = 0
        self.rows: list[dict[int, Row]] = [{} for _ in range(store.layers)]
        self.tables: list[list[Page | None]] = [[] for _ in range(store.layers)]
        self.ends = [store.base] * store.layers
        self.reserved: list[range | None] = [None] * store.layers
        #: A hole made below the fork: what a commit does with it is not said.
        self.prefix_changed = False
        if parent is not None:
            parent.children.append(self)
            self.rows = [dict(rows) for rows in parent.rows]
            self.tables = [list(table) for table in parent.tables]
            self.ends = list(parent.ends)
            self.parent_moves = parent.moves
            for layer in range(store.layers):
                self._prune(layer)
        self.fork = self.ends[0]
        store.sessions.append(self)

    # What it shows -------------------------------------------------------------------------------

    def length(self, layer: int) -> int:
        reserved = self.reserved[layer]
        ends = [max(self.rows[layer], default=self.store.base - 1) + 1]
        return max(ends + ([reserved.stop] if reserved else []))

    def valid(self, layer: int) -> list[int]:
        return sorted(self.rows[layer])

    @property
    def at_boundary(self) -> bool:
        return len(set(self.ends)) == 1

    # Steps ---------------------------------------------------------------------------------------

    def _out_of_turn(self, layer: int, stop: int) -> Errors:
        late = not self.at_boundary if layer == 0 else stop > self.ends[layer - 1]
        return frozenset({StepIncomplete}) if late else NONE

    def _boundary(self) -> Refusal:
        if not self.at_boundary:
            return Refusal(must=frozenset({StepIncomplete}))
        # Whether a reservation has begun the step is not said.
        return Refusal(may=frozenset({StepIncomplete}) if any(self.reserved) else NONE)

    # Pages ---------------------------------------------------------------------------------------

    def _index(self, position: int) -> int:
        return (position - self.store.base) // self.store.page_tokens

    def pages_to_take(self, layer: int, positions: Iterable[int]) -> int:
        """Pages that writing ``positions`` takes from the pool: new ones, and copies of shared."""
        table = self.tables[layer]
        taken = 0
        for index in {self._index(p) for p in positions}:
            page = table[index] if index < len(table) else None
            taken += page is None or self.store.references(page) > 1
        return taken

    def _take(self, layer: int, positions: Iterable[int]) -> None:
        table = self.tables[layer]
        for index in {self._index(p) for p in positions}:
            table.extend([None] * (index + 1 - len(table)))
            page = table[index]
            if page is None or self.store.references(page) > 1:
                table[index] = Page()

    def _prune(self, layer: int) -> None:
        """Give back pages that hold no row, and cut the table after the last that does."""
        kept = {self._index(p) for p in (*self.rows[layer], *(self.reserved[layer] or ()))}
        table = [p if i in kept else None for i, p in enumerate(self.tables[layer])]
        while table and table[-1] is None:
            table.pop()
        self.tables[layer] = table

    def _mutated(self) -> None:
        self.moves += 1
        for layer, reserved in enumerate(self.reserved):
            if reserved is not None:
                self.reserved[layer] = None
                self._prune(layer)

    # Verbs ---------------------------------------------------------------------------------------

    def refuses_append(self, layer: int, positions: list[int]) -> Refusal:
        if not positions:
            return Refusal()
        must = self._out_of_turn(layer, positions[-1] + 1)
        whole = list(range(self.ends[layer], positions[-1] + 1))
        if not self.holes_allowed and positions != whole:
            must |= {HoleNotAllowed}
        return Refusal(must)

    def append(self, layer: int, positions: list[int], rows: list[Row]) -> None:
        if positions:
            self._mutated()
            self._take(layer, positions)
            self.rows[layer].update(zip(positions, rows, strict=True))
            self.ends[layer] = positions[-1] + 1

    def reserve(self, layer: int, positions: range) -> None:
        self._mutated()
        self.reserved[layer] = positions
        self._take(layer, positions)

    def commit_slot(self, layer: int, rows: list[Row]) -> None:
        positions = self.reserved[layer]
        assert positions is not None
        self.reserved[layer] = None
        self.moves += 1
        self.rows[layer].update(zip(positions, rows, strict=True))
        self.ends[layer] = positions.stop

    def refuses_invalidate(self, layer: int, positions: list[int]) -> Refusal:
        must: Errors = frozenset() if self.holes_allowed else frozenset({HoleNotAllowed})
        if any(not self.store.base <= p < self.ends[layer] for p in positions):
            must |= {OutOfRange}
        return Refusal(must)

    def invalidate(self, layer: int, positions: list[int]) -> None:
        self._mutated()
        for position in positions:
            self.rows[layer].pop(position, None)
            self.prefix_changed |= self.parent is not None and position < self.fork
        self._prune(layer)

    def refuses_rollback(self, n: int) -> Refusal:
        boundary = self._boundary()
        must = boundary.must
        if n < 0 or n > self.ends[0] - self.fork_or_base:
            must |= {OutOfRange}
        if any(child.fork > self.ends[0] - n for child in self.children):
            must |= {BranchesOpen}
        return Refusal(must, boundary.may)

    @property
    def fork_or_base(self) -> int:
        return self.fork if self.parent is not None else self.store.base

    def rollback(self, n: int) -> None:
        if n:
            self._mutated()
            self._drop_from(self.ends[0] - n)

    def abandon_step(self) -> None:
        if not self.at_boundary or any(self.reserved):
            self._mutated()
            self._drop_from(min(self.ends))

    def _drop_from(self, end: int) -> None:
        for layer in range(self.store.layers):
            self.rows[layer] = {p: row for p, row in self.rows[layer].items() if p < end}
            self.ends[layer] = end
            self._prune(layer)

    def refuses_branch(self) -> Refusal:
        return self._boundary()

    def branch(self) -> ModelSession:
        return ModelSession(self.store, self.holes_allowed, self)

    def refuses_commit(self, k: int) -> Refusal:
        if self.parent is None:
            return Refusal(must=frozenset({InvalidArgument}))
        boundary = self._boundary()
        must, may = boundary.must, boundary.may
        if self.children:
            must |= {BranchesOpen}
        if not 0 <= k <= self.ends[0] - self.fork:
            must |= {OutOfRange}
        if self.parent.moves != self.parent_moves:
            moved: Errors = frozenset({BranchDiverged})
            if not self.parent.at_boundary:
                may |= {StepIncomplete}
            must, may = (must | moved, may) if k else (must, may | moved)
        return Refusal(must, may)

    def commit_prefix(self, k: int) -> None:
        parent = self.parent
        assert parent is not None
        if k:
            parent._mutated()
            stop = self.fork + k
            for layer in range(self.store.layers):
                fresh = {p: row for p, row in self.rows[layer].items() if self.fork <= p < stop}
                parent.rows[layer].update(fresh)
                parent.ends[layer] = stop
                mine, theirs = self.tables[layer], parent.tables[layer]
                for index in {self._index(p) for p in fresh}:
                    theirs.extend([None] * (index + 1 - len(theirs)))
                    theirs[index] = mine[index]
                parent._prune(layer)
        self._forget()

    def refuses_close(self) -> Refusal:
        boundary = self._boundary()
        must = boundary.must | (frozenset({BranchesOpen}) if self.children else NONE)
        return Refusal(must, boundary.may)

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.store.sessions.remove(self)
        if self.parent is not None:
            self.parent.children.remove(self)


def stacked(rows: list[Row], shape: tuple[int, int]) -> tuple[F32, F32]:
    """K and V (n, H_kv, D) of a list of rows."""
    if not rows:
        return np.zeros((0, *shape), np.float32), np.zeros((0, *shape), np.float32)
    return np.stack([k for k, _ in rows]), np.stack([v for _, v in rows])
