"""K3 (Rust pool and kernel) and K4 (Cython pool, Rust kernel): does the language matter?

Both have K1's layout and algorithm. Where the Rust library was not built they stay registered and
say why they can't be opened.
"""

from __future__ import annotations

from dataclasses import replace

from kvtrial import build
from kvtrial.contract import Candidate, Capability, KVStore, Profile, StoreSpec, poison_wanted
from kvtrial.hot.paged import open_paged


def _open_k3(spec: StoreSpec) -> KVStore:
    import kvtrial.hot._rust as _rust

    return _rust.Store(spec, debug_poison=poison_wanted())


def _open_k4(spec: StoreSpec) -> KVStore:
    import kvtrial.hot._rust as _rust

    return open_paged(spec, kernel=_rust.kernel_capsule())


K3 = Candidate(
    name="K3",
    title="Rust pool and kernel",
    role="contender",
    profile=Profile.FP32,
    language="Rust",
    owner="Rust",
    layout="paged [kv_head][token][head_dim]",
    capabilities=frozenset(Capability),
    open=_open_k3,
    not_built=build.why_missing("kvtrial.hot._rust", "rust"),
)

K4 = replace(K3, name="K4", title="Cython pool, Rust kernel", owner="Cython", open=_open_k4)
