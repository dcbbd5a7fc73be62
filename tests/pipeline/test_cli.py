"""The command line: help, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shown_trial import FEW, decided, steady, trial

from kvtrial import contract
from kvtrial.run import events, exits
from kvtrial.tools import command

SUBCOMMANDS = ["verdict", "decide", "generate", "fetch", "doctor", "try", "fleet"]
SUBCOMMANDS += ["cold", "candidates", "models"]


@pytest.fixture(autouse=True)
def environment_comes_back(monkeypatch):
    """`exits.exit_with` prepares this process's environment; other tests get theirs back."""
    for name in ("PATH", "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def kvtrial(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtrial", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_subcommand_is_listed():
    done = kvtrial("--help")
    assert done.returncode == 0
    for name in SUBCOMMANDS:
        assert f"\n    {name}" in done.stdout


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_help_of_a_subcommand_ends_with_an_example(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert f"\nexample: kvtrial {name}" in capsys.readouterr().out


def test_without_a_verdict_it_says_how_to_get_one(tmp_path):
    done = kvtrial("verdict", KVTRIAL_RESULTS=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"kvtrial: no verdict under {tmp_path}; run: make verdict\n"


def test_an_unknown_run_lists_the_known_ones(tmp_path):
    (tmp_path / "run-a").mkdir()
    (tmp_path / "run-a" / "protocol.json").write_text("{}", encoding="utf-8")
    done = kvtrial("decide", "run-b", KVTRIAL_RESULTS=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "kvtrial: no run 'run-b'; known: run-a\n"


def verdict_in(results, verdict):
    (results / "run-a").mkdir(exist_ok=True)
    (results / "run-a" / "protocol.json").write_text(json.dumps(FEW), encoding="utf-8")
    path = results / "run-a" / "verdict.json"
    path.write_text(json.dumps(verdict, ensure_ascii=False), encoding="utf-8")
    return path


@pytest.mark.parametrize(("without", "code"), [((), 0), (("aa",), 4)])
def test_the_code_of_a_verdict_says_whether_it_decides(tmp_path, without, code):
    verdict = decided(without=without, facts={"model": "é"})
    path = verdict_in(tmp_path, verdict)
    plain = kvtrial("verdict", KVTRIAL_RESULTS=str(tmp_path), COLUMNS="80")
    assert (plain.returncode, plain.stderr) == (code, "")
    assert ("What to run: K2T (FP16)" if code == 0 else "What to run: undecided") in plain.stdout
    # As it is, byte for byte.
    as_json = kvtrial("verdict", "--json", KVTRIAL_RESULTS=str(tmp_path), PYTHONUTF8="1")
    assert (as_json.returncode, as_json.stdout) == (code, path.read_text(encoding="utf-8"))


def test_the_codes_are_in_the_help(capsys):
    for name in ("verdict", "decide"):
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert "Exit code 0: what to run and which language are decided. 4: the outcome is" in said


def test_a_run_of_an_earlier_protocol_says_which_release_decides_it(tmp_path):
    registered = {**FEW, "version": 2}
    run_dir = tmp_path / "run-a"
    run_dir.mkdir()
    (run_dir / "protocol.json").write_text(json.dumps(registered), encoding="utf-8")
    (run_dir / "events").mkdir()
    table = trial(steady(K1=20.0))
    events.write(table, run_dir / "events" / "m2.parquet")
    for arguments in (["decide", "run-a"], ["verdict"]):
        done = kvtrial(*arguments, KVTRIAL_RESULTS=str(tmp_path))
        assert done.returncode == 1
        assert (
            "version 2" in done.stderr and "decided by kvtrial up to commit 17f3a9a" in done.stderr
        )
        assert done.stderr.count("\n") == 1


def test_an_unknown_subcommand_is_wrong_usage():
    assert kvtrial("verdikt").returncode == 2


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (contract.UnknownCandidate("no candidate 'K9'"), 2, "kvtrial: no candidate 'K9'\n"),
        (contract.RetiredCandidate("K0 was retired"), 1, "kvtrial: K0 was retired\n"),
        (OSError(30, "Read-only file system", "results"), 1, "Read-only file system: 'results'"),
        (KeyboardInterrupt(), 130, "kvtrial: interrupted"),
        # Of a stage that is run as a command: its own module is __main__.
        (
            type("NoRun", (ValueError,), {"__module__": "__main__"})("no run"),
            1,
            "kvtrial: no run\n",
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error, code, said, capsys):
    def fails() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        exits.exit_with(fails)
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback():
    def fails() -> int:
        raise KeyError("k")

    with pytest.raises(KeyError):
        exits.exit_with(fails)


def test_telemetry_is_off_before_anything_is_imported(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(SystemExit):
        exits.exit_with(lambda: 0)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["DO_NOT_TRACK"] == "1"
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
