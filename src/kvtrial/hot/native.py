"""K3 and K3T (Rust pool and kernel) and K4 (Cython pool, Rust kernel): does the language matter?

Each has the layout and algorithm of its Cython twin: K3 and K4 of K1, K3T of K1T. Where the Rust library
was not built they stay registered and say why they can't be opened.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvtrial.contract import Candidate, Capability, KVStore, StoreSpec, poison_wanted
from kvtrial.host import build
from kvtrial.hot.formats import RowFormat, compiled
from kvtrial.hot.formats.fp32 import FP32, FP32T
from kvtrial.hot.paged import K1, K1T, open_paged


def _open_rust(spec: StoreSpec, *, format: RowFormat = FP32) -> KVStore:
    import kvtrial.hot._rust as _rust

    store: KVStore = _rust.RustStore(spec, format=format, debug_poison=poison_wanted())
    return store


K3 = Candidate(
    name="K3",
    title="Rust pool and kernel",
    role="contender",
    profile=FP32.profile,
    language="Rust",
    owner="Rust",
    layout=K1.layout,
    capabilities=frozenset(Capability),
    open=_open_rust,
    not_built=build.why_missing("kvtrial.hot._rust", "rust"),
)

K4 = replace(
    K3,
    name="K4",
    title="Cython pool, Rust kernel",
    owner="Cython",
    open=partial(
        open_paged, format=replace(FP32, kernel=lambda: compiled("_rust").kernel_capsule())
    ),
)

K3T = replace(
    K3,
    name="K3T",
    title="Rust pool and kernel, K transposed",
    layout=K1T.layout,
    open=partial(_open_rust, format=FP32T),
)
