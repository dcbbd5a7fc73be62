"""Registers the candidate TwoPass: kvtrial's pages, a kernel of ours."""

from kvtrial.contract import Candidate, Capability, KVStore, Profile, StoreSpec
from kvtrial.hot.paged import open_paged


def _open(spec: StoreSpec) -> KVStore:
    from kvtrial_two_pass import _kernel  # compiled: loaded when a store opens, not before

    return open_paged(spec, kernel=_kernel.capsule())


TWO_PASS = Candidate(
    name="TwoPass",
    title="Paged, two passes over a span, FP32",
    role="contender",
    profile=Profile.FP32,
    language="Cython",
    owner="Cython",
    layout="paged [kv_head][token][head_dim]",
    capabilities=frozenset(Capability),
    open=_open,
)
