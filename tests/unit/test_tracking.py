"""Tracking against a real MLflow store in SQLite."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from trial_events import REGISTERED, flat, trial

from kvtrial import events, tracking
from kvtrial.decide import decide

# MLflow's own imports warn about what other packages deprecate; that is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

ARMS = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 22.0, "K2": 15.0, "K3": 11.0}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "tiny-11111111-22222222-333333333333"
    table = trial(flat(**ARMS), missing={"K0": "pool"})
    for stage, rows in table.groupby("stage"):
        events.write(rows, folder / "events" / f"{stage}.parquet")
    (folder / "protocol.json").write_text(json.dumps(REGISTERED))
    (folder / "manifest.json").write_text("{}")
    (folder / "verdict.json").write_text(decide(table, REGISTERED).to_json())
    return folder


def _runs(run_dir: Path, **tags: str) -> list:  # type: ignore[type-arg]
    return tracking._Store(run_dir).find(**tags)


def test_a_stage_is_a_child_of_the_trial_and_an_arm_a_child_of_the_stage(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    (parent,) = _runs(run_dir, level="trial")
    (stage,) = _runs(run_dir, level="stage", stage="m2")
    arms = _runs(run_dir, level="arm", stage="m2")
    assert stage.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert stage.info.status == "FINISHED"
    assert {a.data.tags["mlflow.parentRunId"] for a in arms} == {stage.info.run_id}
    assert len(arms) == len(ARMS) * 3
    k1 = next(
        a
        for a in arms
        if (a.data.tags["kvtrial.candidate"], a.data.tags["kvtrial.context"]) == ("K1", "4096")
    )
    assert k1.data.metrics["m2/step_ms"] == 22.0
    assert k1.data.metrics["m2/tokens_per_s"] == pytest.approx(1000 / 22.0, rel=1e-9)
    assert parent.data.params["decision.adopt_lower_bound"] == "0.1"
    history = tracking._Store(run_dir).client.get_metric_history(k1.info.run_id, "m2/step_ms")
    assert len(history) == 12


def test_the_verdict_is_the_first_line_of_the_description(run_dir: Path) -> None:
    tracking.log_verdict(run_dir)
    (parent,) = _runs(run_dir, level="trial")
    note = parent.data.tags["mlflow.note.content"]
    assert note.splitlines()[0].startswith("**ADOPT: K3**")
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["eligibility.K0"] == "lacks: pool"


def test_the_store_lies_in_results_whatever_the_working_directory(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m2")
    assert (run_dir.parent / "mlflow.db").is_file()
    assert sorted(p.name for p in run_dir.parent.parent.iterdir()) == ["results"]


def test_failed_and_killed_stages_show_their_state(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m1")
    tracking.fail_stage(run_dir, "m1", "disk full")
    (failed,) = _runs(run_dir, level="stage", stage="m1")
    assert failed.info.status == "FAILED"
    assert failed.data.tags["kvtrial.why"] == "disk full"

    child = "from kvtrial import tracking; import sys, pathlib, os, signal\n"
    child += "tracking.begin_stage(pathlib.Path(sys.argv[1]), 'm2'); os.kill(os.getpid(), 9)"
    killed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", child, str(run_dir)], check=False
    )
    assert killed.returncode == -9
    (left,) = _runs(run_dir, level="stage", stage="m2")
    assert left.info.status == "RUNNING"
    tracking.begin_stage(run_dir, "m2")
    states = sorted(r.info.status for r in _runs(run_dir, level="stage", stage="m2"))
    assert states == ["KILLED", "RUNNING"]


PEER_ROW = {
    "model": "tiny", "metric": "m2/tokens_per_s/fp32", "context": 4096, "threads": 2, "ours": 60.0,
    "peer": 20.0, "ratio": 3.0, "ci95": [2.5, 3.6], "n_blocks": 6, "our_arm": "K1",
    "peer_setting": "llama-cpp-python 0.3.36, KV F16, flash attention off",
}  # fmt: skip


def test_the_peers_are_a_child_of_the_trial_with_their_ratios(run_dir: Path) -> None:
    (run_dir / "peers.json").write_text(json.dumps([PEER_ROW]))
    tracking.begin_stage(run_dir, "peers")
    tracking.finish_stage(run_dir, "peers")
    tracking.rebuild(run_dir.parent)
    (parent,) = _runs(run_dir, level="trial")
    (run,) = _runs(run_dir, level="stage", stage="peers")
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    name = "m2/tokens_per_s/fp32.llama-cpp-python.4096_2t"
    assert run.data.metrics == {
        f"{name}.ours": 60.0,
        f"{name}.peer": 20.0,
        f"{name}.ratio": 3.0,
        f"{name}.ratio.low": 2.5,
        f"{name}.ratio.high": 3.6,
    }
    assert run.data.tags[f"setting.{name}"].startswith("K1 against llama-cpp-python 0.3.36, KV F16")
    artifacts = tracking._Store(run_dir).client.list_artifacts(run.info.run_id)
    assert "peers.json" in {a.path for a in artifacts}


def test_a_store_that_is_away_costs_a_warning_only(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, logger="kvtrial.tracking"):
        tracking.finish_stage(run_dir, "m2")
    assert "The verdict does not need it" in caplog.text


def test_what_is_not_finite_becomes_a_tag_never_a_metric(run_dir: Path) -> None:
    store = tracking._Store(run_dir)
    run = store.child("x", level="stage", stage="x")
    store.metrics(run, [("a", float("nan"), 0), ("b", float("inf"), 0), ("c", 1e300, 0)])
    read = store.client.get_run(run)
    assert read.data.metrics == {"c": 1e300}
    assert read.data.tags["not_finite.a"] == "nan"


def test_the_store_can_be_made_again_from_results_alone(run_dir: Path) -> None:
    tracking.rebuild(run_dir.parent)
    tracking.rebuild(run_dir.parent)
    assert len(_runs(run_dir, level="stage", stage="m2")) == 1
    assert len(_runs(run_dir, level="arm", stage="m2")) == len(ARMS) * 3
    assert (run_dir.parent / "mlflow.db").stat().st_size > 0
