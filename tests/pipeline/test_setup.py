"""The set-up: what is checked before anything is installed, and what the repository may not hold."""

from __future__ import annotations

import ast
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup() -> ModuleType:
    return script("setup")


def test_an_old_python_is_told_what_is_needed(setup, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"Python 3\.11 or newer is needed; .* is 3\.9\. Install"):
        setup.use_new_enough_python()


def test_an_old_python_hands_over_to_a_newer_one(setup, monkeypatch):
    ran = []
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(sys, "argv", ["scripts/setup.py"])
    monkeypatch.setattr(setup.shutil, "which", {"python3.12": "/usr/bin/python3.12"}.get)
    monkeypatch.setattr(setup.os, "execv", lambda *a: ran.append(a) or sys.exit(0))
    with pytest.raises(SystemExit):
        setup.use_new_enough_python()
    assert ran == [("/usr/bin/python3.12", ["/usr/bin/python3.12", "scripts/setup.py"])]


def test_missing_parts_are_named_together(setup, monkeypatch, tmp_path):
    monkeypatch.setattr(setup.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", "no-such-cc")
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit) as ended:
        setup.check_prerequisites()
    for part in ("the venv module", "Python.h", "`no-such-cc`"):
        assert part in str(ended.value)


def test_a_compiler_with_arguments_is_refused(setup, monkeypatch):
    monkeypatch.setenv("CC", "ccache gcc")
    with pytest.raises(SystemExit, match="CC is 'ccache gcc'; it names one program"):
        setup.check_prerequisites()


@pytest.mark.parametrize("fault", ["no pip", "another Python", "no Python", "none"])
def test_an_environment_that_can_not_be_used_is_made_anew(setup, monkeypatch, tmp_path, fault):
    """As an interrupted `python -m venv`, `uv venv` or an upgrade of the distribution leave it."""
    python = tmp_path / "bin" / "python"
    monkeypatch.setattr(setup, "PYTHON", python)
    assert not setup.is_usable()
    python.parent.mkdir()
    python_here = shlex.quote(sys.executable)
    lines = {
        "no pip": "exit 1",
        "another Python": f'exec {python_here} -c "import sys; sys.version = 3; $2"',
        "no Python": "exit 127",
        "none": f'exec {python_here} "$@"',
    }
    python.write_text(f"#!/bin/sh\n{lines[fault]}\n", encoding="utf-8")
    python.chmod(0o755)
    assert setup.is_usable() is (fault == "none")


def test_the_stamp_changes_with_the_requirements(setup, tmp_path):
    first, second = tmp_path / "all.txt", tmp_path / "pyproject.toml"
    first.write_text("numpy==2.0", encoding="utf-8")
    second.write_text("", encoding="utf-8")
    before = setup.fingerprint([first, second])
    assert setup.fingerprint([first, second]) == before
    first.write_text("numpy==2.1", encoding="utf-8")
    assert setup.fingerprint([first, second]) != before


def test_a_copied_checkout_makes_an_environment_of_its_own(setup, tmp_path, monkeypatch):
    """Case: a copy's environment ran the code of the checkout that it was copied from."""
    stamps = set()
    for name in ("one", "copy"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        stamps.add(setup.fingerprint([]))
    assert len(stamps) == 2


def test_an_extra_is_installed_from_its_own_pins_once(setup, monkeypatch, tmp_path):
    asked = []
    (tmp_path / "peers.txt").write_text("torch==2.0", encoding="utf-8")
    monkeypatch.setattr(setup, "REQUIREMENTS", tmp_path / "all.txt")
    monkeypatch.setattr(setup, "VENV", tmp_path)
    monkeypatch.setattr(setup, "pip", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(setup, "run", lambda *command: 0)
    setup.install_extra("peers")
    setup.install_extra("peers")
    assert len(asked) == 1
    assert asked[0][0] == "--require-hashes" and asked[0][-1] == tmp_path / "peers.txt"
    with pytest.raises(SystemExit, match=r"no extra 'nothing': there is no .*nothing\.txt"):
        setup.install_extra("nothing")


def test_the_set_up_runs_on_an_old_python_that_it_has_to_turn_away():
    source = (ROOT / "scripts" / "setup.py").read_text(encoding="utf-8")
    assert ast.parse(source, feature_version=(3, 6)).body


def test_the_conda_environment_is_that_of_pyproject():
    wanted = script("environment").environment(ROOT / "pyproject.toml")
    assert (ROOT / "environment.yml").read_text(encoding="utf-8") == wanted


def pins(name: str) -> set[str]:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return set(text.replace("\\\n", " ").splitlines())


def test_what_the_kernels_are_compiled_with_is_pinned_as_all_is():
    """An environment's dependencies would change below the kernels that are just being compiled."""
    assert pins("build.txt") < pins("all.txt")


@pytest.mark.parametrize("kernels", [0, 1], ids=["compiled", "not compiled"])
@pytest.mark.parametrize("others", [0, 1], ids=["installed", "not installed"])
def test_a_set_up_fails_where_either_half_of_it_does(setup, monkeypatch, tmp_path, kernels, others):
    """Kernels are compiled while all else is installed; neither is left running."""
    python = tmp_path / "python"
    log = tmp_path / "log"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *all.txt*) sleep 0.3; code={others};; *--editable*) code={kernels};; '
        f'*) code=0;; esac\necho "$*" >> {shlex.quote(str(log))}\nexit $code\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    monkeypatch.setattr(setup, "PYTHON", python)
    monkeypatch.setattr(setup, "check_prerequisites", lambda: None)
    if kernels or others:
        with pytest.raises(SystemExit, match="pip failed"):
            setup.make_environment()
    else:
        setup.make_environment()
    ended = log.read_text(encoding="utf-8")
    assert "build.txt" in ended and "all.txt" in ended and "--editable" in ended


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_every_requirement_is_pinned_with_a_hash(path):
    text = path.read_text(encoding="utf-8")
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
    assert len(lines) > 7
    for pin in lines:
        assert "==" in pin and "--hash=sha256:" in pin, pin


def test_no_tracked_file_names_a_registry():
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"))]
    hosts += [
        ".".join(parts) for parts in (("npmjs", "org"), ("crates", "io"), ("anaconda", "org"))
    ]
    command = ["git", "grep", "-lIF", *(word for host in hosts for word in ("-e", host))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""
    assert done.returncode == 1, done.stderr
