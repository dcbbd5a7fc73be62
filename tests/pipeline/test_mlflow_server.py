"""A remote MLflow: a real server on the loopback, reached by MLFLOW_TRACKING_URI."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import mlflow_server
import pytest
from shown_trial import FEW, decided, steady, trial

from kvtrial import tracking
from kvtrial.run import events

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ARMS = {"K1": 22.0, "K3": 20.0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Address of a server with its own database and artifacts, below ``tmp_path``."""
    folder = tmp_path / "server"
    folder.mkdir()
    artifacts = ("--artifacts-destination", (folder / "artifacts").as_uri())
    with mlflow_server.running(folder / "server.db", folder / "log", *artifacts) as address:
        yield address


def test_a_trial_is_logged_to_a_remote_server(server, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    table = trial(steady(**ARMS))
    run_dir = tmp_path / "results" / "tiny-1"
    for stage, rows in table.groupby("stage"):
        events.write(rows, run_dir / "events" / f"{stage}.parquet")
    (run_dir / "protocol.json").write_text(json.dumps(FEW))
    (run_dir / "manifest.json").write_text("{}")
    (run_dir / "verdict.json").write_text(json.dumps(decided(steady(**ARMS))))

    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    tracking.log_verdict(run_dir)

    assert caplog.text == ""
    from mlflow import MlflowClient

    client = MlflowClient(server)
    experiment = client.get_experiment_by_name("kvtrial")
    runs = client.search_runs([experiment.experiment_id])
    parent = next(run for run in runs if run.data.tags["kvtrial.level"] == "trial")
    assert parent.data.tags["mlflow.note.content"].startswith("**Run K1 (FP32)**")
    assert parent.info.status == "FINISHED"
    (stage,) = [run for run in runs if run.data.tags["kvtrial.level"] == "stage"]
    arms = [run for run in runs if run.data.tags["kvtrial.level"] == "arm"]
    assert {a.data.tags["mlflow.parentRunId"] for a in arms} == {stage.info.run_id}
    assert len(arms) == len(ARMS) * 3
    assert {entry.path for entry in client.list_artifacts(parent.info.run_id)} >= {
        "manifest.json",
        "protocol.json",
        "verdict.json",
        "tables",
    }
    # The server keeps it; nothing but the lock is left beside the results.
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == [".mlflow.lock", "tiny-1"]
