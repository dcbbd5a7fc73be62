"""Case E3: two measuring jobs never overlap, and one that waits says for whom."""

import os
import signal
import subprocess
import sys
from itertools import pairwise

import pytest

from kvtrial.measure import exclusive

HOLD = """
import sys, time
from kvtrial.measure.exclusive import exclusive
with exclusive(sys.argv[1]):
    start = time.monotonic_ns()
    print("held", flush=True)
    if len(sys.argv) > 2:
        sys.stdin.read()
    time.sleep(0.05)
    print(start, time.monotonic_ns(), flush=True)
"""


@pytest.fixture(autouse=True)
def _own_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTRIAL_LOCK", str(tmp_path / "machine.lock"))


def start(what, *more):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, what, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_jobs_started_together_run_one_after_the_other():
    jobs = [start(f"job {i}") for i in range(4)]
    spans = sorted(tuple(map(int, j.communicate()[0].split()[1:])) for j in jobs)
    assert len(spans) == 4
    for (_, stop), (begin, _) in pairwise(spans):
        assert stop <= begin


def test_who_waits_is_told_for_whom():
    first = start("m2 of run-1", "wait")
    assert first.stdout.readline() == "held\n"
    second = start("m1 of run-2")
    line = second.stderr.readline()
    assert "m1 of run-2 waits" in line and f"m2 of run-1 (process {first.pid})" in line
    first.communicate("")
    assert second.communicate()[0].startswith("held")


def test_a_killed_holder_leaves_nothing_to_clear():
    job = start("m2", "wait")
    assert job.stdout.readline() == "held\n"
    os.kill(job.pid, signal.SIGKILL)
    job.communicate()
    said = []
    with exclusive.exclusive("m1", said.append):
        pass
    assert said == []


def test_a_child_that_outlives_its_killed_parent_keeps_the_machine():
    code = """
import subprocess, sys, time
from kvtrial.measure import exclusive
with exclusive.exclusive("m2"):
    subprocess.Popen(
        [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"],
        pass_fds=exclusive.held(),
    )
    time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "up\n"
    parent.kill()
    parent.wait()
    second = start("m1")
    assert "m1 waits" in second.stderr.readline()
    parent.stdin.close()  # the orphan reads the end and ends
    assert second.communicate()[0].startswith("held")
    parent.stdout.close()


def test_the_file_is_open_to_every_user_whatever_the_umask():
    old = os.umask(0o077)
    try:
        with exclusive.exclusive("m1"):
            assert exclusive.lock_path().stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(old)
