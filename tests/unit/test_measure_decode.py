"""Workload, estimate, whole decodes, known answers and the control, on a small trial."""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from small_trial import (
    ARMS,
    BASELINE,
    CELLS,
    EXACT,
    arguments_of,
    folders,
    own_lock,
    rounds_of,
    small_run,
    table,
)

from kvtrial import reference
from kvtrial.candidates import candidates
from kvtrial.contract import FP32, Capability
from kvtrial.host import build
from kvtrial.hot.formats.fp16 import FP16
from kvtrial.measure import block, child, clock, kept
from kvtrial.measure.rotation import TooLarge
from kvtrial.measure.specs import BlockSpec, Filling
from kvtrial.measure.stores import HEADROOM_BYTES, Snapshot, fill, opened, shape_of
from kvtrial.run import corpus, models, protocol
from kvtrial.run.journal import Journal
from kvtrial.run.layout import STAGES
from kvtrial.stages import aa, control, estimate, m2, workload
from kvtrial.stages.common import Stage, StageError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with own_lock(tmp_path_factory.mktemp("lock") / "machine.lock"):
        yield small_run(tmp_path_factory.mktemp("results"), estimate, workload)


@pytest.fixture(scope="module")
def arguments(run):
    return arguments_of(run)


@pytest.fixture(scope="module")
def model(run):
    return models.load_model(run.parent / "models" / "tiny-llama.gguf")


# --------------------------------------------------------------------------------------------------
# Workload


def test_a_snapshot_is_the_prefill_and_goes_on_as_if_never_interrupted(run, model):
    (folder,) = folders(run, 48)
    tokens = json.loads((folder / "tokens.json").read_text())
    ids = np.array(tokens["ids"], np.int64)
    snapshot = Snapshot.open(folder)
    shape = shape_of(model)
    assert snapshot.k.shape == (shape["layers"], 48, shape["kv_heads"], shape["head_dim"])

    def decode(session, token, steps=5):
        decoder, found = model.decoder(threads=1, activations="fp32", batch=1), [token]
        for _ in range(steps):
            logits = decoder.step([session], np.array(found[-1:], np.int64))
            found.append(int(logits[0].argmax()))
        return found

    with opened(BASELINE, shape, tokens=64, sessions=1, page_tokens=16) as (_, (session,)):
        logits = model.prefill(session, ids, activations="fp32")
        assert int(logits.argmax()) == snapshot.next_id
        uninterrupted = decode(session, snapshot.next_id)
    with opened(BASELINE, shape, tokens=64, sessions=1, page_tokens=16) as (_, (session,)):
        fill(session, snapshot)
        assert decode(session, snapshot.next_id) == uninterrupted


def test_rows_come_from_fp32_activations_and_the_stream_is_the_text_that_follows(run, model):
    (folder,) = folders(run, 48)
    tokens = json.loads((folder / "tokens.json").read_text())
    text = model.tokenizer.encode(corpus.load_text())
    snapshot = Snapshot.open(folder)
    assert tokens["ids"] == text[:48]
    assert snapshot.forced.dtype == np.int64 and snapshot.forced.tolist() == text[48 : 48 + 512]
    off = {}
    for activations in ("fp32", "quantised"):
        with opened("K1", shape_of(model), tokens=48, page_tokens=16) as (_, (session,)):
            model.prefill(session, tokens["ids"], activations=activations)
            k, v = session.read(1, np.arange(48))
        off[activations] = max(np.abs(k - snapshot.k[1]).max(), np.abs(v - snapshot.v[1]).max())
    assert off["fp32"] < 1e-5 < 1e-3 < off["quantised"]


def test_another_way_of_making_is_another_workload(run, arguments, monkeypatch):
    (folder,) = folders(run, 48)
    stage = Stage.from_command_line("workload", "", arguments)
    before = workload.Plan.of(stage)
    assert before.folders(0)[48] == folder.relative_to(run.parent)
    assert before.incomplete(run.parent) == []
    found = {before.workload_id}
    built = build.facts()
    monkeypatch.setattr(workload.build, "facts", lambda: {**built, "rows_sha256": "0" * 64})
    found.add(workload.Plan.of(stage).workload_id)
    assert workload.Plan.of(stage).incomplete(run.parent) == [0, 1]
    monkeypatch.undo()
    monkeypatch.setattr(workload, "ACTIVATIONS", "quantised")
    found.add(workload.Plan.of(stage).workload_id)
    monkeypatch.undo()
    stage.protocol["page_tokens"] = 32
    found.add(workload.Plan.of(stage).workload_id)
    assert len(found) == 4
    # Not even one that lies where another should: its own facts are looked at too.
    wanted = {**before.facts, **workload.tokens_of(before.texts[0], 48)}
    assert workload.is_whole(folder, wanted)
    for key in ("model_sha256", "made", "forced"):
        assert not workload.is_whole(folder, {**wanted, key: None})


def test_measured_rows_are_ordinary_numbers(run):
    """B25: subnormals or non-finite values would time the CPU's slow paths, not a store."""
    for context in (32, 48):
        for folder in folders(run, context):
            snapshot = Snapshot.open(folder)
            for rows in (snapshot.k, snapshot.v):
                size = np.abs(rows)
                assert np.isfinite(size).all()
                assert not ((size > 0) & (size < np.finfo(np.float32).tiny)).any()


def test_sessions_have_texts_of_their_own_and_contexts_are_prefixes(run):
    ids = {
        (c, s): json.loads((f / "tokens.json").read_text())["ids"]
        for c in (32, 48)
        for s, f in enumerate(folders(run, c))
    }
    assert ids[32, 0] == ids[48, 0][:32]
    assert ids[32, 0] != ids[32, 1]
    short, long = (Snapshot.open(folders(run, c)[0]) for c in (32, 48))
    assert np.array_equal(short.k, long.k[:, :32]) and np.array_equal(short.v, long.v[:, :32])


def test_whole_snapshots_are_kept_and_a_damaged_one_is_made_again(run, arguments, tmp_path):
    copied = tmp_path / "results"
    shutil.copytree(run.parent, copied)
    there = ["--run-dir", str(copied / "run"), "--gguf", arguments[3]]
    sound, damaged = folders(copied / "run", 32)
    before = {f: (f / "k.npy").stat().st_mtime_ns for f in (sound, damaged)}
    content = (damaged / "k.npy").read_bytes()
    (damaged / "k.npy").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert workload.main(there) == 0
    assert (damaged / "k.npy").read_bytes() == content
    assert (sound / "k.npy").stat().st_mtime_ns == before[sound]
    assert not list(copied.glob("workloads/*/*/.*")), "something was left beside"


# --------------------------------------------------------------------------------------------------
# Estimate


def test_the_estimate_asks_every_arm_and_prefills_only_what_is_missing(
    run, arguments, tmp_path, monkeypatch
):
    asked = []
    real = child.run

    def measured(module, spec, *surroundings):
        rows = real(module, spec, *surroundings)
        asked.append((spec, rows))
        return rows

    monkeypatch.setattr(estimate.child, "run", measured)
    copied = tmp_path / "results" / "run"
    shutil.copytree(run, copied)
    assert estimate.main(["--run-dir", str(copied), "--gguf", arguments[3]]) == 0
    shutil.copytree(run.parent / "workloads", copied.parent / "workloads")
    assert estimate.main(["--run-dir", str(copied), "--gguf", arguments[3]]) == 0
    (missing, rows), (there, others) = asked
    way = Filling(store="K1", activations="fp32", chunk=48)
    assert (missing.prefill, there.prefill) == (way, None)
    found = {(r["metric"], r.get("candidate"), r.get("index")) for r in rows}
    contexts = {**dict.fromkeys(ARMS, (32, 48)), "C0": (32,)}
    for name, own in contexts.items():
        for metric in ("arm_s", "step_s", "attention_s"):
            assert {(f"calibrate/{metric}", name, context) for context in own} <= found
    once = {"start_s", "load_s", "probe_s", "prompts_s", "position_s"}
    assert {(f"calibrate/{metric}", None, None) for metric in once} <= found
    assert all(r["value"] > 0 for r in (*rows, *others))
    prefills = {("calibrate/prefill_s", None, 0), ("calibrate/prefill_s", None, 48)}
    assert found - prefills == {(r["metric"], r.get("candidate"), r.get("index")) for r in others}
    document = json.loads((copied / "estimate.json").read_text())
    assert set(document["stages"]) == {
        "workload",
        *(set(STAGES) - {"run"}),
        "verdict",
    }


# --------------------------------------------------------------------------------------------------
# M2


def test_m2_measures_every_arm_in_every_block(run, arguments):
    assert m2.main(arguments) == 0
    rows = table(run, "m2")
    assert rows.query("metric in ['failed', 'not_run']").empty
    assert len(rows.query("metric == 'attempt/complete'")) == 1
    for cell, blocks in zip(CELLS, (3, 2)):
        own = rows.query(f"context == {cell['context']} and sessions == {cell['sessions']}")
        valid = own[own["trial"] == own.groupby("block")["trial"].transform("max")]
        assert valid["block"].nunique() == blocks
        for name, number in itertools.product(ARMS, range(blocks)):
            arm = valid[(valid["candidate"] == name) & (valid["block"] == number)]
            metric = arm.groupby("metric")["value"]
            counted = list(range(rounds_of(ARMS)))
            assert list(arm.query("metric == 'm2/step_ms'")["index"]) == counted
            assert (metric.get_group("m2/step_ms") > 0).all()
            attention = metric.get_group("m2/attention_ms").to_numpy()
            assert (attention > 0).all()
            assert (attention < metric.get_group("m2/step_ms").to_numpy()).all()
            assert list(metric.get_group("m2/tokens")) == [len(counted) * cell["sessions"]]
        assert set(valid.query("metric == 'env/OMP_NUM_THREADS'")["text"]) == {"1"}
        assert len(valid.query("metric == 'probe/spin_ms' and block == 0")) == 1
    for metric in ("output_xxh3", "rows_xxh3"):
        own = rows.query("metric == @metric and context == 48")
        assert (own.groupby("candidate")["text"].nunique() == 1).all(), metric
    # FP32 arms of this engine, same tokens: the same rows but for the last bits of their sums.
    compared = rows.query("metric == 'm2/logits_kld' and block == 0")
    assert set(compared["candidate"]) == set(ARMS) - {"K1"}
    assert (compared["value"].abs() < 1e-3).all()
    seconds = rows.set_index("metric")["value"]
    assert seconds["attempt/estimated_s"] > 0 and seconds["attempt/taken_s"] > 0


def test_real_calls_are_checked_in_every_block(run):
    rows = table(run, "m2")
    for metric in ("m2/output_error", "m2/row_error"):
        errors = rows[rows["metric"] == metric]
        assert set(zip(errors["context"], errors["candidate"], errors["block"])) == {
            (context, name, block)
            for context, blocks in ((48, 3), (32, 2))
            for name in ARMS
            for block in range(blocks)
        }
        assert (errors["value"] <= 1).all()
    # FP32 rows come back as they were given; those of FP16 are off, within half a unit.
    off = rows[rows["metric"] == "m2/row_error"].groupby("candidate")["value"].max()
    assert (off[EXACT] == 0).all() and 0 < off["K2"] <= 1


class Dropping:
    """A session that attends as if its oldest page were not there."""

    def __init__(self, session):
        self._session = session

    def __getattr__(self, name):
        return getattr(self._session, name)

    def attend(self, layer, q, out, scale):
        k, v = self._session.read(layer, np.arange(self._session.length(layer)))
        out[:] = reference.attention(q, k[16:], v[16:], scale)


@pytest.mark.parametrize("dropping", [False, True])
def test_a_store_that_drops_old_rows_while_it_decodes_is_caught(run, model, dropping):
    snapshot = Snapshot.open(folders(run, 48)[0])
    decoder = model.decoder(threads=1)
    with opened("K1", shape_of(model), tokens=64, page_tokens=16) as (_, (session,)):
        fill(session, snapshot)
        watched = kept.Kept(Dropping(session) if dropping else session, layer=1)
        decoder.step([watched], snapshot.forced[:1])
        decoder.step([session], snapshot.forced[1:2])  # goes on behind the kept call
        assert watched.call.position == 48 and watched.call.by_slot
        assert kept.row_error(watched.call, session, FP32) == 0
        error = kept.output_error(watched.call, session, snapshot, FP32)
        assert (error > 100) if dropping else (error <= 1)


def test_a_row_that_comes_back_changed_is_caught(run, model):
    snapshot = Snapshot.open(folders(run, 48)[0])
    with opened("K2", shape_of(model), tokens=64, page_tokens=16) as (_, (session,)):
        fill(session, snapshot)
        watched = kept.Kept(session, layer=0)
        model.decoder(threads=1).step([watched], snapshot.forced[:1])
        call = watched.call
        assert not call.by_slot  # FP16 elements: the engine falls back
        assert 0 < kept.row_error(call, session, FP16.profile) <= 1
        assert kept.row_error(call, session, FP32) == math.inf
        other = dataclasses.replace(call, k=call.k * np.float32(1.01))
        assert kept.row_error(other, session, FP16.profile) > 1


def spec_of(run, names, **other):
    registered = protocol.load(run / "protocol.json")
    spec = BlockSpec(
        gguf=str(run.parent / "models" / "tiny-llama.gguf"),
        candidates=list(names),
        reference="K1",
        snapshots=[str(folders(run, 48)[0])],
        threads=1,
        page_tokens=16,
        rotation=registered["rotation"],
        rounds=8,
        slow=None,
        seed=1,
    )
    return dataclasses.replace(spec, **other)


def test_a_slow_arm_comes_last_in_every_fourth_round_with_the_rows_that_it_missed(run):
    """What it gives is what it gives as a fast arm, up to rounding: it has all rows of its context."""
    asked = []
    names = ["K1", "A2", "K0"] if "K0" in ARMS else ["K1", "A2"]
    slow = names[1:]
    rows = block.measure(spec_of(run, names, slow=slow, compare=True), asked.append)
    steps = {
        name: [r["index"] for r in rows if r["metric"] == "m2/step_ms" and r["candidate"] == name]
        for name in names
    }
    assert all(steps[name] == [3, 7] for name in slow)
    assert steps["K1"] == [0, 1, 2, 3, 5, 6, 7]  # not in the round after a slow one
    shifts = [r["value"] for r in rows if r["metric"] == "m2/logits_shift"]
    assert len(shifts) == 2 * len(slow) and max(shifts) < 0.1
    # Opened first of all; then K1 alone in the rounds of the warm-up and four counted ones.
    at_work = [name for name in asked if name]
    warmup = spec_of(run, names).rotation["warmup_rounds"]
    assert at_work[len(names) :].index(slow[0]) == warmup + 4
    errors = [r["value"] for r in rows if r["metric"] in ("m2/output_error", "m2/row_error")]
    assert errors and max(errors) <= 1


def test_a_block_without_arms_says_so(run):
    with pytest.raises(SystemExit, match="no arm is left to measure"):
        block.measure(spec_of(run, []), lambda arm: None)


def test_a_block_that_finds_out_who_is_slow_does_the_work_of_one_that_was_told(run, monkeypatch):
    """Equal bytes in every block: the steps that showed it are undone."""
    monkeypatch.setattr(block.rotation, "slow_arms", lambda *_: ["A2"])
    found, told = (
        {
            (row["candidate"], row["metric"]): row["text"]
            for row in block.measure(spec_of(run, ["K1", "A2"], slow=slow), lambda arm: None)
            if row["metric"] in ("output_xxh3", "rows_xxh3")
        }
        for slow in (None, ["A2"])
    )
    assert len(found) == 4 and found == told


def test_an_arm_that_was_interrupted_is_not_taken_for_slow(monkeypatch):
    """Beside two busy loops both of K3's first steps were, and it was measured in every eighth round of a cell."""
    wall, own = {"K1": 10, "K3": 100, "K0": 100}, {"K1": 10, "K3": 11, "K0": 100}
    spent = {"wall": 0, "own": 0}
    monkeypatch.setattr(block.clock, "now_ns", lambda: spent["wall"])
    monkeypatch.setattr(block.clock, "own_ns", lambda: spent["own"])

    class Stepping:
        spec = SimpleNamespace(
            seed=1,
            slow=None,
            reference="K1",
            rotation={"slow_ratio": 2.5},
            candidates=list(wall),
        )

        def step(self, arm, number, *, timed):
            spent["wall"] += wall[arm]
            spent["own"] += own[arm]

    assert block._slow({name: name for name in wall}, Stepping()) == ["K0"]


def test_orders_are_balanced_within_a_block(run):
    asked = []
    names = [name for name in ARMS if name != "K0"][:4]
    rows = block.measure(spec_of(run, names, rounds=4, slow=[]), asked.append)
    assert not [r for r in rows if r["metric"] == "rotation/slow"]
    # Opened one after the other, stepped, and asked again at the end: the rounds are in between.
    at_work = [name for name in asked if name][len(names) :][: 4 * (2 + 4)]
    rounds = [at_work[i : i + 4] for i in range(0, len(at_work), 4)][2:]
    assert all(sorted(order) == sorted(names) for order in rounds)
    for place in range(4):
        assert sorted(order[place] for order in rounds) == sorted(names)
    follows = [pair for order in rounds for pair in itertools.pairwise(order)]
    assert sorted(follows) == sorted(itertools.permutations(names, 2))


@pytest.mark.parametrize(("threads", "name"), [(1, "own_ns"), (2, "now_ns")])
def test_a_planted_slowness_is_as_large_as_registered(monkeypatch, threads, name):
    """The arm spins until its step has taken so much more, by its thread's own clock where it has one: an
    interruption of the spin, of which the wall's clock would see no more than the rest, counts in full."""
    ticks = itertools.count(step=1000)
    monkeypatch.setattr(block.clock, name, lambda: next(ticks))
    arm = block.Arm("planted", "K1", None, [], _Decoder(), spin=7.0, threads=threads)
    arm.step([], np.zeros(1, np.int64))
    # Two readings around the step, 1000 ns apart, and as many more as 7 times that takes.
    assert next(ticks) == 1000 * (2 + 7)


class _Decoder:
    def step(self, sessions, ids):
        return np.zeros((1, 3), np.float32)


def test_an_arm_that_raises_names_itself(run, monkeypatch):
    class Broken(Exception):
        pass

    real = block.opened

    @contextlib.contextmanager
    def opened_broken(name, *args, **kwargs):
        with real(name, *args, **kwargs) as (store, sessions):
            yield store, [_Raising(s) if name == "A2" else s for s in sessions]

    class _Raising(Dropping):
        def attend(self, *args):
            raise Broken("at step 40")

    monkeypatch.setattr(block, "opened", opened_broken)
    with pytest.raises(child.ArmFailed, match="Broken: at step 40") as failed:
        block.measure(spec_of(run, ["K1", "A2"]), lambda name: None)
    assert failed.value.arm == "A2"


def test_a_forced_stream_shorter_than_the_steps_is_said(run, arguments):
    stage = Stage.from_command_line("m2", "", arguments)
    with pytest.raises(
        StageError, match=r"512 tokens, and 600 steps are registered: lower `rounds`"
    ):
        stage.snapshots(48, 1, steps=600)


def test_a_machine_with_less_memory_measures_in_groups(run, arguments, monkeypatch):
    stage = Stage.from_command_line("m2", "", arguments)
    assert m2.groups(stage, CELLS[0], ARMS) == [ARMS]
    shape = stage.workload.shape
    # 48 positions, 2 + 30 + 4 steps, spare pages: (6 + 4) pages of 16 rows, FP32.
    one = 10 * 16 * 2 * 4 * shape["kv_heads"] * shape["head_dim"] * shape["layers"]
    held = stage.gguf.stat().st_size + HEADROOM_BYTES
    monkeypatch.setattr(m2.machine, "available_memory_bytes", lambda: held + 3 * one)
    anchors = [name for name in ("K1", ARMS[-1]) if name in ARMS]
    assert stage.anchors == anchors
    several = m2.groups(stage, CELLS[0], ARMS)
    assert len(several) > 1 and all(set(anchors) <= set(group) for group in several)
    assert set().union(*several) == set(ARMS)
    monkeypatch.setattr(m2.machine, "available_memory_bytes", lambda: held + one)
    with pytest.raises(TooLarge, match=r"need 0\.0 GiB of memory together"):
        m2.groups(stage, CELLS[0], ARMS)


def test_bytes_are_counted_from_lengths(run, model):
    rows = table(run, "m2").query("context == 48 and block == 0")
    layers, steps, warmup = model.config.layers, rounds_of(ARMS), 2
    for name in ARMS:
        with opened(name, shape_of(model), tokens=64, page_tokens=16) as (store, _):
            row_bytes = store.row_bytes
        lengths = [48 + warmup + step + 1 for step in range(steps)]
        expected = sum(layers * row_bytes * n for n in lengths) / steps
        values = rows.query("candidate == @name").groupby("metric")["value"]
        assert list(values.get_group("m2/kv_bytes_per_token")) == [pytest.approx(expected)]
        assert list(values.get_group("m2/row_bytes")) == [layers * row_bytes]


def test_costs_are_there_where_the_candidate_has_the_verb(run):
    rows = table(run, "m2").query("context == 48 and block == 0 and trial == 0")
    for name in ARMS:
        has = candidates()[name].capabilities
        own = rows.query("candidate == @name")["metric"].value_counts()
        assert own.get("m2/append_us", 0) == (
            block.COST_REPETITIONS if Capability.ROLLBACK in has else 0
        )
        assert own.get("m2/branch_us", 0) == (
            block.COST_REPETITIONS if Capability.BRANCH in has else 0
        )


def test_no_arm_allocates_in_a_step(run):
    rows = table(run, "m2").query("metric == 'm2/allocations'")
    assert set(rows["candidate"]) == set(ARMS)
    counted = rows[rows["text"] == ""]
    assert counted.query("value != 0").empty
    passes = len(m2.ALLOCATION_THREADS)
    assert len(counted) in (0, m2.ALLOCATION_STEPS * len(ARMS) * passes)
    assert set(counted["threads"]) in (set(), {1, 2})


def test_a_clock_that_stands_still_fails_the_arm(run, monkeypatch):
    """Case F11, in the decode."""
    monkeypatch.setattr(clock, "now_ns", lambda: 7)
    with (
        pytest.raises(child.ArmFailed, match="TimerResolution: step 2 of K1"),
        child.blamed("K1", lambda name: None),
    ):
        block.measure(spec_of(run, ["K1"]), lambda name: None)


def test_an_arm_that_would_stay_in_the_cache_is_measured_alone_once(run):
    rows = table(run, "m2").query("context == 48")
    alone = rows[rows["metric"] == "m2/alone_step_ms"]
    assert set(alone["block"]) == {0} and set(alone["candidate"]) == set(ARMS)
    assert (alone.groupby("candidate").size() == 4).all()  # tiny-llama fits into any cache


def test_known_answers_are_one_candidate_three_times(run, arguments):
    assert aa.main(arguments) == 0
    rows = table(run, "aa")
    assert rows.query("metric == 'failed'").empty
    steps = rows.query("metric == 'm2/step_ms' and trial == 0")
    assert set(steps["candidate"]) == {"first", "second", "planted"}
    assert (steps.groupby(["block", "candidate"]).size() == rounds_of("abc")).all()
    # All are K1: to the byte what it gave in m2.
    hashes = set(rows.query("metric == 'output_xxh3'")["text"])
    own = table(run, "m2").query("metric == 'output_xxh3' and candidate == 'K1' and context == 48")
    assert hashes == set(own["text"])
    # The planted one spins 12% of each step: its own work takes no less than the others' fastest.
    fastest = steps.groupby("candidate")["value"].min()
    assert fastest["planted"] > 1.05 * min(fastest["first"], fastest["second"])


def test_the_control_is_measured_once_beside_the_reference(run, arguments):
    assert control.main(arguments) == 0
    rows = table(run, "control")
    assert rows.query("metric in ['failed', 'not_run']").empty
    assert set(rows["candidate"]) == {"C0", "K1", "machine"}
    assert set(rows.loc[rows["candidate"] == "C0", "context"]) == {32}
    first = rows.query("trial == 0 and candidate == 'C0'")
    assert list(first.query("metric == 'm2/step_ms'")["index"]) == list(range(6))
    assert set(first.query("metric == 'm1/attention_ms'")["candidate"]) == {"C0"}
    assert "C0" not in set(table(run, "m2")["candidate"])


def test_a_cell_that_the_machine_cannot_hold_is_left_out_and_said(run, model):
    shape = shape_of(model)
    cell = {"context": 2**20, "sessions": 64, "threads": 1}
    registered = protocol.load(run / "protocol.json")
    said = workload.too_large(registered, shape, 0, cell)
    assert said is not None and said.startswith(
        "3 arms with 64 sessions of 1048576 positions need "
    )
    assert workload.too_large(registered, shape, 0, CELLS[0]) is None
    assert workload.too_large(registered, shape, 2**60, CELLS[0]) is not None


def test_skipped_cells_are_events_and_are_not_measured(run, tmp_path, arguments):
    copied = tmp_path / "results" / "run"
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns("journal", "events"))
    document = json.loads((run / "workload.json").read_text())
    document["skipped"] = {"32x2x1": "too large"}
    (copied / "workload.json").write_text(json.dumps(document))
    stage = Stage.from_command_line("m2", "", ["--run-dir", str(copied), "--gguf", arguments[3]])
    attempt = Journal(copied, "m2").attempt()
    assert [c["context"] for c in stage.measured_cells(attempt)] == [48]
    assert [c["context"] for c in stage.measured_cells(attempt)] == [48]
    (skipped,) = attempt.rows()
    assert (skipped["metric"], skipped["text"]) == ("cell/skipped", "too large")
    assert (skipped["context"], skipped["sessions"]) == (32, 2)
