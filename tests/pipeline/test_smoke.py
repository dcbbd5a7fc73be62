"""The whole pipeline on a tiny model, killed in the middle and resumed by the same command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ["--cores", "2", "--profile", "profiles/smoke"]


def kill_in_m2(results: Path) -> dict[Path, bytes]:
    """Start the smoke run, SIGKILL all of it once two blocks are finished; path → bytes of those."""
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake", *SMOKE],
        cwd=ROOT,
        env={**os.environ, "KVTRIAL_RESULTS": str(results)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    finished: list[Path] = []
    while len(finished) < 2 and process.poll() is None:
        time.sleep(0.02)
        finished = list(results.glob("*/journal/m2/attempt-1/*block*.json"))
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return {path: path.read_bytes() for path in finished}


@pytest.mark.slow
def test_a_killed_run_goes_on_by_the_same_command(snakemake, tmp_path):
    results = tmp_path / "results"
    finished = kill_in_m2(results)
    assert not list(results.glob("*/events/m2.parquet"))

    done = snakemake(*SMOKE)
    assert done.returncode == 0, done.stdout
    for path, content in finished.items():
        assert path.read_bytes() == content
    (attempts,) = results.glob("*/journal/m2")
    assert [p.name for p in attempts.iterdir()] == ["attempt-1"]

    (path,) = results.glob("*/verdict.json")
    verdict = json.loads(path.read_text(encoding="utf-8"))
    assert verdict["attempts"]["m2"] == {"made": 1, "complete": 1, "decided_by": 1}
    assert {(arm["context"], arm["candidate"]) for arm in verdict["hot"]["arms"]} >= {
        (context, name) for context in (64, 128, 256) for name in ("K0", "A1", "A2", "K1", "K2")
    }
    assert f"hot store: {verdict['hot']['adopted'] or 'undecided'}" in done.stdout

    again = snakemake(*SMOKE)
    assert "Nothing to be done" in again.stdout
    shown = snakemake(*SMOKE, "show")
    assert (results / "shown").read_text().strip() == path.parent.name
    assert f"hot store: {verdict['hot']['adopted'] or 'undecided'}" in shown.stdout


@pytest.mark.slow
def test_a_forced_stage_opens_an_attempt_and_the_first_decides(snakemake, tmp_path):
    assert snakemake(*SMOKE).returncode == 0
    done = snakemake(*SMOKE, "--forcerun", "m1")
    assert done.returncode == 0, done.stdout
    (path,) = (tmp_path / "results").glob("*/verdict.json")
    verdict = json.loads(path.read_text(encoding="utf-8"))
    assert verdict["attempts"]["m1"] == {"made": 2, "complete": 2, "decided_by": 1}
    assert verdict["attempts"]["m2"]["made"] == 1
