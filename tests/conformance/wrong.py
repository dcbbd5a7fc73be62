"""Stores that are wrong on purpose, each with the named test that must catch it."""

from __future__ import annotations

from typing import Any

import numpy as np
from plain import PlainSession

from kvtrial.contract import Partial, PoolExhausted


class OffByOneAtAPageEdge(PlainSession):
    """Attention forgets the first row of a page once that page is the last."""

    def rows_of(self, layer: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        if stop and stop % self.store.spec.page_tokens == 1:
            stop -= 1
        return super().rows_of(layer, start, stop)


class CachesItsLastOutput(PlainSession):
    """The kernel keeps its last output while the query stays the same."""

    last: tuple[bytes, np.ndarray] | None = None

    def attend_rows(self, layer: int, q: Any, out: Any, scale: float, stop: int) -> None:
        if self.last is None or self.last[0] != q.tobytes():
            super().attend_rows(layer, q, out, scale, stop)
            self.last = q.tobytes(), out.copy()
        out[...] = self.last[1]


class LeaksAPageOnRollback(PlainSession):
    """A rollback across a page edge forgets to give the page back."""

    def rollback_tail(self, n: Any) -> None:
        before = [list(table) for table in self.tables]
        super().rollback_tail(n)
        for table, old in zip(self.tables, before, strict=True):
            for page in old[len(table) :]:
                self.store.free.remove(page)


class WritesSharedPages(PlainSession):
    """No copy before the first write to a page that a branch shares."""

    def take(self, layer: int, at: np.ndarray) -> None:
        counts = self.store.counts.copy()
        np.minimum(self.store.counts, 1, out=self.store.counts)
        super().take(layer, at)
        shared = counts > 1
        self.store.counts[shared] = counts[shared]


class MasksByAdding(PlainSession):
    """Holes get a score of -inf added instead of being left out: 0 * NaN shows."""

    def softmax(self, layer, q, scale, span, heads):  # type: ignore[no-untyped-def]
        part = super().softmax(layer, q, scale, span, heads)
        at = span[0] + np.flatnonzero(~self.bits[layer][slice(*span)])
        at = at[at // self.store.spec.page_tokens < len(self.tables[layer])]
        pages, lanes = self.cells(layer, at)
        leak = (self.store.memory[pages[pages >= 0], 1, :, lanes[pages >= 0]] * 0.0).sum()
        return Partial(part.max, part.sum, part.output + np.float32(leak))


class TilesItsHeads(PlainSession):
    """Query head h reads KV head h % H_kv."""

    def softmax(self, layer, q, scale, span, heads):  # type: ignore[no-untyped-def]
        order = np.arange(len(q)).reshape(self.store.spec.kv_heads, -1).T.ravel()
        back = np.argsort(order)
        part = super().softmax(layer, np.ascontiguousarray(q[back]), scale, span, heads)
        return Partial(part.max[order], part.sum[order], part.output[order])


class AcceptsStaleHandles(PlainSession):
    """Reads on a closed handle go through."""

    def alive(self) -> None:
        return


class KeepsItsReservation(PlainSession):
    """A late commit after another mutation goes through."""

    def mutated(self) -> None:
        slots = list(self.slot)
        super().mutated()
        self.slot = slots


class CommitsTheWholeBranch(PlainSession):
    """`commit_prefix` ignores its count."""

    def commit_prefix(self, k: Any) -> None:
        super().commit_prefix(len(self.bits[0]) - self.fork if k else k)


class AlignsItsMaskAtTheTop(PlainSession):
    """The causal mask starts at the first cached row, not at the chunk's own."""

    def attend_block(self, layer: Any, q: Any, out: Any, scale: float) -> None:
        for i in range(len(q)):
            self.attend_rows(layer, q[i], out[i], scale, i + 1)


class StoresOneRowOfMany(PlainSession):
    """An append of n rows copies the first into every place."""

    def append(self, layer: Any, positions: Any, k: Any, v: Any) -> None:
        if isinstance(k, np.ndarray) and k.ndim == 3 and len(k) > 1:
            k = np.ascontiguousarray(np.broadcast_to(k[:1], k.shape))
        super().append(layer, positions, k, v)


class LosesPagesWhenExhausted(PlainSession):
    """An append that finds no room keeps the pages that it took before it noticed."""

    def take(self, layer: int, at: np.ndarray) -> None:
        try:
            super().take(layer, at)
        except PoolExhausted:
            if self.store.free:
                self.store.free.pop()
            raise


class RestoresHolesAsRows(PlainSession):
    """A restore forgets the bitmap."""

    def finish_restore(self) -> None:
        super().finish_restore()
        self.bits = [np.ones_like(bits) for bits in self.bits]


class ShowsWhatLiesInItsPages(PlainSession):
    """A spill takes the page as it lies, with the rows of who had it before."""

    def shown(self, page: int, valid: np.ndarray) -> memoryview:
        return super().shown(page, np.ones_like(valid))


class TurnsHolesLoose(PlainSession):
    """Holes everywhere, allowed or not."""

    def __init__(self, store: Any, holes: bool, parent: Any = None) -> None:
        super().__init__(store, True, parent)


WRONG = {
    OffByOneAtAPageEdge: "AttentionMatchesReferenceInterpreter",
    CachesItsLastOutput: "AttentionMatchesReferenceInterpreter",
    TilesItsHeads: "AttentionMatchesReferenceInterpreter",
    LeaksAPageOnRollback: "KvRollbackRestoresPrefix",
    WritesSharedPages: "KvBranchCopyOnWrite",
    MasksByAdding: "AttentionMasksHoles",
    AcceptsStaleHandles: "KvAppendRequiresOwner",
    KeepsItsReservation: "KvReserveSlotMatchesAppend",
    CommitsTheWholeBranch: "KvBranchCopyOnWrite",
    AlignsItsMaskAtTheTop: "AttentionMatchesReferenceInterpreter",
    StoresOneRowOfMany: "KvAppendMatchesSingles",
    LosesPagesWhenExhausted: "KvPoolBoundedNoStepAllocation",
    RestoresHolesAsRows: "KvSpillRestoresBitwise",
    ShowsWhatLiesInItsPages: "KvSpillRestoresBitwise",
    TurnsHolesLoose: "KvHolesOnlyWhereAllowed",
}
