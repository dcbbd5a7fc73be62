"""A sequence over several processes, by head groups and position ranges, is the whole again."""

from __future__ import annotations

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import shard

from kvtrial.conformance.trial import queries, require_attention, rows
from kvtrial.contract import Candidate, Partial, merge


@pytest.fixture(scope="module")
def from_processes(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[str, str], list[Partial]]:
    """(split, arm) -> partials, each from a process that had its own shard and nothing else."""
    folder = tmp_path_factory.mktemp("shards")
    jobs = [(split, i) for split, parts in shard.SPLITS.items() for i in range(len(parts))]

    def run(job: tuple[str, int]) -> Path:
        out = folder / f"{job[0]}-{job[1]}.npz"
        command = [sys.executable, shard.__file__, job[0], str(job[1]), str(out)]
        subprocess.run(command, check=True)
        return out

    with ThreadPoolExecutor(2) as threads:
        files = dict(zip(jobs, threads.map(run, jobs), strict=True))
    found: dict[tuple[str, str], list[Partial]] = {}
    for split, index in jobs:
        with np.load(files[split, index]) as arrays:
            for arm in shard.ARMS:
                fields = [arrays[f"{arm.name}.{field}"] for field in Partial._fields]
                found.setdefault((split, arm.name), []).append(Partial(*fields))
    return found


def bits(parts: list[Partial]) -> list[bytes]:
    return [array.tobytes() for part in parts for array in part]


@pytest.mark.parametrize("split", list(shard.SPLITS))
@pytest.mark.parametrize("arm", shard.ARMS, ids=lambda arm: arm.name)
def test_processes_merge_to_the_whole(
    arm: Candidate, split: str, from_processes: dict[tuple[str, str], list[Partial]]
) -> None:
    """Within the profile's tolerance of the oracle, and bitwise what one process gives."""
    parts = from_processes[split, arm.name]
    whole = shard.opened(arm)
    q, store = queries(whole.store), whole.store
    k, v = rows(store, shard.LAYER, range(shard.ROWS))
    require_attention(merge(parts), arm.profile, q, k, v, shard.SCALE, what=split)

    here = [shard.part(shard.opened(arm, *limits)) for limits in shard.SPLITS[split]]
    assert bits(here) == bits(parts), "another process gives other bits"

    if split != "inside a page":
        of_whole = [
            shard.part(whole, kv_heads=heads, positions=span) for heads, span in shard.SPLITS[split]
        ]
        assert bits(of_whole) == bits(parts), "a part of one store is not the store of that part"
        assert merge(of_whole).tobytes() == merge(parts).tobytes()
    if split == "heads":
        assert merge(parts).tobytes() == merge([shard.part(whole)]).tobytes()
    # The order in which shards answer is nobody's promise.
    for order in itertools.permutations(parts):
        np.testing.assert_allclose(merge(order), merge(parts), rtol=1e-6, atol=1e-7)
    store.close()
