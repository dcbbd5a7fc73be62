"""The measured block on a real store, and the rows that the stage makes of killed writers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvtrial import events
from kvtrial.cold import crash, measure, pagecache
from kvtrial.hot import native
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
    (tmp_path / "tokens.json").write_text(json.dumps({"next_id": 1}))
    return {
        "candidates": ["plain", "Z2", "Z1"],
        "folder": str(tmp_path / "scratch"),
        "snapshot": str(tmp_path),
        "store": "K3",
        "shape": SHAPE,
        "model_sha256": "0" * 64,
        "page_tokens": 16,
        "prefix_tokens": ROWS,
        "batches": 4,
        "repetitions": 2,
    }


def test_every_arm_does_the_same_work_with_the_same_syncs(spec):
    noted = []
    rows = measure.measure(spec, noted.append)
    assert noted == ["plain", "Z2", "Z1"]
    assert [r for r in rows if r["metric"] == "failed"] == []
    values = {(r["candidate"], r["metric"], r["index"]): r["value"] for r in rows}
    payload_mb = 7 * 2 * 16 * 2 * 2 * 32 * 4 / 1e6  # pages, layers, P, K and V, heads, dim, bytes
    for name in ("plain", "Z1", "Z2"):
        assert values[name, "cold/payload_mb", 0] == pytest.approx(payload_mb)
        assert values[name, "cold/fsyncs", 0] == 4
        assert values[name, "cold/fsyncs_per_batch", 0] == 1
    for name, read in (("plain", "plain_read"), ("Z1", "restore"), ("Z2", "restore")):
        assert values[name, f"cold/{read}_warm_ms", 1] > 0
        assert values[name, "cold/resident_fraction", 0] <= 1
    frame = events.to_frame(events.event(**row) for row in rows)
    assert len(frame) == len(rows)


def test_a_cold_time_is_given_only_where_the_cache_was_seen_to_be_dropped(spec, monkeypatch):
    monkeypatch.setattr(pagecache, "resident_fraction", lambda files: 0.5)
    metrics = {r["metric"] for r in measure.measure(spec, lambda name: None)}
    assert "cold/restore_warm_ms" in metrics and "cold/restore_cold_ms" not in metrics


def test_a_failing_arm_costs_its_own_rows(spec, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("no disk")

    monkeypatch.setattr(measure, "open_cold", broken)
    rows = measure.measure(spec, lambda name: None)
    assert {r["candidate"] for r in rows if r["metric"] == "failed"} == {"Z1", "Z2"}
    assert any(r["candidate"] == "plain" and r["metric"] == "cold/payload_mb" for r in rows)


def test_the_resident_fraction_counts_pages_that_were_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * 4096))
    assert pagecache.resident_fraction([path]) == 1.0
    empty = tmp_path / "empty"
    empty.touch()
    assert pagecache.resident_fraction([empty]) == 0.0


def test_a_writer_that_lost_something_is_a_zero_with_its_reason():
    rows = cold_tier.crash_rows(
        [crash.Crash(acknowledged=3), crash.Crash(faults=["sequence 1 is gone"])], "Z1"
    )
    recovered = [r["value"] for r in rows if r["metric"] == "cold/crash_recovered"]
    assert recovered == [1.0, 0.0]
    (fault,) = [r for r in rows if r["metric"] == "cold/crash_fault"]
    assert (fault["text"], fault["index"], fault["candidate"]) == ("sequence 1 is gone", 1, "Z1")
