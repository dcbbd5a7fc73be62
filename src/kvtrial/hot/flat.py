"""K0 and A1: flat FP32, `[position][kv_head][head_dim]` per layer, scalar.

K0 is the frozen baseline: every query head reads its KV head's rows for itself. A1 is K0 with one
change, group-aware attention: a row is read once for all query heads of its group. Neither has
branches, holes, a page pool or spill.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvtrial.contract import FP32, Candidate, Capability, KVStore, StoreSpec, poison_wanted


def _open(spec: StoreSpec, *, grouped: bool) -> KVStore:
    from kvtrial.hot._flat import FlatStore

    store: KVStore = FlatStore(spec, grouped=grouped, debug_poison=poison_wanted())
    return store


K0 = Candidate(
    name="K0",
    title="Flat, scalar, per query head",
    role="baseline",
    profile=FP32,
    language="Cython",
    owner="Cython",
    layout="flat [token][kv_head][head_dim]",
    capabilities=frozenset(
        {Capability.OWNER, Capability.ROLLBACK, Capability.RESERVE_SLOT, Capability.PARTIALS}
    ),
    open=partial(_open, grouped=False),
    reads_per_query_head=True,
)

A1 = replace(
    K0,
    name="A1",
    title="Flat, scalar, group-aware",
    role="ablation",
    open=partial(_open, grouped=True),
    reads_per_query_head=False,
)
