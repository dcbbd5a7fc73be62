"""The whole pipeline on a tiny model, killed in the middle and resumed by the same command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMOKE = ["--cores", "2", "--profile", "profiles/smoke"]


def begin(results: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the smoke run in a session of its own; results go below ``results``."""
    return subprocess.Popen(
        [sys.executable, "-m", "snakemake", *SMOKE, *arguments],
        cwd=ROOT,
        env={**os.environ, "KVTRIAL_RESULTS": str(results)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finished_blocks(process: subprocess.Popen[str], results: Path, count: int) -> list[Path]:
    """Wait until m2 has so many blocks; those that it has then."""
    finished: list[Path] = []
    while len(finished) < count and process.poll() is None:
        time.sleep(0.02)
        finished = list(results.glob("*/journal/m2/attempt-1/*block*.json"))
    assert process.poll() is None, process.communicate()[0]
    return finished


def kill_in_m2(results: Path) -> dict[Path, bytes]:
    """Start the smoke run, SIGKILL all of it once two blocks are finished; path → bytes of those."""
    process = begin(results)
    finished = finished_blocks(process, results, 2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return {path: path.read_bytes() for path in finished}


def of_session(leader: int) -> list[str]:
    """Command lines of the processes of a session that are alive."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("targets", [[], ["verdict"]])
def test_sigterm_to_the_driver_ends_the_stage_and_keeps_its_blocks(snakemake, tmp_path, targets):
    """A batch system signals the driver alone; before, it waited for the stage to end by itself."""
    results = tmp_path / "results"
    process = begin(results, *targets)
    finished = {path: path.read_bytes() for path in finished_blocks(process, results, 1)}
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode != 0, printed
    assert of_session(process.pid) == []
    assert not list(results.glob("*/events/m2.parquet")), printed
    (attempt,) = results.glob("*/journal/m2/attempt-1")
    assert not (attempt / "complete.json").exists()
    assert "Traceback" not in printed

    done = snakemake(*SMOKE)
    assert done.returncode == 0, done.stdout
    assert {path: path.read_bytes() for path in finished} == finished
    (path,) = results.glob("*/verdict.json")
    verdict = json.loads(path.read_text(encoding="utf-8"))
    assert verdict["attempts"]["m2"] == {"made": 1, "complete": 1, "decided_by": 1}


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
    assert {(arm["context"], arm["candidate"]) for arm in verdict["arms"]} >= {
        (context, name) for context in (64, 128, 256) for name in ("K0", "A1", "A2", "K1", "K2")
    }
    answer = f"What to run: {verdict['run']['store'] or 'undecided'}"
    # INCONCLUSIVE or not, the pipeline succeeds and ends with the box.
    assert answer in done.stdout

    again = snakemake(*SMOKE)
    assert "Nothing to be done" in again.stdout
    shown = snakemake(*SMOKE, "show")
    assert (results / "shown").read_text().strip() == path.parent.name
    assert shown.returncode == 0


@pytest.mark.slow
def test_a_forced_stage_opens_an_attempt_and_the_first_decides(snakemake, tmp_path):
    assert snakemake(*SMOKE).returncode == 0
    done = snakemake(*SMOKE, "--forcerun", "m1")
    assert done.returncode == 0, done.stdout
    (path,) = (tmp_path / "results").glob("*/verdict.json")
    verdict = json.loads(path.read_text(encoding="utf-8"))
    assert verdict["attempts"]["m1"] == {"made": 2, "complete": 2, "decided_by": 1}
    assert verdict["attempts"]["m2"]["made"] == 1
