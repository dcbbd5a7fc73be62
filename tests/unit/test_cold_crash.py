"""The crash matrix: writers killed, disks that fail, files damaged; what was acknowledged is there."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from kvtrial.measure import child
from kvtrial.measure.cold import crash, faults
from kvtrial.measure.specs import CrashSpec

FAILING = [name for name, (_, needs_faults) in crash.FAULTS.items() if needs_faults]


def python(code: str, folder: Path, preload: bool = True) -> list:
    """Run code in a process whose disk can fail; what it puts into ``out``, through JSON."""
    head = "import errno, json, os, sys\nfrom pathlib import Path\nfolder = Path(sys.argv[1])\nout = []\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{head}{textwrap.dedent(code)}\nprint(json.dumps(out))", folder],
        env={**os.environ, **((faults.preload_environment() or {}) if preload else {})},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["Z1", "Z2"])
def test_every_fault_of_the_matrix_leaves_every_promise_kept(kind, tmp_path):
    assert faults.library() is not None, "the failing disk was not built"
    spec = CrashSpec(
        candidates=[kind],
        folder=str(tmp_path),
        rounds=10,
        batches=6,
        seed=20261129,
    )
    rows = child.run("kvtrial.measure.cold.crash", spec, 1, faults.preload_environment())
    assert [row["text"] for row in rows if row["metric"] == "cold/crash_fault"] == []
    rounds = Counter(row["text"] for row in rows if row["metric"] == "cold/crash_recovered")
    assert rounds == {name: 10 if name == "kill" else 2 for name in crash.FAULTS}
    acknowledged = [row for row in rows if row["metric"] == "cold/crash_acknowledged"]
    for name in ("kill", "full disk", "failed sync", "short writes", "truncated", "lost index"):
        assert sum(row["value"] for row in acknowledged if row["text"] == name) > 0
    # Both stores pay one sync a batch, by whoever makes it.
    syncs = [row["value"] for row in rows if row["metric"] == "cold/fsyncs_per_batch"]
    assert syncs == [1] * 6


POWER_CUTS = ("power cut", "torn write", "killed, then power cut", "power cut in the repair")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Z1", "Z2"])
def test_two_hundred_power_cuts_lose_nothing_and_keep_no_store_from_opening(kind, tmp_path):
    """``make test-power-cuts``: a filesystem that forgets what was not synced, and small segments."""
    code = f"""
    from kvtrial.cold import segments
    from kvtrial.measure.cold import crash
    segments.SEGMENT_BYTES = crash.SMALL_SEGMENT_BYTES
    for name in {POWER_CUTS}:
        found = crash.rounds_of(name, "{kind}", folder, 50, int(os.environ.get("SEED", "1")))
        problems = [problem for round in found for problem in round.problems]
        refused = [problem for problem in problems if problem.partition(":")[0].isidentifier()]
        lost = [problem for problem in problems if problem not in refused]
        out.append([name, len(found), sum(r.acknowledged for r in found), lost, refused])
    """
    rounds = python(code, tmp_path / "cuts")
    for name, cuts, acknowledged, lost, refused in rounds:
        print(f"{kind} {name}: {cuts} cuts, {acknowledged} sequences acknowledged, {len(lost)} lost, "
              f"{len(refused)} refused")  # fmt: skip
    assert sum(cuts for _, cuts, *_ in rounds) == 200
    assert min(acknowledged for _, _, acknowledged, *_ in rounds) > 0
    assert [problem for *_, lost, refused in rounds for problem in lost + refused] == []


def test_without_a_failing_disk_those_rounds_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(crash, "rounds_of", lambda name, *_: [])
    monkeypatch.setattr(faults, "available", lambda: False)
    spec = CrashSpec(candidates=["Z2"], folder=str(tmp_path), rounds=1, seed=0, batches=1)
    rows = crash.measure(spec, lambda name: None)
    assert [row["text"].partition(":")[0] for row in rows] == FAILING


def test_the_check_sees_a_lost_sequence_and_a_changed_byte(tmp_path):
    code = """
    from kvtrial.measure.cold import aftermath
    from kvtrial.cold import open_cold
    from kvtrial.measure.cold.pattern import PatternStore, pattern_session, pattern_tokens
    def write(say):
        store = PatternStore()
        with open_cold("Z2", folder, store.identity()) as cold:
            cold.spill(pattern_session(store, 0), pattern_tokens(0))
            cold.spill(pattern_session(store, 3), pattern_tokens(8))
    assert aftermath.forked(write) == []
    said = [["stored", "0", "37"], ["stored", "1", "37"], ["stored", "8", "37"]]
    result = aftermath.check("Z2", folder, said)
    out += [result.acknowledged, result.recovered, result.problems]
    """
    acknowledged, recovered, problems = python(code, tmp_path / "cold", preload=False)
    assert (acknowledged, recovered) == (3, 1)
    assert problems == [
        "sequence 1: 37 rows acknowledged, 16 there",
        "sequence 8: other bytes than were spilled",
    ]


def test_the_matrix_notices_a_missing_sync_of_the_segment(tmp_path):
    """A process that is killed loses nothing; only the modelled power cut shows it."""
    code = """
    from kvtrial.measure.cold import crash
    from kvtrial.cold import disk
    real = disk.fsync
    def fsync(fd):
        if not os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
            real(fd)
    disk.fsync = fsync
    for n in range(6):
        found = crash.rounds_of("power cut", "Z2", folder, 1, n)
        out += found[0].problems
    killed = crash.rounds_of("kill", "Z2", folder, 2, 0)
    out.append(sum((found.problems for found in killed), []))
    """
    *power_cuts, killed = python(code, tmp_path / "m")
    # Lost without a word, or with one where a later segment's name shows that there was more.
    signs = ("rows acknowledged", "the file header is damaged")
    assert any(sign in problem for problem in power_cuts for sign in signs)
    assert killed == []


def test_a_power_cut_keeps_what_was_synced_and_no_more(tmp_path):
    code = """
    from kvtrial.cold import disk
    from kvtrial.measure.cold import faults
    live, memory, left = folder / "live", folder / "memory", folder / "left"
    for path in (live, memory):
        path.mkdir(parents=True)
    faults.watch(live, memory)
    def write(name, data):
        fd = os.open(live / name, os.O_RDWR | os.O_CREAT)
        os.write(fd, data)
        return fd
    synced = write("synced", b"kept")
    os.fdatasync(synced)
    os.write(synced, b" lost")
    write("unsynced", b"lost")
    disk.fsync_dir(live)
    nameless = write("nameless", b"synced, but its folder was not")
    os.fdatasync(nameless)
    (live / "inside").mkdir()
    faults.power_cut(live, memory, left)
    out += sorted((p.name, p.read_text()) for p in left.iterdir())
    out += [faults.calls(faults.WRITE), faults.calls(faults.SYNC)]
    """
    assert python(code, tmp_path) == [["synced", "kept"], ["unsynced", ""], 4, 3]


def test_a_write_can_fail_half_way_and_a_sync_at_all(tmp_path):
    code = """
    from kvtrial.measure.cold import faults
    faults.watch(folder)
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    def attempt(call, *args):
        try:
            out.append(call(*args))
        except OSError as error:
            out.append(errno.errorcode[error.errno])
    faults.fail(faults.WRITE, errno.ENOSPC, after=1, keep=7)
    for _ in range(3):
        attempt(os.pwritev, fd, [bytes(100)], 0)
    faults.fail(faults.SYNC, errno.EIO)
    attempt(os.write, fd, b"x")
    attempt(os.fsync, fd)
    attempt(os.fdatasync, fd)
    faults.fail(faults.WRITE, faults.SHORT, keep=3)
    attempt(os.pwrite, fd, bytes(100), 0)
    attempt(os.writev, fd, [b"ab", b"cd"])
    faults.fail(faults.WRITE, faults.SHORT, keep=0)
    attempt(os.write, fd, b"a short write takes a byte at least")
    faults.fail(faults.ANY, 0)
    attempt(os.fsync, fd)
    elsewhere = os.open(os.devnull, os.O_WRONLY)
    faults.fail(faults.ANY, errno.EIO)
    attempt(os.write, elsewhere, b"not watched")
    """
    expected = [100, 7, "ENOSPC", 1, "EIO", "EIO", 3, 2, 1, None, 11]
    assert python(code, tmp_path) == expected
    assert errno.ENOSPC > 0 > faults.DIE > faults.SHORT
