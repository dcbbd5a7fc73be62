"""A2, K1, K1C, K2, K5, K1T and K2T: one page pool, `[kv_head][token][head_dim]` pages, kernels by format.

Each differs from K1 in one thing: A2 has a scalar kernel, K1C has K1's as clang compiles it, K2 has
FP16 rows, K5 has Q8_0 rows, K1T has K as `[head_dim][token]` within the page. K2T has that and FP16 rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from kvtrial.contract import Candidate, Capability, KVStore, Profile, StoreSpec, poison_wanted
from kvtrial.host import build
from kvtrial.hot.kernels import simd_kernel


def open_paged(spec: StoreSpec, *, format: str = "fp32", kernel: Any = None) -> KVStore:
    """A paged store; a candidate of another package brings its own kernel.

    Parameters
    ----------
    spec : StoreSpec
    format : str
        How rows are stored: "fp32", "fp16", "q8_0"; "fp32t" and "fp16t" have K transposed within the
        page.
    kernel : PyCapsule or "scalar", optional
        A capsule named "kvtrial.kv_kernel" that holds a ``kv_span_fn`` of native/kv_kernel.h, or
        "scalar" for A2's; by default the SIMD kernel of the format. Both others need "fp32".

    Raises
    ------
    PoolExhausted
        The budget or its ledger has no room for a page.
    """
    import kvtrial.hot._paged as _paged

    store: KVStore = _paged.PagedStore(
        spec, format=format, kernel=kernel, debug_poison=poison_wanted()
    )
    return store


def _open_k1c(spec: StoreSpec) -> KVStore:
    return open_paged(spec, kernel=simd_kernel("fp32", clang=True))


K1 = Candidate(
    name="K1",
    title="Paged, fused SIMD, FP32",
    role="contender",
    profile=Profile.FP32,
    language="Cython",
    owner="Cython",
    layout="paged [kv_head][token][head_dim]",
    capabilities=frozenset(Capability),
    open=open_paged,
)

A2 = replace(
    K1,
    name="A2",
    title="Paged, scalar, group-aware",
    role="ablation",
    open=partial(open_paged, kernel="scalar"),
)

#: Beside K1 it isolates the compiler, beside K4 the language: rustc is LLVM as clang is.
K1C = replace(
    K1,
    name="K1C",
    title="K1, its kernel compiled by clang",
    role="control",
    open=_open_k1c,
    not_built=build.why_missing("kvtrial.hot._kernels_clang", "clang"),
)

K2 = replace(
    K1,
    name="K2",
    title="Paged, fused SIMD, FP16 rows",
    role="profile",
    profile=Profile.FP16,
    capabilities=K1.capabilities - {Capability.RESERVE_SLOT},
    open=partial(open_paged, format="fp16"),
)

K5 = replace(
    K2,
    name="K5",
    title="Paged, fused SIMD, Q8_0 rows",
    profile=Profile.Q8_0,
    open=partial(open_paged, format="q8_0"),
)

K1T = replace(
    K1,
    name="K1T",
    title="Paged, fused SIMD, FP32, K transposed",
    layout="paged [kv_head], K [head_dim][token], V [token][head_dim]",
    open=partial(open_paged, format="fp32t"),
)

K2T = replace(
    K2,
    name="K2T",
    title="Paged, fused SIMD, FP16 rows, K transposed",
    layout=K1T.layout,
    open=partial(open_paged, format="fp16t"),
)
