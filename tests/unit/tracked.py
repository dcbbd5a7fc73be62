"""A run that MLflow is told of, with a real store in SQLite."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shown_trial import ARMS, FEW, decided, steady, trial

from kvtrial.run import events
from kvtrial.tracking import store as stores

TABLE = trial(steady(**ARMS), missing={"K0": "pool"})
#: Arms that MLflow is told of, in three contexts: a run takes it a tenth of a second.
TOLD = ("K0", "K1", "K2T")
EVENTS = TABLE[~TABLE["candidate"].isin(ARMS.keys() - set(TOLD))]
RUNS_OF_A_STAGE = len(TOLD) * 3


def tracked_run(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder with events and verdict, beside a store without runs."""
    for name in ("PATH", "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(
            name, os.environ.get(name, "")
        )  # stages set them; others want theirs back
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "tiny-11111111-22222222-333333333333"
    for stage, rows in EVENTS.groupby("stage"):
        events.write(rows, folder / "events" / f"{stage}.parquet")
    shutil.copy(empty_database, folder.parent)
    (folder / "protocol.json").write_text(json.dumps(FEW))
    (folder / "manifest.json").write_text('{"model": {"name": "tiny"}, "machine_class": "here"}')
    (folder / "verdict.json").write_text(json.dumps(decided(missing={"K0": "pool"})))
    return folder


def runs(run_dir: Path, **tags: str) -> list:  # type: ignore[type-arg]
    return stores.MlflowStore(run_dir).find(**tags)


def python(code: str, *arguments: object, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)


PEER_ROW = {
    "model": "tiny", "metric": "m2/tokens_per_s/fp32", "context": 4096, "threads": 2, "ours": 60.0,
    "peer": 20.0, "ratio": 3.0, "ci95": [2.5, 3.6], "n_blocks": 6, "our_arm": "K1",
    "peer_setting": "llama-cpp-python 0.3.36, KV F16, flash attention off", "best": True,
    "bytes_a_token": 23040.0,
}  # fmt: skip
