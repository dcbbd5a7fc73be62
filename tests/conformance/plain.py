"""A candidate from another package: a small paged store in NumPy. It must pass the whole suite."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from kvtrial.contract import (
    FP32,
    BranchDiverged,
    BranchesOpen,
    Candidate,
    Capability,
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
    StoreSpec,
    merge,
)


def _integer(value: Any, name: str, error: type[KVError] = InvalidArgument) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise error(f"{name} is {value!r}; give an integer") from None


def _array(x: Any, shape: tuple[int, ...], name: str, writable: bool = False) -> np.ndarray:
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.shape != shape:
        raise InvalidArgument(f"{name} must be float32 of shape {shape}")
    if not x.flags.c_contiguous or not x.flags.aligned or (writable and not x.flags.writeable):
        wanted = "contiguous, aligned" + (", writable" if writable else "")
        raise InvalidArgument(f"{name} must be {wanted}")
    return x


class PlainStore:
    """Pages of one layer's P rows: float32 (2, H_kv, P, D)."""

    page_format = "plain-fp32"

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self.row_bytes = 2 * 4 * spec.local_kv_heads * spec.head_dim
        self.page_nbytes = self.row_bytes * spec.page_tokens
        pages = spec.budget_bytes // self.page_nbytes
        if not pages:
            raise PoolExhausted(f"{spec.budget_bytes} bytes hold no page of {self.page_nbytes}")
        self.ledger = spec.ledger or MemoryLedger(spec.budget_bytes)
        self.token = self.ledger.reserve("plain", pages * self.page_nbytes)
        shape = (pages, 2, spec.local_kv_heads, spec.page_tokens, spec.head_dim)
        self.memory = np.full(shape, np.nan, np.float32)
        self.counts = np.zeros(pages, np.int32)
        self.free = list(range(pages))[::-1]
        self.sessions: set[PlainSession] = set()
        self.open = True

    @property
    def pages_total(self) -> int:
        return len(self.memory)

    @property
    def pages_free(self) -> int:
        return len(self.free)

    @property
    def resident_bytes(self) -> int:
        return (self.pages_total - self.pages_free) * self.page_nbytes

    def take(self) -> int:
        page = self.free.pop()
        self.counts[page] = 1
        return page

    def drop(self, page: int) -> None:
        self.counts[page] -= 1
        if self.counts[page] == 0:
            self.memory[page] = np.nan
            self.free.append(page)

    def reference_counts(self) -> np.ndarray:
        return self.counts.copy()

    def open_session(self, position_holes_allowed: bool = False) -> PlainSession:
        if not self.open:
            raise StaleOwner("the store is closed; open another")
        return self.session_type(self, position_holes_allowed)

    def page_table(self, session: PlainSession, layer: int) -> PageTable:
        if not isinstance(session, PlainSession) or session.store is not self:
            raise InvalidArgument(f"{session!r} is no session of this store")
        return session.page_table(layer)

    def close(self) -> None:
        if not self.open:
            raise StaleOwner("the store is closed already")
        self.open = False
        self.ledger.release(self.token)
        for session in self.sessions:
            session.live = False


class PlainSession:
    """Bits, ends and page ids by layer."""

    def __init__(self, store: PlainStore, holes: bool, parent: PlainSession | None = None) -> None:
        self.store, self.position_holes_allowed, self.parent = store, holes, parent
        self.generation = 1
        self.live = True
        self.children = 0
        self.forks: list[int] = []
        self.moves = 0
        layers = store.spec.layers
        self.bits = [np.zeros(0, bool) for _ in range(layers)]  # up to the layer's end
        self.tables: list[list[int]] = [[] for _ in range(layers)]
        self.slot: list[range | None] = [None] * layers
        self.committed: list[range | None] = [None] * layers
        self.restoring: np.ndarray | None = None
        if parent is not None:
            self.parent_moves = parent.moves
            self.bits = [bits.copy() for bits in parent.bits]
            self.tables = [list(table) for table in parent.tables]
            for table in self.tables:
                for page in table:
                    if page >= 0:
                        store.counts[page] += 1
            for layer in range(layers):
                self.prune(layer)
            parent.forks.append(len(self.bits[0]))
        self.fork = len(self.bits[0])
        store.sessions.add(self)

    # Doors

    def alive(self) -> None:
        if not self.live:
            raise StaleOwner("this handle is closed; open another session")

    def layer(self, layer: Any) -> int:
        self.alive()
        layer = _integer(layer, "layer")
        if not 0 <= layer < self.store.spec.layers:
            raise InvalidArgument(f"layer is {layer}; allowed: 0 to {self.store.spec.layers - 1}")
        return layer

    def where(self, positions: Any) -> np.ndarray:
        """Positions as offsets from base_position."""
        at = np.asarray(positions)
        if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
            raise InvalidArgument(f"positions must be integers (n,), not {at.dtype} {at.shape}")
        at = at.astype(np.int64) - self.store.spec.base_position
        if at.size and (at.min() < 0 or at.max() > 2**40 or (np.diff(at) <= 0).any()):
            raise OutOfRange(f"positions {positions} must ascend from base_position")
        return at

    def boundary(self) -> None:
        self.alive()
        if len({len(bits) for bits in self.bits}) != 1:
            raise StepIncomplete("finish the step in every layer, or abandon_step")

    # Pages

    def prune(self, layer: int) -> None:
        page = self.store.spec.page_tokens
        table = self.tables[layer]
        slot = self.slot[layer]
        for index, number in enumerate(table):
            span = range(index * page, (index + 1) * page)
            held = self.bits[layer][span.start : span.stop].any()
            held = held or (slot is not None and slot.start in span)
            if number >= 0 and not held:
                self.store.drop(number)
                table[index] = -1
        while table and table[-1] < 0:
            table.pop()

    def take(self, layer: int, at: np.ndarray) -> None:
        """Own, unshared pages for the offsets, or PoolExhausted and no change."""
        store, table = self.store, self.tables[layer]
        indices = sorted(set((at // store.spec.page_tokens).tolist()))
        missing = [
            i for i in indices if i >= len(table) or table[i] < 0 or store.counts[table[i]] > 1
        ]
        if len(missing) > store.pages_free:
            raise PoolExhausted(f"{len(missing)} pages wanted, {store.pages_free} free")
        for index in missing:
            table.extend([-1] * (index + 1 - len(table)))
            fresh = store.take()
            source = table[index] if table[index] >= 0 else self.inherited(layer, index)
            if source >= 0:
                store.memory[fresh] = store.memory[source]
            if table[index] >= 0:
                store.drop(table[index])
            table[index] = fresh

    def inherited(self, layer: int, index: int) -> int:
        """The page of an ancestor whose rows below the fork belong here too, or -1."""
        owner = self
        while owner.parent is not None and owner.fork // self.store.spec.page_tokens == index:
            owner = owner.parent
            if index < len(owner.tables[layer]) and owner.tables[layer][index] >= 0:
                return owner.tables[layer][index]
        return -1

    def mutated(self) -> None:
        self.moves += 1
        for layer in range(len(self.slot)):
            self.committed[layer] = None
            if self.slot[layer] is not None:
                self.slot[layer] = None
                self.prune(layer)

    def cells(self, layer: int, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        page = self.store.spec.page_tokens
        table = np.asarray(self.tables[layer], np.int64)
        return table[at // page], at % page

    # Rows

    def writable(self, layer: int, at: np.ndarray) -> None:
        end = len(self.bits[layer])
        if at[0] < end:
            raise OutOfRange(f"position {at[0]} was appended before; the next is {end}")
        whole = at[0] == end and at[-1] - at[0] + 1 == len(at)
        if not self.position_holes_allowed and not whole:
            raise HoleNotAllowed("positions were left out; open the session with holes allowed")
        ends = [len(bits) for bits in self.bits]
        if (len(set(ends)) != 1) if layer == 0 else at[-1] >= ends[layer - 1]:
            raise StepIncomplete(f"layer {layer} is out of turn; ends are {ends}")

    def append(self, layer: Any, positions: Any, k: Any, v: Any) -> None:
        layer, at = self.layer(layer), self.where(positions)
        spec = self.store.spec
        shape = (len(at), spec.local_kv_heads, spec.head_dim)
        k, v = _array(k, shape, "k"), _array(v, shape, "v")
        if not len(at):
            return
        self.writable(layer, at)
        slots, self.slot = self.slot, [None] * spec.layers
        try:
            self.take(layer, at)
        except PoolExhausted:
            self.slot = slots
            raise
        self.slot = slots
        self.mark(layer, at)
        self.mutated()
        pages, lanes = self.cells(layer, at)
        self.store.memory[pages, 0, :, lanes] = k
        self.store.memory[pages, 1, :, lanes] = v

    def mark(self, layer: int, at: np.ndarray) -> None:
        bits = np.zeros(at[-1] + 1, bool)
        bits[: len(self.bits[layer])] = self.bits[layer]
        bits[at] = True
        self.bits[layer] = bits

    def invalidate(self, layer: Any, positions: Any) -> None:
        layer, at = self.layer(layer), self.where(positions)
        if not self.position_holes_allowed:
            raise HoleNotAllowed("open the session with holes allowed")
        if len(at):
            if at[-1] >= len(self.bits[layer]):
                raise OutOfRange(f"position {at[-1]} is not stored")
            self.mutated()
            self.bits[layer][at] = False
            self.prune(layer)

    def reserve_slot(self, layer: Any, positions: Any) -> tuple[np.ndarray, np.ndarray] | None:
        layer, at = self.layer(layer), self.where(positions)
        page = self.store.spec.page_tokens
        if not len(at) or at[0] // page != at[-1] // page or at[-1] - at[0] + 1 != len(at):
            return None
        if at[0] != len(self.bits[layer]):
            return None
        self.writable(layer, at)
        self.take(layer, at)
        self.mutated()
        self.take(layer, at)
        self.slot[layer] = range(int(at[0]), int(at[-1]) + 1)
        lanes = slice(at[0] % page, at[-1] % page + 1)
        rows = self.store.memory[self.tables[layer][at[0] // page]][:, :, lanes]
        return rows[0].swapaxes(0, 1), rows[1].swapaxes(0, 1)

    def commit_slot(self, layer: Any, positions: Any) -> None:
        layer, at = self.layer(layer), self.where(positions)
        wanted = range(int(at[0]), int(at[-1]) + 1) if len(at) else None
        if wanted is not None and wanted == self.committed[layer]:
            return
        if wanted is None or self.slot[layer] != wanted:
            raise SlotCancelled("no open reservation of these positions; reserve again")
        self.slot[layer] = None
        self.mark(layer, at)
        self.moves += 1
        self.committed[layer] = wanted

    def read(self, layer: Any, positions: Any) -> tuple[np.ndarray, np.ndarray]:
        layer, at = self.layer(layer), self.where(positions)
        if len(at) and (at[-1] >= len(self.bits[layer]) or not self.bits[layer][at].all()):
            raise OutOfRange("a position is not valid")
        if not len(at):
            shape = (0, self.store.spec.local_kv_heads, self.store.spec.head_dim)
            return np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        pages, lanes = self.cells(layer, at)
        return self.store.memory[pages, 0, :, lanes], self.store.memory[pages, 1, :, lanes]

    def length(self, layer: Any) -> int:
        layer = self.layer(layer)
        valid = np.flatnonzero(self.bits[layer])
        end = int(valid[-1]) + 1 if len(valid) else 0
        slot = self.slot[layer]
        return self.store.spec.base_position + max(end, slot.stop if slot else 0)

    def valid(self, layer: Any) -> np.ndarray:
        layer = self.layer(layer)
        shown = np.zeros(self.length(layer) - self.store.spec.base_position, bool)
        bits = self.bits[layer][: len(shown)]
        shown[: len(bits)] = bits
        return shown

    def page_table(self, layer: Any) -> PageTable:
        layer = self.layer(layer)
        return PageTable(np.asarray(self.tables[layer], np.int32), self.length(layer))

    # Attention

    def rows_of(self, layer: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        at = start + np.flatnonzero(self.bits[layer][start:stop])
        return self.read(layer, at + self.store.spec.base_position)

    def softmax(
        self, layer: int, q: np.ndarray, scale: float, span: tuple[int, int], heads: tuple[int, int]
    ) -> Partial:
        k, v = self.rows_of(layer, *span)
        q_heads, head_dim = q.shape
        top = np.full(q_heads, -np.inf, np.float32)
        total, output = np.zeros(q_heads, np.float32), np.zeros((q_heads, head_dim), np.float32)
        if len(k):
            low, high = heads
            group = self.store.spec.group
            mine = slice(low * group, high * group)
            first = self.store.spec.heads[0]
            kv = np.arange(low, high).repeat(group) - first
            scores = np.einsum("nhd,hd->hn", k[:, kv], q[mine]) * np.float32(scale)
            top[mine] = scores.max(axis=1)
            # Scores of -inf weigh nothing, all of them too.
            weights = np.exp(scores - np.where(np.isneginf(top[mine]), 0, top[mine])[:, None])
            total[mine] = weights.sum(axis=1)
            output[mine] = np.einsum("hn,nhd->hd", weights, v[:, kv])
        return Partial(top, total, output)

    def attend(self, layer: Any, q: Any, out: Any, scale: float) -> None:
        layer = self.layer(layer)
        spec = self.store.spec
        q = _array(q, (spec.q_heads, spec.head_dim), "q")
        out = _array(out, q.shape, "out", writable=True)
        self.attend_rows(layer, q, out, self.scale(scale), len(self.bits[layer]))

    def attend_rows(self, layer: int, q: Any, out: Any, scale: float, stop: int) -> None:
        low, high = self.store.spec.heads
        part = self.softmax(layer, q, scale, (0, stop), (low, high))
        mine = slice(low * self.store.spec.group, high * self.store.spec.group)
        out[mine] = merge([part])[mine]

    def scale(self, scale: Any) -> float:
        if not isinstance(scale, (int, float, np.floating)) or not np.isfinite(scale):
            raise InvalidArgument(f"scale is {scale!r}; give a finite number")
        return float(scale)

    def attend_block(self, layer: Any, q: Any, out: Any, scale: float) -> None:
        layer = self.layer(layer)
        spec = self.store.spec
        n = len(q) if isinstance(q, np.ndarray) else -1
        q = _array(q, (n, spec.q_heads, spec.head_dim), "q")
        out = _array(out, q.shape, "out", writable=True)
        end = int(np.flatnonzero(self.bits[layer]).max(initial=-1)) + 1
        if n > end:
            raise OutOfRange(f"{n} queries over {end} positions")
        for i in range(n):
            self.attend_rows(layer, q[i], out[i], self.scale(scale), end - n + i + 1)

    def attend_partial(
        self, layer: Any, q: Any, scale: float, *, kv_heads: Any = None, positions: Any = None
    ) -> Partial:
        layer = self.layer(layer)
        spec = self.store.spec
        q = _array(q, (spec.q_heads, spec.head_dim), "q")
        low, high = spec.heads if kv_heads is None else kv_heads
        if not spec.heads[0] <= low <= high <= spec.heads[1]:
            raise OutOfRange(f"kv_heads {kv_heads} are not inside {spec.heads}")
        base = spec.base_position
        start, stop = (base, base + len(self.bits[layer])) if positions is None else positions
        if not 0 <= start <= stop:
            raise OutOfRange(f"positions {positions} are no range")
        span = max(start - base, 0), max(stop - base, 0)
        return self.softmax(layer, q, self.scale(scale), span, (low, high))

    # Branches

    def begin_branch(self) -> PlainSession:
        self.boundary()
        self.children += 1
        return type(self)(self.store, self.position_holes_allowed, self)

    def drop_from(self, end: int) -> None:
        for layer in range(len(self.bits)):
            self.bits[layer] = self.bits[layer][:end].copy()
            self.prune(layer)

    def rollback_tail(self, n: Any) -> None:
        self.boundary()
        n = _integer(n, "n", OutOfRange)
        end = len(self.bits[0])
        if not 0 <= n <= end - (self.fork if self.parent else 0):
            raise OutOfRange(f"n is {n}; out of what may be dropped")
        if any(fork > end - n for fork in self.forks):
            raise BranchesOpen("a branch forks above; close it first")
        if n:
            self.mutated()
            self.drop_from(end - n)

    def abandon_step(self) -> None:
        self.alive()
        self.mutated()
        self.drop_from(min(len(bits) for bits in self.bits))

    def commit_prefix(self, k: Any) -> None:
        self.alive()
        parent = self.parent
        if parent is None:
            raise InvalidArgument("this session is no branch")
        self.boundary()
        k = _integer(k, "k", OutOfRange)
        if not 0 <= k <= len(self.bits[0]) - self.fork:
            raise OutOfRange(f"k is {k}; out of what was appended")
        if self.children:
            raise BranchesOpen("close the branch's own branches first")
        if k and parent.moves != self.parent_moves:
            raise BranchDiverged("the parent has moved since the branch began")
        if k:
            parent.mutated()
            stop, page = self.fork + k, self.store.spec.page_tokens
            for layer, table in enumerate(parent.tables):
                bits = self.bits[layer][:stop].copy()
                bits[: self.fork] = parent.bits[layer][: self.fork]
                for index in {p // page for p in range(self.fork, stop) if bits[p]}:
                    table.extend([-1] * (index + 1 - len(table)))
                    if table[index] >= 0:
                        self.store.drop(table[index])
                    table[index] = self.tables[layer][index]
                    self.store.counts[table[index]] += 1
                parent.bits[layer] = bits
                parent.prune(layer)
        self.release()

    def close(self) -> None:
        self.boundary()
        if self.children:
            raise BranchesOpen("close the branches first")
        self.release()

    def release(self) -> None:
        if self.restoring is not None:
            self.cancel_restore()
        for layer in range(len(self.tables)):
            self.slot[layer] = None
            self.bits[layer] = self.bits[layer][:0]
            self.prune(layer)
        self.live = False
        if self.parent is not None:
            self.parent.children -= 1
            self.parent.forks.remove(self.fork)

    # Spill

    def page_bytes(self, layer: Any, index: int) -> memoryview | None:
        layer = self.layer(layer)
        self.boundary()
        if not 0 <= index < len(self.tables[layer]):
            raise OutOfRange(f"page {index} is not in the table")
        page, tokens = self.tables[layer][index], self.store.spec.page_tokens
        bits = self.bits[layer][index * tokens : (index + 1) * tokens]
        if page < 0 or not bits.any():
            return None
        return self.shown(page, np.pad(bits, (0, tokens - len(bits))))

    def shown(self, page: int, valid: np.ndarray) -> memoryview:
        rows = np.where(valid[:, None], self.store.memory[page], 0)
        return memoryview(rows.reshape(-1).view(np.uint8)).toreadonly()

    def begin_restore(self, valid: Any) -> list[list[memoryview | None]]:
        self.alive()
        spec = self.store.spec
        if not isinstance(valid, np.ndarray) or valid.dtype != bool or valid.ndim != 2:
            raise InvalidArgument("valid must be bool (L, rows)")
        if (
            len(valid) != spec.layers
            or any(len(b) for b in self.bits)
            or self.restoring is not None
        ):
            raise InvalidArgument("begin_restore needs an empty session and a bit row per layer")
        if self.children:
            raise BranchesOpen("close the branches first")
        if not self.position_holes_allowed and not valid.all():
            raise HoleNotAllowed("the bitmap has holes; open the session with holes allowed")
        padded = np.zeros((spec.layers, -(-valid.shape[1] // spec.page_tokens), spec.page_tokens))
        padded.reshape(spec.layers, -1)[:, : valid.shape[1]] = valid
        needed = padded.any(axis=2)
        if needed.sum() > self.store.pages_free:
            raise PoolExhausted(f"{needed.sum()} pages wanted, {self.store.pages_free} free")
        self.restoring = valid.copy()
        self.tables = [[self.store.take() if page else -1 for page in row] for row in needed]
        return [
            [
                memoryview(self.store.memory[page].reshape(-1).view(np.uint8))
                if page >= 0
                else None
                for page in table
            ]
            for table in self.tables
        ]

    def finish_restore(self) -> None:
        self.alive()
        if self.restoring is None:
            raise InvalidArgument("no restore has begun")
        self.bits = [row.copy() for row in self.restoring]
        self.restoring = None

    def cancel_restore(self) -> None:
        self.alive()
        if self.restoring is None:
            raise InvalidArgument("no restore has begun")
        self.restoring = None
        for layer in range(len(self.tables)):
            self.prune(layer)


PlainStore.session_type = PlainSession


def candidate(name: str, session_type: type[PlainSession]) -> Candidate:
    """A candidate whose sessions are of ``session_type``."""

    class Store(PlainStore):
        pass

    Store.session_type = session_type
    return Candidate(
        name=name,
        title="NumPy pages",
        role="contender",
        profile=FP32,
        language="numpy",
        owner="numpy",
        layout="paged",
        capabilities=frozenset(Capability) - {Capability.THREADS},
        open=Store,
    )
