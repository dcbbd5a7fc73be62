"""Ctrl-C while a command or a stage still loads its modules: 130 and one line, as later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvtrial.run import exits, loading

#: Python reads it at its start; it interrupts the process as a module is about to be imported.
_FINGER = """
import importlib.abc, os, signal, sys

class Finger(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.{handler})
sys.meta_path.insert(0, Finger())
"""


def interrupted(
    folder: Path, command: str, module: str, handler: str
) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(_FINGER.format(module=module, handler=handler))
    return subprocess.run(
        [sys.executable, "-m", command, "--help"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("kvtrial", "kvtrial.contract"),
        ("kvtrial", "kvtrial.tools.command"),
        ("kvtrial.stages.m1", "numpy"),
        ("kvtrial.stages.m1", "kvtrial.measure.child"),
        ("kvtrial.stages.after.verdict", "kvtrial.decision"),
    ],
)
def test_it_says_one_line_and_ends_with_130(tmp_path: Path, command: str, module: str) -> None:
    done = interrupted(tmp_path, command, module, "default_int_handler")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvtrial: interrupted\n")


@pytest.mark.parametrize("command", ["kvtrial", "kvtrial.stages.m1"])
def test_who_does_not_hear_it_goes_on(tmp_path: Path, command: str) -> None:
    done = interrupted(tmp_path, command, "kvtrial.contract", "SIG_IGN")
    assert done.returncode == 0 and "usage: " in done.stdout


def test_once_loaded_it_is_an_interrupt_again(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)

    def main() -> int:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loading.begun()
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with pytest.raises(SystemExit) as ended:
            exits.exit_with(main)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert "what was finished is kept" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["kvtrial.__main__", "kvtrial.stages.m1"])
def test_loading_it_changes_nothing(name: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    __import__(name)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_installed_command_is_the_same() -> None:
    (point,) = entry_points(group="console_scripts", name="kvtrial")
    assert point.value == "kvtrial.__main__:command"
