"""Away from the checkout: which selection is obeyed, and what a wheel brings along."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

import kvtrial
from kvtrial.host import machine, paths, selection

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 8, "budget_bytes": 1 << 20}


def write(path: Path, default: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {
        "default": default,
        "profile": "fp32",
        "fp32": "K1",
        "reference": "K1",
        "cold": None,
        "retired": ["K0"],
        "run_id": f"run of {default}",
    }
    path.write_text(yaml.safe_dump({machine.machine_class(): {"2q1kv8d": entry}}), encoding="utf-8")
    return path


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and a package that lies in no checkout."""
    for name in ("KVTRIAL_CONFIG", "KVTRIAL_SELECTION", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(paths, "checkout", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_the_variable_comes_first_then_the_configuration_folder_then_the_users(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert selection.load(SHAPE) == selection.Selection()  # no verdict yet: K1
    write(away / "home" / ".config" / "kvtrial" / "selection.yaml", "A2")
    assert selection.load(SHAPE).default == "A2"
    write(away / "xdg" / "kvtrial" / "selection.yaml", "K2")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(away / "xdg"))
    assert selection.load(SHAPE).default == "K2"
    write(away / "chosen" / "selection.yaml", "K3")
    monkeypatch.setenv("KVTRIAL_CONFIG", str(away / "chosen"))
    assert selection.load(SHAPE).default == "K3"
    monkeypatch.setenv("KVTRIAL_SELECTION", str(write(away / "one file.yaml", "K5")))
    loaded = selection.load(SHAPE)
    assert (loaded.default, loaded.reference, loaded.retired) == ("K5", "K1", ("K0",))
    assert (loaded.fp32, loaded.run_id) == ("K1", "run of K5")
    assert "q8" in kvtrial.open_store(**SHAPE).page_format


def test_on_macos_the_users_folder_is_the_platforms(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine, "machine_class", lambda: "arm64-apple")
    folder = away / "home" / "Library" / "Application Support" / "kvtrial"
    write(folder / "selection.yaml", "K2")
    assert selection.load(SHAPE).default == "K2"


def test_another_machines_selection_is_not_this_ones(away: Path) -> None:
    path = away / "home" / ".config" / "kvtrial" / "selection.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("some-other-machine: {default: K3}\n", encoding="utf-8")
    assert selection.load(SHAPE) == selection.Selection()


def test_a_named_selection_that_is_not_there_is_an_error_never_the_default(
    away: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTRIAL_SELECTION", str(away / "nowhere.yaml"))
    with pytest.raises(selection.SelectionInvalid, match=r"nowhere\.yaml', where no file lies"):
        selection.load(SHAPE)


@pytest.mark.parametrize("text", ["[1, 2]", "{CLASS: {default: K3}}", "{CLASS: 7}", "a: b: c"])
def test_a_damaged_selection_names_the_file(
    away: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = away / "selection.yaml"
    path.write_text(text.replace("CLASS", machine.machine_class()), encoding="utf-8")
    monkeypatch.setenv("KVTRIAL_SELECTION", str(path))
    with pytest.raises(selection.SelectionInvalid, match=r"selection\.yaml: not what `make adopt`"):
        selection.load(SHAPE)


def test_a_file_of_the_users_comes_before_the_packages(away: Path) -> None:
    assert paths.config_file("models.yaml") == paths.PACKAGE / "config" / "models.yaml"
    own = away / "home" / ".config" / "kvtrial" / "models.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("models: {}\n", encoding="utf-8")
    assert paths.config_file("models.yaml") == own


@pytest.mark.slow
def test_a_wheel_works_away_from_the_checkout(tmp_path: Path) -> None:
    """Builds one (minutes), unpacks it, and uses it without the editable install in the way."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--config-settings", f"build-dir={tmp_path / 'build'}", "-w", tmp_path, ROOT],
        check=True,
    )
    (wheel,) = tmp_path.glob("kvtrial-*.whl")
    site = tmp_path / "a site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        assert not [name for name in archive.namelist() if name.endswith("selection.yaml")]
    code = """
import sys
sys.path[:0] = [sys.argv[1], *sys.argv[2].split(":")]
import kvtrial
from kvtrial.host import build, paths, selection
from kvtrial.run import models, protocol, corpus
assert kvtrial.__file__.startswith(sys.argv[1]), kvtrial.__file__
assert paths.checkout() is None
assert "smollm2-135m-instruct-q4_1" in models.entries()
protocol.load(paths.config_file("protocol.yaml"))
corpus.load_text()
shape = {"q_heads": 2, "kv_heads": 1, "head_dim": 8}
assert selection.load(shape).default == "K2"
build.refuse_stale()
assert len(build.binary_sha256()) == 64
store = kvtrial.open_store(layers=1, **shape, budget_bytes=1 << 20)
print(store.page_format)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTRIAL_")}
    environment["KVTRIAL_SELECTION"] = str(write(tmp_path / "selection.yaml", "K2"))
    environment["HOME"] = str(tmp_path)
    packages = str(Path(np.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(site), packages],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "fp16" in done.stdout
