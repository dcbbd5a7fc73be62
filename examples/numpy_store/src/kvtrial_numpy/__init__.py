"""Registers the candidate FlatNumpy: a whole store in NumPy, in a package of its own."""

from kvtrial.contract import FP32, Candidate, Capability
from kvtrial_numpy.store import FlatStore

FLAT_NUMPY = Candidate(
    name="FlatNumpy",
    title="Flat, NumPy",
    role="contender",
    profile=FP32,
    language="Python",
    owner="Python",
    layout="flat [token][kv_head][head_dim]",
    capabilities=frozenset({Capability.OWNER, Capability.ROLLBACK}),
    open=FlatStore,
)
