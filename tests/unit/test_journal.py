"""Attempts and finished units: what a kill, a force and a broken file do to them."""

import json
import os
import signal
import subprocess
import sys

import pytest

from kvtrial.run.journal import Journal, JournalError


def test_an_unpublished_attempt_is_resumed_and_a_published_one_opens_the_next(tmp_path):
    journal = Journal(tmp_path, "m2")
    first = journal.attempt()
    first.put("4096x1x1-b00", [{"metric": "m2/step_ms", "value": 1.5}])

    resumed = Journal(tmp_path, "m2").attempt()
    assert resumed.number == 1
    assert resumed.has("4096x1x1-b00") and not resumed.has("4096x1x1-b01")
    resumed.put("4096x1x1-b01", [{"metric": "m2/step_ms", "value": 2.5}])
    resumed.publish()

    forced = Journal(tmp_path, "m2").attempt()
    assert forced.number == 2 and not forced.has("4096x1x1-b00")
    forced.put("4096x1x1-b00", [{"metric": "m2/step_ms", "value": 9.0}])
    assert [(r["attempt"], r["value"]) for r in journal.all_rows()] == [
        (1, 1.5),
        (1, 2.5),
        (2, 9.0),
    ]


def test_attempt_ten_comes_after_nine(tmp_path):
    for _ in range(10):
        attempt = Journal(tmp_path, "m1").attempt()
        attempt.put("u", [])
        attempt.publish()
    assert [a.number for a in Journal(tmp_path, "m1").attempts()] == list(range(1, 11))
    assert Journal(tmp_path, "m1").attempt().number == 11


def test_stages_do_not_share_units(tmp_path):
    Journal(tmp_path, "m1").attempt().put("u", [{"a": 1}])
    assert Journal(tmp_path, "m2").all_rows() == []


def test_a_file_left_beside_by_a_kill_is_no_unit(tmp_path):
    attempt = Journal(tmp_path, "m2").attempt()
    attempt.put("whole", [{"value": 1.0}])
    folder = tmp_path / "journal" / "m2" / "attempt-1"
    (folder / ".half.json.123").write_text('[{"value": ')
    assert not attempt.has("half")
    assert attempt.rows() == [{"value": 1.0, "attempt": 1}]


@pytest.mark.parametrize("text", ['[{"value": ', "", '{"value": 1}', "[1, 2]", "\x00\x00"])
def test_a_broken_file_is_an_error_that_names_it(tmp_path, text):
    attempt = Journal(tmp_path, "m2").attempt()
    attempt.put("good", [])
    (tmp_path / "journal" / "m2" / "attempt-1" / "bad.json").write_text(text)
    with pytest.raises(JournalError, match=r"bad\.json"):
        attempt.rows()


@pytest.mark.parametrize("unit", ["", "../u", "a/b", ".hidden", "published", "a b"])
def test_unit_names_are_file_names(tmp_path, unit):
    with pytest.raises(JournalError, match="unit"):
        Journal(tmp_path, "m2").attempt().put(unit, [])


def test_a_unit_is_written_once(tmp_path):
    attempt = Journal(tmp_path, "m2").attempt()
    attempt.put("u", [{"value": 1.0}])
    with pytest.raises(JournalError, match="once"):
        attempt.put("u", [{"value": 2.0}])
    assert attempt.unit("u") == [{"value": 1.0, "attempt": 1}]


def test_rows_that_json_cannot_hold_leave_no_unit(tmp_path):
    attempt = Journal(tmp_path, "m2").attempt()
    with pytest.raises(TypeError):
        attempt.put("u", [{"value": object()}])
    assert not attempt.has("u")


def test_a_writer_killed_at_any_time_leaves_whole_units(tmp_path):
    """SIGKILL in the midst of writing: every unit that is there reads whole, in order, from 0."""
    code = (
        "import sys; from pathlib import Path; from kvtrial.run.journal import Journal\n"
        "attempt = Journal(Path(sys.argv[1]), 'm2').attempt()\n"
        "n = 0\n"
        "while True:\n"
        "    attempt.put(f'u{n:05d}', [{'value': float(n)}] * 500)\n"
        "    print(n, flush=True); n += 1\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for _ in range(20):
        acknowledged = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    rest = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    acknowledged = int(rest[-1]) if rest else acknowledged

    attempt = Journal(tmp_path, "m2").attempt()
    values = [row["value"] for row in attempt.rows()]
    assert values[::500] == [float(n) for n in range(len(values) // 500)]
    assert len(values) % 500 == 0 and len(values) // 500 >= acknowledged + 1
    attempt.put("after", [{"value": -1.0}])
    assert json.loads((tmp_path / "journal/m2/attempt-1/after.json").read_text()) == [
        {"value": -1.0}
    ]


def test_a_unit_whose_brackets_have_no_end_is_named(tmp_path):
    attempt = Journal(tmp_path, "m2").attempt()
    attempt.put("u", [])
    unit = next(path for path in (tmp_path / "journal").rglob("*.json"))
    unit.write_text("[" * 100_000)
    with pytest.raises(JournalError, match="can't be read"):
        attempt.rows()
