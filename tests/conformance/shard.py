"""One shard of a sequence in a process of its own: ``python shard.py SPLIT INDEX OUT.npz``."""

from __future__ import annotations

import sys

import numpy as np

from kvtrial import candidates
from kvtrial.conformance.trial import fill, queries
from kvtrial.contract import Candidate, Capability, KVSession, Partial, StoreSpec

#: Kernels cut a layer at multiples of 1,024 positions; so do the splits that must be bitwise the same.
ROWS, CUT = 1300, 1024
LAYER, SCALE = 1, 0.3
LOW, HIGH = (0, 1), (1, 3)
EVERY_HEAD = (0, 3)

#: Name of a split -> its shards, each (KV heads, positions).
SPLITS = {
    "heads": [(LOW, (0, ROWS)), (HIGH, (0, ROWS))],
    "positions": [(EVERY_HEAD, (0, CUT)), (EVERY_HEAD, (CUT, ROWS))],
    "heads and positions": [
        (heads, span) for heads in (LOW, HIGH) for span in ((0, CUT), (CUT, ROWS))
    ],
    "inside a page": [(EVERY_HEAD, span) for span in ((0, 7), (7, 333), (333, ROWS))],
}

ARMS = [
    c
    for c in candidates.candidates().values()
    if c.not_built is None and Capability.PARTIALS in c.capabilities
]


def opened(
    candidate: Candidate, heads: tuple[int, int] = EVERY_HEAD, span: tuple[int, int] = (0, ROWS)
) -> KVSession:
    """A session of a store that holds these heads and positions alone, filled."""
    spec = StoreSpec(
        layers=2,
        q_heads=6,
        kv_heads=3,
        head_dim=40,
        page_tokens=16,
        budget_bytes=4 << 20,
        base_position=span[0],
        kv_head_range=None if heads == EVERY_HEAD else heads,
    )
    session = candidate.open(spec).open_session()
    fill(session, range(*span))
    return session


def part(session: KVSession, **limits: tuple[int, int]) -> Partial:
    """Partial attention of the one query over the session's rows, or a part of them."""
    return session.attend_partial(LAYER, queries(session.store), SCALE, **limits)


def main(split: str, index: int, out: str) -> None:
    """Write every arm's partial of one shard."""
    arrays = {}
    for candidate in ARMS:
        session = opened(candidate, *SPLITS[split][index])
        for field, array in part(session)._asdict().items():
            arrays[f"{candidate.name}.{field}"] = array
        session.store.close()
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
