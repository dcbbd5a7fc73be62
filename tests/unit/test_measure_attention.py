"""M1 and the allocation pass on a real candidate, in real processes."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from kvtrial.candidates import candidates
from kvtrial.contract import Capability
from kvtrial.measure import allocations, attention, child, clock
from kvtrial.measure.rotation import orders
from kvtrial.measure.specs import AllocationSpec, AttentionSpec
from kvtrial.measure.stores import Snapshot, copy, fill, needed_bytes, opened

SHAPE = {"layers": 2, "q_heads": 6, "kv_heads": 2, "head_dim": 32}
TOKENS = 50
BUILT = [name for name, candidate in candidates().items() if candidate.not_built is None]


@pytest.fixture
def snapshot(tmp_path):
    draw = np.random.default_rng(5)
    for name in ("k", "v"):
        rows = draw.standard_normal((2, TOKENS, 2, 32), np.float32)
        np.save(tmp_path / f"{name}.npy", rows)
    (tmp_path / "tokens.json").write_text(json.dumps({"next_id": 11, "forced": []}))
    return tmp_path


def spec_for(snapshot, names, **more):
    spec = AttentionSpec(
        shape=SHAPE,
        candidates=names,
        orders=orders(names, 6, 1)[:6],
        snapshots=[str(snapshot)],
        threads=1,
        page_tokens=16,
        warmup_iterations=2,
        rotation_llc_multiple=0,
        seed=1,
    )
    return replace(spec, **more)


@pytest.mark.parametrize("name", ["K1", "K5", "K5T", "K6"])
def test_a_copied_session_has_the_bytes_of_its_source(name, snapshot):
    with opened(name, SHAPE, tokens=TOKENS, sessions=2, page_tokens=16, page_seed=3) as (_, two):
        source, made = two
        fill(source, Snapshot.open(snapshot))
        copy(made, source)
        assert made.length(1) == TOKENS
        for layer in range(2):
            for page in range(4):
                assert bytes(made.page_bytes(layer, page)) == bytes(source.page_bytes(layer, page))


def values(rows, metric, name="machine"):
    return [
        r["value"]
        for r in rows
        if r["metric"] == metric and r.get("candidate", "machine") == name and "value" in r
    ]


def test_a_block_of_every_built_candidate(snapshot):
    rows = child.run("kvtrial.measure.attention", spec_for(snapshot, BUILT), threads=1)
    assert not [r for r in rows if r["metric"] == "failed"]
    bandwidth = max(values(rows, "probe/read_gb_per_s")) * 1e9
    cached = max(values(rows, "probe/cached_read_gb_per_s")) * 1e9
    flops = max(values(rows, "probe/fma_gflop_per_s")) * 1e9
    assert len(values(rows, "probe/spin_ms")) == 2
    for name in BUILT:
        times = values(rows, "m1/attention_ms", name)
        assert len(times) == 4 and all(t > 0 for t in times)
        with opened(name, SHAPE, tokens=TOKENS, page_tokens=16) as (store, _):
            n_bytes = store.row_bytes * TOKENS
        for t, rate, loaded, share in zip(
            times,
            values(rows, "m1/unique_gb_per_s", name),
            values(rows, "m1/loaded_gb_per_s", name),
            values(rows, "m1/ceiling_fraction", name),
        ):
            assert loaded == pytest.approx(3 * rate if name == "K0" else rate)  # 6 heads on 2
            assert rate == pytest.approx(n_bytes / t / 1e6)
            at_ceiling = max(n_bytes / bandwidth, 4 * 6 * 32 * TOKENS / flops)
            assert share == pytest.approx(at_ceiling / (t / 1e3))
        inside = values(rows, "m1/in_cache_attention_ms", name)
        at_ceiling = max(n_bytes / cached, 4 * 6 * 32 * TOKENS / flops)
        shares = [at_ceiling / (t / 1e3) for t in inside]
        assert values(rows, "m1/in_cache_ceiling_fraction", name) == pytest.approx(shares)
        assert len(inside) == 10
    texts = {r["metric"]: r.get("text") for r in rows if r["metric"].startswith("env/")}
    assert texts["env/OMP_NUM_THREADS"] == "1"
    assert values(rows, "env/blas_threads") == [1.0]


def test_timed_outputs_are_within_their_bounds(snapshot):
    rows = child.run("kvtrial.measure.attention", spec_for(snapshot, BUILT), threads=1)
    for name in BUILT:
        errors = values(rows, "m1/output_error", name)
        assert len(errors) == attention.CHECKED_ITERATIONS
        assert all(0 <= e <= 1 for e in errors), (name, errors)


def lazy(session):
    """A session whose attention remembers its first output."""
    real, remembered = session.attend, []

    def attend(layer, q, out, scale):
        if not remembered:
            real(layer, q, out, scale)
            remembered.append(out.copy())
        out[:] = remembered[0]

    return SimpleNamespace(attend=attend)


def test_a_kernel_that_remembers_instead_of_working_is_far_outside(snapshot, monkeypatch):
    real = attention._open_arm

    def open_arm(stack, name, *args):
        arm = real(stack, name, *args)
        if name == "K1":
            sessions = {id(s): lazy(s) for s, _ in arm.regions}
            arm.regions = [(sessions[id(s)], layer) for s, layer in arm.regions]
        return arm

    monkeypatch.setattr(attention, "_open_arm", open_arm)
    rows = attention.measure(spec_for(snapshot, ["A2", "K1"]), lambda name: None)
    assert max(values(rows, "m1/output_error", "A2")) <= 1
    # What it remembers is right for the one pair of region and query that it worked on.
    assert max(values(rows, "m1/output_error", "K1")) > 100


def test_a_shape_that_no_model_has_is_measured_on_synthetic_rows(snapshot):
    shape = {"layers": 2, "q_heads": 14, "kv_heads": 2, "head_dim": 64}
    spec = spec_for(snapshot, BUILT, shape=shape, snapshots=[], synthetic_tokens=70)
    rows = child.run("kvtrial.measure.attention", spec, threads=1)
    assert not [r for r in rows if r["metric"] == "failed"]
    for name in BUILT:
        assert max(values(rows, "m1/output_error", name)) <= 1
        with opened(name, shape, tokens=70, page_tokens=16) as (store, _):
            region = store.row_bytes * 70
        (held,) = values(rows, "m1/rotation_bytes", name)
        assert held == region


def test_a_large_cache_takes_more_layers_not_more_sessions_than_a_store_has(snapshot, monkeypatch):
    monkeypatch.setattr(attention.machine, "last_level_cache_bytes", lambda threads: 600_000)
    rows = attention.measure(spec_for(snapshot, ["K5"], rotation_llc_multiple=4), lambda name: None)
    assert not [r for r in rows if r["metric"] == "failed"]
    (held,) = values(rows, "m1/rotation_bytes", "K5")
    assert held >= 4 * 600_000
    assert max(values(rows, "m1/output_error", "K5")) <= 1


def page_ids(name, seed, tokens=320):
    with opened(name, SHAPE, tokens=tokens, page_tokens=16, page_seed=seed) as (_, (session,)):
        draw = np.random.default_rng(1)
        rows = draw.standard_normal((2, tokens, 2, 32), np.float32)
        for layer in range(2):
            session.append(layer, np.arange(tokens), rows[0], rows[1])
        q, out = draw.standard_normal((6, 32), np.float32), np.empty((6, 32), np.float32)
        session.attend(1, q, out, 0.2)
        return session.page_table(1).page_ids.tolist(), out.tobytes()


PAGED = [n for n in BUILT if Capability.POOL in candidates()[n].capabilities]


@pytest.mark.parametrize("name", PAGED)
def test_pages_lie_in_another_order_in_each_block_and_nothing_else_changes(name):
    plain, expected = page_ids(name, None)
    first, output = page_ids(name, 1)
    assert output == expected
    assert page_ids(name, 1)[0] == first
    assert page_ids(name, 2)[0] != first
    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(first))
    assert neighbours < len(first) / 2
    assert sorted(set(first)) == sorted(first) and len(first) == len(plain)


def test_the_rotation_holds_four_caches(snapshot, monkeypatch):
    monkeypatch.setattr(attention.machine, "last_level_cache_bytes", lambda threads: 40_000)
    spec = spec_for(snapshot, BUILT[:1], rotation_llc_multiple=4)
    rows = attention.measure(spec, lambda name: None)
    with opened(BUILT[0], SHAPE, tokens=TOKENS, page_tokens=16) as (store, _):
        region = store.row_bytes * TOKENS
    (held,) = values(rows, "m1/rotation_bytes", BUILT[0])
    assert held >= 160_000 and held % region == 0
    # 12 arms on a machine with a megabyte left: an arm has a half of a twelfth of it.
    monkeypatch.setattr(attention.machine, "available_memory_bytes", lambda: 960_000)
    room = attention.room_bytes(replace(spec, candidates=["K1"] * 12))
    assert room == 40_000
    # FP16: 160,000 bytes are 160 regions of 1,000, and 40,000 hold 20 that take 2,000 each.
    layers, count = attention.rotation(spec, 1000, 2000, room)
    assert layers * count == 20
    assert held <= 160_000 + 2 * region


class Regions:
    """Records which region an iteration takes; stands for a session."""

    def __init__(self, taken):
        self.taken = taken

    def attend(self, layer, q, out, scale):
        self.taken.append((id(self), layer))


def test_regions_come_in_turn_and_none_twice_before_all_others():
    taken = []
    a, b = Regions(taken), Regions(taken)
    arm = attention.Arm("K1", None, [(a, 0), (a, 1), (b, 0), (b, 1)])
    queries = np.zeros((16, 6, 32), np.float32)
    for calls in (1, 2, 5):
        attention.attend_ns(arm, queries, queries[0], 1.0, calls)
    ring = [(id(s), layer) for s, layer in arm.regions]
    assert taken == [ring[i % 4] for i in range(8)]


def test_the_warm_up_goes_through_every_region():
    """Case: ten warm-up calls of 171 regions; the first calls on the rest were counted, at several times
    what the next ones took."""
    taken = []
    a, b = Regions(taken), Regions(taken)
    few = attention.Arm("K1", None, [(a, 0), (b, 0)])
    many = attention.Arm("K3", None, [(a, 1 + layer) for layer in range(7)])
    queries = np.zeros((16, 6, 32), np.float32)
    spec = SimpleNamespace(warmup_iterations=3, orders=[["K1", "K3"]] * 3, seed=1)
    assert attention.interleave({"K1": few, "K3": many}, queries, spec, lambda name: None) == []
    # Two turns go through all: one of two regions each, four of seven. The third begins again.
    assert (few.next_region, many.next_region) == (3, 12)
    assert set(taken) == {(id(s), layer) for arm in (few, many) for s, layer in arm.regions}


def test_a_counted_iteration_lasts_a_millisecond_by_what_a_warm_call_takes(monkeypatch):
    """A call takes 50 us, the first on a region 400; the other arm is slower, and has no say."""
    made = []

    def attend_ns(arm, queries, out, scale, calls):
        first = max(0, min(calls, len(arm.regions) - arm.next_region))
        arm.next_region += calls
        made.append((arm.name, calls))
        return (400_000 * first + 50_000 * (calls - first)) * (2 if arm.name == "K3" else 1)

    monkeypatch.setattr(attention, "attend_ns", attend_ns)
    arms = {n: attention.Arm(n, SimpleNamespace(), [(None, 0)] * 18) for n in ("K1", "K3")}
    queries = np.zeros((16, 6, 32), np.float32)
    spec = SimpleNamespace(warmup_iterations=10, orders=[["K1", "K3"]] * 12, seed=1)
    rows = attention.interleave(arms, queries, spec, lambda name: None)
    assert made[:20] == [("K1", 2), ("K3", 2)] * 10
    assert made[20:] == [("K1", 20), ("K3", 20)] * 2
    assert [row["value"] for row in rows] == pytest.approx([0.05, 0.1] * 2)


def test_a_clock_that_stands_still_fails_the_arm_by_name(snapshot, monkeypatch):
    """Case F11: no rate is made of an interval of zero."""
    spec = spec_for(snapshot, BUILT[:1])
    real = attention.interleave

    def interleave(*args):
        with monkeypatch.context() as patch:
            patch.setattr(clock, "now_ns", lambda: 5)
            return real(*args)

    monkeypatch.setattr(attention, "interleave", interleave)
    rows = attention.measure(spec, lambda name: None)
    (failed,) = [r["text"] for r in rows if r["metric"] == "failed"]
    assert failed.startswith("TimerResolution: attention of " + BUILT[0])
    assert values(rows, "m1/unique_gb_per_s", BUILT[0]) == []


def test_an_arm_that_fails_half_way_costs_its_own_rows_and_is_the_one_that_was_noted(
    snapshot, monkeypatch
):
    bad, good = BUILT[:2]
    real, noted, calls = attention.attend_ns, [], []

    def attend_ns(arm, *args):
        assert noted[-1] == arm.name
        calls.append(arm.name)
        if arm.name == bad and calls.count(bad) == 4:  # two of warm-up, one that counted
            raise RuntimeError("half way")
        return real(arm, *args)

    monkeypatch.setattr(attention, "attend_ns", attend_ns)
    rows = attention.measure(spec_for(snapshot, [bad, good]), noted.append)
    (failed,) = [r for r in rows if r["metric"] == "failed"]
    assert (failed["candidate"], failed["text"]) == (bad, "RuntimeError: half way")
    assert values(rows, "m1/unique_gb_per_s", bad) == []
    assert len(values(rows, "m1/unique_gb_per_s", good)) == 4


def test_an_arm_that_writes_nothing_does_not_inherit_the_one_before(snapshot, monkeypatch):
    """Case: two FP32 arms take the same query of the same region, one after the other."""
    lazy, honest = BUILT[:2]
    real = attention.attend_ns

    def attend_ns(arm, queries, out, scale, calls):
        kept = out.copy()
        spent = real(arm, queries, out, scale, calls)
        if arm.name == lazy:
            out[:] = kept
        return spent

    monkeypatch.setattr(attention, "attend_ns", attend_ns)
    rows = attention.measure(spec_for(snapshot, [lazy, honest]), lambda name: None)
    assert not any(error <= 1 for error in values(rows, "m1/output_error", lazy))
    assert all(error <= 1 for error in values(rows, "m1/output_error", honest))


def test_a_candidate_that_cannot_open_costs_its_own_rows(snapshot):
    rows = child.run("kvtrial.measure.attention", spec_for(snapshot, ["nobody", BUILT[0]]), 1)
    (failed,) = [r for r in rows if r["metric"] == "failed"]
    assert failed["candidate"] == "nobody" and "UnknownCandidate" in failed["text"]
    assert len(values(rows, "m1/attention_ms", BUILT[0])) == 4


def test_snapshots_are_loaded_bitwise(snapshot):
    rows = Snapshot.open(snapshot)
    assert (rows.tokens, rows.next_id) == (TOKENS, 11)
    fp32 = [n for n in BUILT if candidates()[n].profile.name == "fp32"]
    for name in fp32:
        with opened(name, SHAPE, tokens=TOKENS, page_tokens=16) as (_, (session,)):
            fill(session, rows)
            for layer in range(2):
                k, v = session.read(layer, np.arange(TOKENS))
                assert k.tobytes() == np.load(snapshot / "k.npy")[layer].tobytes()
                assert v.tobytes() == np.load(snapshot / "v.npy")[layer].tobytes()


def test_more_than_the_memory_is_refused_before_it_is_tried():
    shape = {**SHAPE, "layers": 4000}
    needed = needed_bytes("K1", SHAPE, tokens=17, sessions=3, page_tokens=16)
    assert needed == 3 * 2 * (2 + 4) * 16 * 2 * 32 * 2 * 4
    with (
        pytest.raises(MemoryError, match="are available"),
        opened(BUILT[0], shape, tokens=10**8, page_tokens=16),
    ):
        pass


@pytest.mark.skipif(allocations.library() is None, reason="needs Linux and glibc")
@pytest.mark.parametrize("threads", [1, 2])
def test_no_candidate_allocates_in_a_step(threads):
    """Case I13, by the malloc hook: append and attend over a page's end, in any thread.

    C0 is outside of the promise: its binding makes an object of each value.
    """
    names = [name for name in BUILT if name != "C0"]
    spec = AllocationSpec(shape=SHAPE, candidates=names, page_tokens=16, steps=40, threads=threads)
    preload = allocations.preload_environment()
    rows = child.run("kvtrial.measure.allocation_pass", spec, threads, preload)
    assert not [r for r in rows if r["metric"] == "failed"]
    for name in names:
        assert values(rows, "m2/allocations", name) == [0.0] * 40, name


def test_without_the_hook_the_pass_says_so():
    spec = AllocationSpec(shape=SHAPE, candidates=BUILT[:1], threads=1, page_tokens=16, steps=2)
    (row,) = child.run("kvtrial.measure.allocation_pass", spec, 1)
    assert row["metric"] == "m2/allocations" and row["text"].startswith("not available")
