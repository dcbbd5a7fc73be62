"""M1: one attention region at a filled context, candidates interleaved, in a fresh process.

``python -m kvtrial.measure.attention SPEC.json OUT.json`` with an `AttentionSpec`.

A region is one layer of one session. Each candidate holds as many as fill the rotation, as far as half
of the free memory has room for all, so that by the time a region comes again the caches have forgotten
it. The warm-up goes through all of them, as the first call on a region can take several times what the
next ones do; its last iteration begins again, and says how many regions a counted one takes: as many as
the fastest candidate needs for a millisecond, since fewer would time the clock.

What an iteration gave is kept at a few iterations, drawn by the seed, and compared with the float64
oracle when all times are taken: a kernel that skipped or remembered would be far outside its bound.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvtrial import candidates, reference
from kvtrial.contract import F32, Capability, Profile
from kvtrial.host import machine
from kvtrial.host.shapes import operations_a_row
from kvtrial.measure import clock
from kvtrial.measure.child import Row, failed_row, main, no_collection
from kvtrial.measure.probes import Probes
from kvtrial.measure.specs import AttentionSpec
from kvtrial.measure.stores import Snapshot, copy, fill, needed_bytes, opened
from kvtrial.measure.surroundings import Bracket

SHORTEST_ITERATION_NS = 1_000_000
#: Sessions that hold a rotation: a store need not have room for more. Beyond it has more layers.
MOST_SESSIONS = 32
#: Iterations whose output is compared with the oracle: its error bound takes a while to work out.
CHECKED_ITERATIONS = 2


class Attends(Protocol):
    """What is timed: a session of a store, or anything else with this verb."""

    def attend(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """As `kvtrial.contract.KVSession.attend`."""


@dataclass
class Arm:
    """One candidate with its regions: (session, layer), and the next one to take.

    ``kept``: (layer, number of the query, output) of the timed calls that are checked.
    """

    name: str
    store: Any  # a KVStore; None where the arm is no store of ours
    regions: list[tuple[Attends, int]]
    next_region: int = 0
    kept: list[tuple[int, int, F32]] = field(default_factory=list)

    def keep(self, queries: int, out: F32) -> None:
        """Keep what the last call gave; ``queries`` is how many rotate."""
        last = self.next_region - 1
        _, layer = self.regions[last % len(self.regions)]
        self.kept.append((layer, last % queries, out.copy()))


def measure(spec: AttentionSpec, note: Callable[[str], None]) -> list[Row]:
    """All rows of the block."""
    shape = spec.shape
    if spec.snapshots:
        snapshot = Snapshot.open(spec.snapshots[0])
    else:
        snapshot = Snapshot.synthetic(shape, spec.synthetic_tokens, spec.seed)
    probe = Probes(spec.threads, **spec.probes) if spec.probes else Probes(spec.threads)
    queries = queries_of(spec)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        arms: dict[str, Arm] = {}
        room = room_bytes(spec)
        for name in spec.candidates:
            note(name)
            try:
                arms[name] = _open_arm(stack, name, snapshot, spec, room)
            except Exception as error:
                rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
        if not arms:
            return rows
        with Bracket(probe) as bracket:
            rows += interleave(arms, queries, spec, note)
        rows += bracket.rows
        rows += _rates(rows, arms, snapshot.tokens, bracket)
        rows += _checked(arms, queries, snapshot)
        for arm in arms.values():
            note(arm.name)
            rows += _in_cache(arm, queries, snapshot.tokens, bracket)
    return rows


def queries_of(spec: AttentionSpec) -> F32:
    """Queries (16, H_q, D), of the size of keys: scores then spread about as a trained model's do."""
    draw = np.random.default_rng(spec.seed)
    shape = spec.shape
    return draw.standard_normal((16, shape["q_heads"], shape["head_dim"]), np.float32)


def room_bytes(spec: AttentionSpec) -> float:
    """Memory that an arm's pool may take: all arms together half of what is free."""
    return machine.available_memory_bytes() / 2 / len(spec.candidates)


def rotation(
    spec: AttentionSpec, region_bytes: int, pool_bytes: int, room: float
) -> tuple[int, int]:
    """Layers of a session and sessions whose regions together fill the rotation, as far as there is room.

    A region holds ``region_bytes`` and takes ``pool_bytes`` of the pool, spare pages included.
    """
    wanted = spec.rotation_llc_multiple * machine.last_level_cache_bytes(spec.threads)
    regions = max(1, math.ceil(min(wanted / region_bytes, room / pool_bytes)))
    layers = max(min(spec.shape["layers"], regions), math.ceil(regions / MOST_SESSIONS))
    return layers, math.ceil(regions / layers)


def _open_arm(
    stack: contextlib.ExitStack, name: str, snapshot: Snapshot, spec: AttentionSpec, room: float
) -> Arm:
    """Open a store that holds the rotation and fill it from the snapshot."""
    shape, page_tokens = spec.shape, spec.page_tokens
    one_layer = {**shape, "layers": 1}
    with opened(name, one_layer, tokens=page_tokens, page_tokens=page_tokens) as (store, _):
        region_bytes = store.row_bytes * snapshot.tokens
    pool_bytes = needed_bytes(
        name, one_layer, tokens=snapshot.tokens, sessions=1, page_tokens=page_tokens
    )
    layers, count = rotation(spec, region_bytes, pool_bytes, room)
    store, sessions = stack.enter_context(
        opened(
            name,
            {**shape, "layers": layers},
            tokens=snapshot.tokens,
            sessions=count,
            page_tokens=page_tokens,
            threads=spec.threads,
            page_seed=spec.seed,
        )
    )
    fill(sessions[0], snapshot)
    for session in sessions[1:]:
        # To round the same rows again and again would take narrow formats minutes.
        if Capability.SPILL in candidates.get(name).capabilities:
            copy(session, sessions[0])
        else:
            fill(session, snapshot)
    return Arm(name, store, [(s, layer) for s in sessions for layer in range(layers)])


def attend_ns(arm: Arm, queries: F32, out: F32, scale: float, calls: int) -> int:
    """Nanoseconds of ``calls`` attention regions, one after the other in the rotation."""
    regions, at = arm.regions, arm.next_region
    n, q = len(regions), len(queries)
    start = clock.now_ns()
    for i in range(at, at + calls):
        session, layer = regions[i % n]
        session.attend(layer, queries[i % q], out, scale)
    stop = clock.now_ns()
    arm.next_region = at + calls
    return clock.elapsed_ns(start, stop, f"attention of {arm.name}")


def interleave(
    arms: dict[str, Arm], queries: F32, spec: AttentionSpec, note: Callable[[str], None]
) -> list[Row]:
    """Times of all candidates; every iteration takes all of them, in that iteration's own order."""
    out = np.empty_like(queries[0])
    scale = 1.0 / math.sqrt(queries.shape[-1])
    warmup = spec.warmup_iterations
    turns = max(1, warmup - 1)  # iterations that go through all regions
    fastest: float = SHORTEST_ITERATION_NS
    calls = 1
    counted = range(warmup, len(spec.orders))
    draw = np.random.default_rng(spec.seed)
    checked = set(draw.permutation(counted)[:CHECKED_ITERATIONS].tolist())
    rows: list[Row] = []
    with no_collection():
        for iteration, order in enumerate(spec.orders):
            if iteration == warmup:
                calls = math.ceil(SHORTEST_ITERATION_NS / fastest)
            for place, name in enumerate(order):
                if name not in arms:
                    continue
                note(name)
                if iteration < warmup:
                    calls = math.ceil(len(arms[name].regions) / turns)
                out.fill(np.nan)  # an arm that writes nothing must not inherit the one before
                try:
                    spent = attend_ns(arms[name], queries, out, scale, calls)
                except Exception as error:
                    rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
                    del arms[name]
                    continue
                if iteration == warmup - 1:
                    fastest = min(fastest, spent / calls)
                if iteration < warmup:
                    continue
                if iteration in checked:
                    arms[name].keep(len(queries), out)
                rows.append(
                    {
                        "candidate": name,
                        "place": place,
                        "metric": "m1/attention_ms",
                        "index": iteration - warmup,
                        "value": spent / calls / 1e6,
                    }
                )
    return rows


def _rates(rows: list[Row], arms: dict[str, Arm], tokens: int, bracket: Bracket) -> list[Row]:
    """Each iteration's bytes a second, and how near it came to the lower ceiling."""
    found: list[Row] = []
    for name, arm in arms.items():
        spec = arm.store.spec
        again = candidates.get(name).reads_per_query_head
        loads = spec.q_heads / spec.kv_heads if again else 1
        least = _least_ms(arm, tokens, bracket, "probe/read_gb_per_s")
        for row in rows:
            if row["metric"] != "m1/attention_ms" or row["candidate"] != name:
                continue
            rate = arm.store.row_bytes * tokens / (row["value"] * 1e6)
            found.append({**row, "metric": "m1/unique_gb_per_s", "value": rate})
            found.append({**row, "metric": "m1/loaded_gb_per_s", "value": loads * rate})
            found.append({**row, "metric": "m1/ceiling_fraction", "value": least / row["value"]})
        held = float(len(arm.regions) * arm.store.row_bytes * tokens)
        found.append({"candidate": name, "metric": "m1/rotation_bytes", "value": held})
    return found


def _least_ms(arm: Arm, tokens: int, bracket: Bracket, reading: str) -> float:
    """Milliseconds of a region at the lower ceiling: its bytes at that reading, or its operations."""
    spec = arm.store.spec
    n_bytes = arm.store.row_bytes * tokens
    operations = operations_a_row(spec.q_heads, spec.head_dim) * tokens
    gb_per_s, gflop_per_s = bracket.best(reading), bracket.best("probe/fma_gflop_per_s")
    return max(n_bytes / gb_per_s, operations / gflop_per_s) / 1e6


def _checked(arms: dict[str, Arm], queries: F32, snapshot: Snapshot) -> list[Row]:
    """Largest error of each kept output, in units of its bound: at most 1 is right."""
    scale = 1.0 / math.sqrt(queries.shape[-1])

    @functools.cache
    def right(layer: int, query: int) -> np.ndarray:
        return reference.attention(queries[query], snapshot.k[layer], snapshot.v[layer], scale)

    @functools.cache
    def bound(profile: Profile, layer: int, query: int) -> np.ndarray:
        rows = snapshot.k[layer], snapshot.v[layer]
        return reference.tolerance(profile, queries[query], *rows, scale)

    rows: list[Row] = []
    for arm in arms.values():
        profile = candidates.get(arm.name).profile
        for index, (layer, query, out) in enumerate(arm.kept):
            of = layer % len(snapshot.k), query
            error = float((np.abs(out - right(*of)) / bound(profile, *of)).max())
            rows.append(
                {
                    "candidate": arm.name,
                    "metric": "m1/output_error",
                    "index": index,
                    "value": error,
                }
            )
    return rows


def _in_cache(arm: Arm, queries: F32, tokens: int, bracket: Bracket) -> list[Row]:
    """One region again and again: what the kernel does when memory is out of the way."""
    out = np.empty_like(queries[0])
    scale = 1.0 / math.sqrt(queries.shape[-1])
    alone = Arm(arm.name, arm.store, arm.regions[:1])
    with no_collection():
        fastest = min(attend_ns(alone, queries, out, scale, 1) for _ in range(3))
        calls = math.ceil(SHORTEST_ITERATION_NS / fastest)
        times = [attend_ns(alone, queries, out, scale, calls) / calls for _ in range(10)]
    least = _least_ms(arm, tokens, bracket, "probe/cached_read_gb_per_s")
    rows: list[Row] = []
    for index, spent in enumerate(times):
        at = {"candidate": arm.name, "index": index}
        rows.append({**at, "metric": "m1/in_cache_attention_ms", "value": spent / 1e6})
        rows.append({**at, "metric": "m1/in_cache_ceiling_fraction", "value": least * 1e6 / spent})
    return rows


if __name__ == "__main__":
    main(AttentionSpec, measure, sys.argv)
