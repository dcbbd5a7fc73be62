"""A store beside the dictionary model, verb by verb.

`Lockstep` does a verb on both and compares all that can be seen. `walk` chooses verbs by a seed; the
project's own tests choose them by a Hypothesis state machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvtrial.conformance.model import ModelSession, ModelStore, Refusal, Row, stacked
from kvtrial.conformance.trial import Trial, require, require_attention
from kvtrial.contract import (
    Capability,
    KVError,
    KVSession,
    KVStore,
    PoolExhausted,
    SlotCancelled,
    StaleOwner,
)


class Lockstep:
    """One store and its model. Every method does one verb on both, then `compare` is due."""

    def __init__(self, trial: Trial, store: KVStore) -> None:
        self.trial = trial
        self.store = store
        spec = store.spec
        self.model = ModelStore(spec.layers, spec.page_tokens, spec.base_position)
        self.pairs: list[tuple[ModelSession, KVSession]] = []
        self.closed: list[KVSession] = []
        self._random = np.random.default_rng(11)
        self.log: list[str] = []

    # The two sides -------------------------------------------------------------------------------

    def _both(
        self,
        what: str,
        refusal: Refusal,
        real: Callable[[], Any],
        pages: int = 0,
    ) -> tuple[bool, Any]:
        """Call the store; whether it did the verb, after checking that it was right to."""
        self.log.append(what)
        must, may = refusal.must, refusal.may
        if not must and pages and self.store.pages_total:
            if pages > self.store.pages_free:
                must = frozenset({PoolExhausted})
            elif not self.trial.has(Capability.POOL):
                may |= {PoolExhausted}  # without a shared pool a layer may have an end of its own
        try:
            got = real()
        except KVError as error:
            allowed = must | may
            names = ", ".join(sorted(e.__name__ for e in allowed)) or "success"
            require(
                isinstance(error, tuple(allowed)) if allowed else False,
                f"{self._story()}: raised {type(error).__name__} ({error}), expected {names}",
            )
            return False, None
        names = ", ".join(sorted(e.__name__ for e in must))
        require(not must, f"{self._story()}: succeeded, expected {names}")
        return True, got

    def _story(self) -> str:
        return "; ".join(self.log[-12:])

    def _rows(self, n: int) -> list[Row]:
        spec = self.store.spec
        made = self._random.standard_normal((n, 2, spec.local_kv_heads, spec.head_dim), np.float32)
        return [(row[0], row[1]) for row in made]

    def _stacked(self, rows: list[Row]) -> tuple[Any, Any]:
        return stacked(rows, (self.store.spec.local_kv_heads, self.store.spec.head_dim))

    # Verbs ---------------------------------------------------------------------------------------

    def open(self, holes: bool) -> None:
        holes = holes and self.trial.has(Capability.HOLES)
        _, real = self._both("open", Refusal(), lambda: self.store.open_session(holes))
        self.pairs.append((self.model.open_session(holes), real))

    def append(self, which: int, layer: int, n: int, gap: int = 0) -> None:
        """n rows, the first ``gap`` positions after the layer's end."""
        model, real = self.pairs[which]
        start = model.ends[layer] + gap
        positions = list(range(start, start + n))
        rows = self._rows(n)
        did, _ = self._both(
            f"{which}.append({layer}, {start}..{start + n})",
            model.refuses_append(layer, positions),
            lambda: real.append(layer, np.asarray(positions, np.int64), *self._stacked(rows)),
            model.pages_to_take(layer, positions),
        )
        if did:
            model.append(layer, positions, rows)

    def step(self, which: int, n: int, gap: int = 0) -> None:
        """A whole step, if the session stands at a boundary; abandoned where room is lacking."""
        model = self.pairs[which][0]
        for layer in range(self.model.layers):
            self.append(which, layer, n, gap)
        if not model.at_boundary:
            self.abandon(which)

    def direct(self, which: int, layer: int, n: int, finish: str) -> None:
        """A reservation inside one page, then ``finish``: commit, append or abandon."""
        model, real = self.pairs[which]
        start = model.ends[layer]
        room = self.model.page_tokens - (start - self.model.base) % self.model.page_tokens
        positions = range(start, start + min(n, room))
        where = np.asarray(positions, np.int64)
        refusal = Refusal(model._out_of_turn(layer, positions.stop))
        pages = model.pages_to_take(layer, positions)
        if not self.trial.has(Capability.RESERVE_SLOT):
            return
        did, slot = self._both(
            f"{which}.reserve_slot({layer}, {positions})",
            refusal,
            lambda: real.reserve_slot(layer, where),
            pages,
        )
        if not did:
            return
        require(slot is not None, f"{self._story()}: None inside one page")
        model.reserve(layer, positions)
        rows = self._rows(len(positions))
        for view, given in zip(slot, self._stacked(rows), strict=True):
            view[...] = given
        self.compare()
        if finish == "commit":
            self._both("commit_slot", Refusal(), lambda: real.commit_slot(layer, where))
            model.commit_slot(layer, rows)
            self._both("commit again", Refusal(), lambda: real.commit_slot(layer, where))
            return
        if finish == "append":
            self.append(which, layer, 1)
        else:
            self.abandon(which)
        if model.reserved[layer] is None:
            self._both(
                "late commit",
                Refusal(frozenset({SlotCancelled})),
                lambda: real.commit_slot(layer, where),
            )

    def invalidate(self, which: int, layer: int, positions: list[int]) -> None:
        model, real = self.pairs[which]
        refusal = model.refuses_invalidate(layer, positions)
        # A store may copy a shared page to keep a hole of its own; it may then lack the room.
        shared = {
            index: page
            for index, page in enumerate(model.tables[layer])
            if page is not None and self.model.references(page) > 1
        }
        touched = {model._index(p) for p in positions} & shared.keys()
        if touched:
            refusal = Refusal(refusal.must, refusal.may | {PoolExhausted})
        before = self._page_ids(real, layer)
        did, _ = self._both(
            f"{which}.invalidate({layer}, {positions})",
            refusal,
            lambda: real.invalidate(layer, np.asarray(positions, np.int64)),
        )
        if did and positions:
            model.invalidate(layer, positions)
            after = self._page_ids(real, layer)
            for index in touched & set(range(len(model.tables[layer]))):
                if after[index] not in (-1, before[index]):
                    model._take(layer, [self.model.base + index * self.model.page_tokens])

    def rollback(self, which: int, n: int) -> None:
        model, real = self.pairs[which]
        did, _ = self._both(
            f"{which}.rollback_tail({n})", model.refuses_rollback(n), lambda: real.rollback_tail(n)
        )
        if did:
            model.rollback(n)

    def abandon(self, which: int) -> None:
        model, real = self.pairs[which]
        self._both(f"{which}.abandon_step", Refusal(), real.abandon_step)
        model.abandon_step()

    def branch(self, which: int) -> None:
        model, real = self.pairs[which]
        did, child = self._both(f"{which}.begin_branch", model.refuses_branch(), real.begin_branch)
        if did:
            self.pairs.append((model.branch(), child))

    def commit(self, which: int, k: int) -> None:
        model, real = self.pairs[which]
        if model.prefix_changed and k:
            return
        did, _ = self._both(
            f"{which}.commit_prefix({k})", model.refuses_commit(k), lambda: real.commit_prefix(k)
        )
        if did:
            model.commit_prefix(k)
            self.closed.append(self.pairs.pop(which)[1])

    def close(self, which: int) -> None:
        model, real = self.pairs[which]
        did, _ = self._both(f"{which}.close", model.refuses_close(), real.close)
        if did:
            model.close()
            self.closed.append(self.pairs.pop(which)[1])

    def stale(self) -> None:
        """Verbs on closed handles."""
        must = Refusal(frozenset({StaleOwner}))
        if not self.trial.has(Capability.OWNER):
            return
        for real in self.closed[-3:]:
            self._both("stale length", must, partial(real.length, 0))
            self._both("stale close", must, real.close)
            self._both("stale append", must, partial(self._append_one, real))

    def _append_one(self, real: KVSession) -> None:
        real.append(0, np.zeros(1, np.int64), *self._stacked(self._rows(1)))

    # Comparison ----------------------------------------------------------------------------------

    def _page_ids(self, real: KVSession, layer: int) -> list[int]:
        if not self.trial.has(Capability.POOL):
            return []
        ids = real.page_table(layer).page_ids.tolist()
        while ids and ids[-1] == -1:
            ids.pop()
        return ids

    def compare(self) -> None:
        """All that both sides show is the same."""
        story = self._story()
        named: dict[int, Any] = {}
        for (which, (model, real)), layer in itertools.product(
            enumerate(self.pairs), range(self.model.layers)
        ):
            where = f"{story}: session {which} layer {layer}"
            require(
                real.length(layer) == model.length(layer),
                f"{where}: length {real.length(layer)}, expected {model.length(layer)}",
            )
            valid = (self.model.base + np.flatnonzero(real.valid(layer))).tolist()
            expected = model.valid(layer)
            require(valid == expected, f"{where}: valid {valid}, expected {expected}")
            right = self._stacked([model.rows[layer][p] for p in expected])
            for read, given in zip(
                real.read(layer, np.asarray(valid, np.int64)), right, strict=True
            ):
                off = np.abs(read - given.astype(np.float64))
                bound = self.trial.profile.storage_bound(given)
                require((off <= bound).all(), f"{where}: rows differ")
            ids, pages = self._page_ids(real, layer), model.tables[layer]
            if self.trial.has(Capability.POOL):
                require(len(ids) == len(pages), f"{where}: {len(ids)} pages, not {len(pages)}")
            for number, page in zip(ids, pages, strict=False):
                require((number < 0) == (page is None), f"{where}: page ids {ids}")
                if page is not None:
                    require(
                        named.setdefault(number, page) is page,
                        f"{where}: page {number} is shared by tables that should not share",
                    )
        if not self.trial.has(Capability.POOL):
            return
        require(
            len(named) == len(set(map(id, named.values()))) == self.model.pages_used,
            f"{story}: {len(named)} pages in tables, expected {self.model.pages_used}",
        )
        free = self.store.pages_total - self.model.pages_used
        require(self.store.pages_free == free, f"{story}: {self.store.pages_free} free, not {free}")
        counts = self.store.reference_counts()
        for number, page in named.items():
            right_count = self.model.references(page)
            require(
                counts[number] == right_count,
                f"{story}: page {number} has {counts[number]} references, not {right_count}",
            )
        require(int(np.count_nonzero(counts)) == len(named), f"{story}: counts of unmapped pages")

    def attend(self, which: int, layer: int) -> None:
        """Attention over what the model holds, by the oracle."""
        model, real = self.pairs[which]
        spec = self.store.spec
        q = self._random.standard_normal((spec.q_heads, spec.head_dim), np.float32)
        out = np.full_like(q, np.nan)
        real.attend(layer, q, out, 0.5)
        k, v = self._stacked([model.rows[layer][p] for p in model.valid(layer)])
        require_attention(
            out, self.trial.profile, q, k, v, 0.5, what=f"{self._story()}: session {which}"
        )
