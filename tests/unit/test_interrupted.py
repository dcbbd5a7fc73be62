"""Ctrl-C while the command still loads its modules: 130 and one line, as later."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

#: Runs the command as `python -m` does, and interrupts it as a module is about to be imported.
_INTERRUPTED = """
import importlib.abc, os, runpy, signal, sys

class Finger(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.{handler})
sys.meta_path.insert(0, Finger())
sys.argv = ["kvtrial", "--help"]
runpy.run_module("kvtrial", run_name="__main__")
"""


def interrupted(module: str, handler: str) -> subprocess.CompletedProcess[str]:
    code = _INTERRUPTED.format(module=module, handler=handler)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("module", ["kvtrial.contract", "kvtrial.tools.command"])
def test_it_says_one_line_and_ends_with_130(module: str) -> None:
    done = interrupted(module, "default_int_handler")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvtrial: interrupted\n")


def test_who_does_not_hear_it_goes_on() -> None:
    done = interrupted("kvtrial.contract", "SIG_IGN")
    assert done.returncode == 0 and "usage: kvtrial" in done.stdout


def test_the_installed_command_is_the_same() -> None:
    (point,) = entry_points(group="console_scripts", name="kvtrial")
    assert point.value == "kvtrial.__main__:command"
    assert (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # loading it changes nothing
    point.load()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
