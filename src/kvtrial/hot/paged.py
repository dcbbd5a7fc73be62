"""The arms of one page pool, `[kv_head][token][head_dim]` pages, kernels by format.

Each differs from K1 in its row format: A2 has a scalar kernel, K1C has K1's as clang compiles it, K2 has
FP16 rows, K5 has Q8_0 rows, K1T has K as `[head_dim][token]` within the page. K2T has that and FP16 rows.
K5T has K5's bytes as panels for integer products, K rotated; K7 has V in 4 bits, K6 K too; K6N is K6 without
rotation.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvtrial.contract import Candidate, Capability, KVStore, StoreSpec, poison_wanted
from kvtrial.host import build
from kvtrial.hot.formats import RowFormat, compiled, row_format
from kvtrial.hot.formats.fp16 import FP16, FP16T
from kvtrial.hot.formats.fp32 import FP32, FP32T
from kvtrial.hot.formats.int_panels import INT4P, INT4RP, INT8R4RP, INT8RP
from kvtrial.hot.formats.q8_0 import Q8_0


def open_paged(spec: StoreSpec, *, format: str | RowFormat = FP32) -> KVStore:
    """A paged store of a row format.

    Parameters
    ----------
    spec : StoreSpec
    format : str or RowFormat
        A registered format's name, or a record: ``replace(FP32, kernel=...)`` is another kernel over K1's
        pages.

    Raises
    ------
    PoolExhausted
        The budget or its ledger has no room for a page.
    InvalidArgument
        No format of that name.
    """
    import kvtrial.hot._paged as _paged

    store: KVStore = _paged.PagedStore(
        spec, format=row_format(format), debug_poison=poison_wanted()
    )
    return store


K1 = Candidate(
    name="K1",
    title="Paged, fused SIMD, FP32",
    role="contender",
    profile=FP32.profile,
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
    open=partial(
        open_paged, format=replace(FP32, kernel=lambda: compiled("_kernels_scalar").kernel())
    ),
)

#: Beside K1 it isolates the compiler, beside K4 the language: rustc is LLVM as clang is.
K1C = replace(
    K1,
    name="K1C",
    title="K1, its kernel compiled by clang",
    role="control",
    open=partial(
        open_paged,
        format=replace(FP32, kernel=lambda: compiled("_kernels_clang").kernels()["fp32"]),
    ),
    not_built=build.why_missing("kvtrial.hot._kernels_clang", "clang"),
)

K2 = replace(
    K1,
    name="K2",
    title="Paged, fused SIMD, FP16 rows",
    role="profile",
    profile=FP16.profile,
    capabilities=K1.capabilities - {Capability.RESERVE_SLOT},
    open=partial(open_paged, format=FP16),
)

K5 = replace(
    K2,
    name="K5",
    title="Paged, fused SIMD, Q8_0 rows",
    profile=Q8_0.profile,
    open=partial(open_paged, format=Q8_0),
)

K1T = replace(
    K1,
    name="K1T",
    title="Paged, fused SIMD, FP32, K transposed",
    layout="paged [kv_head], K [head_dim][token], V [token][head_dim]",
    open=partial(open_paged, format=FP32T),
)

K2T = replace(
    K2,
    name="K2T",
    title="Paged, fused SIMD, FP16 rows, K transposed",
    layout=K1T.layout,
    open=partial(open_paged, format=FP16T),
)

K5T = replace(
    K5,
    name="K5T",
    title="Paged, integer products, int8 panels",
    profile=INT8RP.profile,
    layout="paged [kv_head], K and V panels",
    open=partial(open_paged, format=INT8RP),
)

K6 = replace(
    K5T,
    name="K6",
    title="Paged, integer products, 4-bit panels, rotated",
    profile=INT4RP.profile,
    open=partial(open_paged, format=INT4RP),
)

#: Beside K6 it is what rotation brings.
K6N = replace(
    K5T,
    name="K6N",
    title="K6 without rotation",
    role="ablation",
    profile=INT4P.profile,
    open=partial(open_paged, format=INT4P),
)

K7 = replace(
    K5T,
    name="K7",
    title="Paged, integer products, K int8, V 4 bits and rotated",
    profile=INT8R4RP.profile,
    open=partial(open_paged, format=INT8R4RP),
)
