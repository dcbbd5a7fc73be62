"""The measured block on a real store, and the rows that the stage makes of killed writers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvtrial.decision import break_even
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.transformer import Model
from kvtrial.hot import native
from kvtrial.measure.cold import aftermath, crash, pagecache, restore
from kvtrial.measure.specs import RestoreSpec
from kvtrial.measure.stores import shape_of
from kvtrial.run import events
from kvtrial.run.layout import ConfigError
from kvtrial.stages import cold_tier

SHAPE = {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 32}
ROWS = 100


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtrial.candidates.candidates", lambda: {"K3": native.K3})
    draw = np.random.default_rng(7)
    for name in "kv":
        rows = draw.standard_normal((2, ROWS, 2, 32), dtype=np.float32)
        np.save(tmp_path / f"{name}.npy", rows)
    (tmp_path / "tokens.json").write_text(json.dumps({"next_id": 1, "forced": []}))
    return RestoreSpec(
        candidates=["plain", "Z2", "Z1"],
        order=["plain", "Z2", "Z1"],
        folder=str(tmp_path / "scratch"),
        snapshot=str(tmp_path),
        store="K3",
        shape=SHAPE,
        model_sha256="0" * 64,
        activations="fp32",
        page_tokens=16,
        prefix_tokens=ROWS,
        batches=4,
        repetitions=2,
        gguf="none",
        recompute_tokens=64,
    )


def test_every_arm_does_the_same_work_with_the_same_syncs(spec):
    noted = []
    rows = restore.measure(spec, noted.append)
    assert noted == ["plain", "Z2", "Z1"]
    assert [r for r in rows if r["metric"] == "failed"] == []
    values = {
        (r["candidate"], r["metric"], r["index"]): r["value"] for r in rows if "context" not in r
    }
    payload_mb = 7 * 2 * 16 * 2 * 2 * 32 * 4 / 1e6  # pages, layers, P, K and V, heads, dim, bytes
    for name in ("plain", "Z1", "Z2"):
        assert values[name, "cold/payload_mb", 0] == pytest.approx(payload_mb)
        assert values[name, "cold/fsyncs", 0] == 4
        assert values[name, "cold/batches", 0] == 4
    for name, read in (("plain", "plain_read"), ("Z1", "restore"), ("Z2", "restore")):
        assert values[name, f"cold/{read}_warm_ms", 1] > 0
        assert values[name, "cold/resident_fraction", 0] <= 1
        shorter = {r["context"] for r in rows if r["candidate"] == name and "context" in r}
        assert shorter == {16, 64}
    for name in ("Z1", "Z2"):
        parts = [values[name, f"cold/restore_{p}_ms", 0] for p in ("lookup", "read", "import")]
        assert min(parts) > 0
        assert values[name, "cold/gc_ms", 0] > 0 and values[name, "cold/index_mb", 0] > 0
        assert values[name, "cold/bytes_written_per_payload_byte", 0] >= 1
    assert values["Z2", "cold/restore_check_ms", 0] > 0
    assert values["Z1", "cold/restore_check_ms", 0] == 0
    assert values["Z1", "cold/restore_binding_ms", 0] >= 0
    frame = events.to_frame(events.event(**row) for row in rows)
    assert len(frame) == len(rows)


def test_the_disk_that_is_measured_is_the_one_that_is_named(tmp_path, monkeypatch):
    stage = SimpleNamespace(run_dir=tmp_path / "results" / "run-a")
    with cold_tier.scratch(stage) as folder:
        assert folder == tmp_path / "results" / "run-a" / "cold-scratch"
    monkeypatch.setenv("KVTRIAL_SCRATCH", str(tmp_path / "disk"))
    left = tmp_path / "disk" / "run-a" / "cold-scratch" / "left"
    left.mkdir(parents=True)
    with cold_tier.scratch(stage) as folder:
        assert folder == left.parent and list(folder.iterdir()) == []
    assert not folder.exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVTRIAL_SCRATCH", str(tmp_path / "file"))
    with (
        pytest.raises(ConfigError, match=r"run-a.* let KVTRIAL_SCRATCH name"),
        cold_tier.scratch(stage),
    ):
        pass


def test_a_cold_time_is_given_only_where_the_cache_was_seen_to_be_dropped(spec, monkeypatch):
    monkeypatch.setattr(pagecache, "resident_fraction", lambda files: 0.5)
    metrics = {r["metric"] for r in restore.measure(spec, lambda name: None)}
    assert "cold/restore_warm_ms" in metrics and "cold/restore_cold_ms" not in metrics


def test_a_failing_arm_costs_its_own_rows(spec, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("no disk")

    monkeypatch.setattr(restore, "open_cold", broken)
    rows = restore.measure(spec, lambda name: None)
    assert {r["candidate"] for r in rows if r["metric"] == "failed"} == {"Z1", "Z2"}
    assert any(r["candidate"] == "plain" and r["metric"] == "cold/payload_mb" for r in rows)


def test_the_resident_fraction_counts_pages_that_were_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 4096))
    assert pagecache.resident_fraction([path]) == 1.0
    empty = tmp_path / "empty"
    empty.touch()
    assert pagecache.resident_fraction([empty]) == 0.0


def test_a_round_that_broke_a_promise_is_a_zero_with_its_reason():
    rounds = [aftermath.Crash(acknowledged=3), aftermath.Crash(problems=["sequence 1 is gone"])]
    rows = crash.rows_of("kill", "Z1", rounds)
    recovered = [r["value"] for r in rows if r["metric"] == "cold/crash_recovered"]
    assert recovered == [1.0, 0.0]
    (fault,) = [r for r in rows if r["metric"] == "cold/crash_fault"]
    assert (fault["text"], fault["index"]) == ("kill: sequence 1 is gone", 1)
    assert fault["candidate"] == "Z1"


def test_prefills_of_the_same_tokens_are_measured(spec, tmp_path, monkeypatch):
    file = read_gguf(Path(__file__).parent.parent / "data" / "llama-tiny-q4_1.gguf")
    model = Model.from_gguf(file)
    monkeypatch.setattr(restore.engine, "load", lambda path: model)
    shape = shape_of(model)
    for name in "kv":
        rows = np.zeros((shape["layers"], ROWS, shape["kv_heads"], shape["head_dim"]), np.float32)
        np.save(tmp_path / f"{name}.npy", rows)
    (tmp_path / "tokens.json").write_text(
        json.dumps({"next_id": 1, "forced": [], "ids": [1] * ROWS})
    )
    rows = restore.measure(
        replace(spec, candidates=["recompute"], order=["recompute"], shape=shape),
        lambda name: None,
    )
    assert [(r["candidate"], r["metric"], r["context"]) for r in rows] == [
        ("recompute", "cold/recompute_ms", 16),
        ("recompute", "cold/recompute_ms", 64),
    ]
    assert all(r["value"] > 0 for r in rows)


def test_the_break_even_point_is_where_restoring_wins_from_there_on():
    def rows(candidate, metric, **ms):
        return [
            events.event(
                metric, stage="cold_tier", candidate=candidate, context=int(n[1:]), value=v
            )
            for n, v in ms.items()
        ]

    table = events.to_frame(
        [
            *rows("recompute", "cold/recompute_ms", n32=4.0, n128=16.0),
            *rows("Z2", "cold/restore_warm_ms", n32=1.0, n128=2.0, n0=3.0),
            *rows("Z2", "cold/restore_cold_ms", n32=9.0, n128=12.0, n0=20.0),
            *rows("Z1", "cold/restore_warm_ms", n32=1.0, n128=2.0, n0=900.0),
        ]
    )
    found = break_even.restore_against_recompute(table, 512)
    assert found["break_even_tokens"] == {
        "Z1": {"warm": None, "cold": None},
        "Z2": {"warm": 32, "cold": 128},
    }
    last = found["recompute"][-1]
    assert (last["context"], last["recompute_ms"], last["estimated"]) == (512, 64.0, True)
    assert last["restore_ms"]["Z2"] == {"warm": 3.0, "cold": 20.0}
    assert break_even.restore_against_recompute(table[:0], 512)["recompute"] == []
