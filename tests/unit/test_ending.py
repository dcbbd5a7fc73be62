"""SIGTERM to a driver reaches the stage that it waits for, and nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

#: Waits for a stage behind a shell and a pipe, as Snakemake does, with another process beside it.
DRIVER = """
import signal, subprocess, sys
from kvtrial.run.ending import hand_on_sigterm
signal.signal(signal.SIGTERM, lambda *_: print("the driver's own handler", flush=True))
hand_on_sigterm()
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
stage = subprocess.Popen(["sh", "-c", f"'{sys.executable}' kvtrial.stages.fake 2>&1 | cat"])
stage.wait()
print("the stage ended, the other", "runs" if other.poll() is None else "ended", flush=True)
other.kill()
"""
STAGE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("the stage's own end"))
print("begun", flush=True)
time.sleep(60)
"""


def test_the_stage_is_told_and_the_drivers_own_handler_is_called(tmp_path: Path) -> None:
    (tmp_path / "kvtrial.stages.fake").write_text(STAGE)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "begun\n"
    driver.send_signal(signal.SIGTERM)
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 0
    assert sorted(said.splitlines()) == [
        "the driver's own handler",
        "the stage ended, the other runs",
        "the stage's own end",
    ]
