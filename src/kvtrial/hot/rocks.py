"""C0: the control. Pages are RocksDB values; K1's kernel runs over what was looked up.

It answers one question once: what a general store costs in a decode step. The protocol's ``control``
measures it in a block of its own, beside the pairs; it can't win.
"""

from __future__ import annotations

from kvtrial.contract import FP32, Candidate, Capability, KVStore, StoreSpec, poison_wanted


def _open(spec: StoreSpec) -> KVStore:
    from kvtrial.hot._rocks import RocksStore

    store: KVStore = RocksStore(spec, debug_poison=poison_wanted())
    return store


C0 = Candidate(
    name="C0",
    title="RocksDB values, K1's kernel",
    role="control",
    profile=FP32,
    language="Cython",
    owner="RocksDB",
    layout="a value per layer, KV head and page: [token][head_dim]",
    capabilities=frozenset({Capability.OWNER, Capability.ROLLBACK, Capability.PARTIALS}),
    open=_open,
)
