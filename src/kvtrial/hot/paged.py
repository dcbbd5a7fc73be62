"""A2, K1, K2 and K5: one page pool, `[kv_head][token][head_dim]` pages, kernels by format.

Each differs from its neighbour in one thing: A2 is K1 with a scalar kernel, K2 is K1 with FP16 rows,
K5 is K1 with Q8_0 rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvtrial.contract import Candidate, Capability, KVStore, Profile, StoreSpec, poison_wanted


def _open(spec: StoreSpec, **options: str) -> KVStore:
    from kvtrial.hot import _paged

    store: KVStore = _paged.PagedStore(spec, debug_poison=poison_wanted(), **options)
    return store


K1 = Candidate(
    name="K1",
    title="Paged, fused SIMD, FP32",
    role="contender",
    profile=Profile.FP32,
    language="Cython",
    owner="Cython",
    layout="paged [kv_head][token][head_dim]",
    capabilities=frozenset(Capability),
    open=_open,
)

A2 = replace(
    K1,
    name="A2",
    title="Paged, scalar, group-aware",
    role="ablation",
    open=partial(_open, kernel="scalar"),
)

K2 = replace(
    K1,
    name="K2",
    title="Paged, fused SIMD, FP16 rows",
    role="profile",
    profile=Profile.FP16,
    capabilities=K1.capabilities - {Capability.RESERVE_SLOT},
    open=partial(_open, format="fp16"),
)

K5 = replace(
    K2,
    name="K5",
    title="Paged, fused SIMD, Q8_0 rows",
    profile=Profile.Q8_0,
    open=partial(_open, format="q8_0"),
)
