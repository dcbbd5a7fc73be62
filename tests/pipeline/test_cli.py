"""The command line: help, exit codes, one-line errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrial import contract
from kvtrial.tools import command

SUBCOMMANDS = ["verdict", "decide", "generate", "fetch", "doctor", "try", "fleet"]
SUBCOMMANDS += ["cold", "candidates", "models"]


@pytest.fixture(autouse=True)
def environment_comes_back(monkeypatch):
    """`command.exit_with` prepares this process's environment; other tests get theirs back."""
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


def test_the_verdict_as_json_is_the_file_byte_for_byte(tmp_path):
    (tmp_path / "run-a").mkdir()
    text = '{"hot": "é"}\n'
    (tmp_path / "run-a" / "verdict.json").write_text(text, encoding="utf-8")
    done = kvtrial("verdict", "--json", KVTRIAL_RESULTS=str(tmp_path), PYTHONUTF8="1")
    assert (done.returncode, done.stdout) == (0, text)


def test_an_unknown_subcommand_is_wrong_usage():
    assert kvtrial("verdikt").returncode == 2


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (contract.UnknownCandidate("no candidate 'K9'"), 2, "kvtrial: no candidate 'K9'\n"),
        (contract.RetiredCandidate("K0 was retired"), 1, "kvtrial: K0 was retired\n"),
        (OSError(30, "Read-only file system", "results"), 1, "Read-only file system: 'results'"),
        (KeyboardInterrupt(), 130, "kvtrial: interrupted"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(error, code, said, capsys):
    def fails() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        command.exit_with(fails)
    assert ended.value.code == code
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def test_a_fault_of_ours_keeps_its_traceback():
    def fails() -> int:
        raise KeyError("k")

    with pytest.raises(KeyError):
        command.exit_with(fails)


def test_telemetry_is_off_before_anything_is_imported(monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    monkeypatch.setenv("PATH", "/usr/bin")
    with pytest.raises(SystemExit):
        command.exit_with(lambda: 0)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["DO_NOT_TRACK"] == "1"
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
