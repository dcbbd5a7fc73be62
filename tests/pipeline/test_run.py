"""A run's name: stable, and another as soon as something differs that must not be mixed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kvtrial.contract import StaleBuild
from kvtrial.host import build, files, machine
from kvtrial.run import layout, protocol
from kvtrial.stages import build as stage

ROOT = Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "config" / "protocol.yaml"


@pytest.fixture
def config(monkeypatch) -> dict[str, str]:
    """The configuration as it is registered, on a machine and build that never change."""
    monkeypatch.setattr(build, "identity", lambda: "0123456789ab")
    monkeypatch.setattr(machine, "machine_class", lambda: "x86_64-test-2c")
    return {"model": layout.DEFAULT_MODEL, "protocol": str(PROTOCOL), "profile": "default"}


def edited(tmp_path: Path, text: str) -> str:
    path = tmp_path / "protocol.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_name_is_made_of_model_protocol_machine_and_build(config):
    model, protocol_hash, machine_hash, build_id = layout.plan(config).run_id.rsplit("-", 3)
    assert model == "smollm2-135m-instruct-q4_1"
    assert len(protocol_hash) == 8
    # printf x86_64-test-2c | sha256sum
    assert machine_hash == "cb3efb42"
    assert build_id == "0123456789ab"


def test_comments_and_order_of_the_protocol_do_not_count(config, tmp_path):
    values = yaml.safe_load(PROTOCOL.read_text(encoding="utf-8"))
    reordered = "# a comment\n" + yaml.safe_dump(dict(reversed(values.items())), sort_keys=False)
    other = layout.plan({**config, "protocol": edited(tmp_path, reordered)})
    assert other.run_id == layout.plan(config).run_id


def test_any_value_of_the_protocol_counts(config, tmp_path):
    text = PROTOCOL.read_text(encoding="utf-8").replace("page_tokens: 32", "page_tokens: 64")
    other = layout.plan({**config, "protocol": edited(tmp_path, text)})
    assert other.run_id.split("-")[-3] != layout.plan(config).run_id.split("-")[-3]
    assert other.run_id.split("-")[-2:] == layout.plan(config).run_id.split("-")[-2:]


def test_another_machine_build_model_or_profile_is_another_run(config, monkeypatch):
    names = [layout.plan(config).run_id]
    names.append(layout.plan({**config, "profile": "full"}).run_id)
    names.append(layout.plan({**config, "model": "tiny-llama"}).run_id)
    monkeypatch.setattr(machine, "machine_class", lambda: "aarch64-test-8c")
    names.append(layout.plan(config).run_id)
    monkeypatch.setattr(build, "identity", lambda: "ba9876543210")
    names.append(layout.plan(config).run_id)
    assert len(set(names)) == 5
    assert names[1] == names[0] + "-full"


@pytest.fixture
def stranger(tmp_path, monkeypatch) -> Path:
    """RECORD of an installed package that registers a candidate ``Theirs``."""
    folder = tmp_path / "site" / "theirs-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: theirs\nVersion: 1.0\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(
        "[kvtrial.candidates]\nTheirs = theirs:THEIRS\n", encoding="utf-8"
    )
    record = folder / "RECORD"
    record.write_text("theirs.py,sha256=one,9\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    return record


def test_a_candidate_of_another_package_is_in_the_name_once_it_competes(config, stranger, tmp_path):
    ours = layout.plan(config).run_id
    text = PROTOCOL.read_text(encoding="utf-8").replace(
        "candidates: [K0", "candidates: [Theirs, K0"
    )
    config["protocol"] = edited(tmp_path, text)
    first = layout.plan(config).run_id
    assert len(first.split("-")[-1]) == 8 and len(ours.split("-")[-1]) == 12
    assert layout.plan(config).run_id == first
    stranger.write_text("theirs.py,sha256=two,9\n", encoding="utf-8")
    assert layout.plan(config).run_id != first


def test_an_unknown_profile_lists_the_known_ones(config):
    with pytest.raises(layout.ConfigError, match="no profile 'fast'; known: default, full"):
        layout.plan({**config, "profile": "fast"})


def test_a_missing_protocol_file_is_named(config):
    with pytest.raises(layout.ConfigError, match=r"no file 'config/nowhere\.yaml'"):
        layout.plan({**config, "protocol": "config/nowhere.yaml"})


def test_an_unknown_candidate_lists_the_registered_ones(config, tmp_path):
    text = PROTOCOL.read_text(encoding="utf-8").replace("candidates: [K0,", "candidates: [K9, K0,")
    with pytest.raises(layout.ConfigError, match=r"no candidate 'K9'; registered: A1, A2, .*K1"):
        layout.plan({**config, "protocol": edited(tmp_path, text)})


def test_a_wrong_value_of_the_protocol_names_key_and_schema(config, tmp_path):
    text = PROTOCOL.read_text(encoding="utf-8").replace("page_tokens: 32", "page_tokens: 24")
    with pytest.raises(
        protocol.ProtocolError, match=r"page_tokens: 24 .*\[16, 32, 64\].*protocol\.schema\.yaml"
    ):
        layout.plan({**config, "protocol": edited(tmp_path, text)})


def test_a_python_module_of_a_measured_process_is_part_of_the_build(tmp_path):
    measured = (
        "src/kvtrial/hot/paged.py",
        "src/kvtrial/host/machine.py",
        "src/kvtrial/run/corpus.py",
        "src/kvtrial/stages/m2.py",
    )
    for name in ("CMakeLists.txt", *measured, "src/kvtrial/decision/verdict.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1", encoding="utf-8")
    tools = {"c_compiler": "gcc 12"}
    before = build.identity(tmp_path, tools)
    (tmp_path / "src/kvtrial/decision/verdict.py").write_text("2", encoding="utf-8")
    assert build.identity(tmp_path, tools) == before
    found = {before}
    for name in measured:
        (tmp_path / name).write_text("2", encoding="utf-8")
        found.add(build.identity(tmp_path, tools))
    assert len(found) == 5
    assert build.identity(tmp_path, {"c_compiler": "gcc 13"}) not in found


def test_a_run_has_one_text_of_what_is_measured(monkeypatch):
    """Case: an edit between two stages of a run was accepted, and measured under the run's name."""
    monkeypatch.setattr(build, "measured_hash", lambda: "0" * 64)
    with pytest.raises(StaleBuild, match="Python that is measured has changed"):
        build.refuse_stale.__wrapped__()


def test_another_compiler_or_cpu_compiles_everything_anew(tmp_path, monkeypatch):
    """Case: Ninja saw no newer source, linked the old objects and named them after the new CPU."""
    kept, gone = tmp_path / "build" / "docs", tmp_path / "build" / f"cp{sys.version_info[0]}"
    gone = gone.with_name(f"{gone.name}{sys.version_info[1]}-cp-linux")
    tools = {"cpu_features": ["avx2"], "rustc": "rustc 1.90"}
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "toolchain", lambda: tools)
    monkeypatch.setattr(stage.subprocess, "run", lambda *a, **k: SimpleNamespace(returncode=0))
    monkeypatch.setattr(stage, "installed_facts", lambda: {"build_id": "b"})
    for before, left in ((tools, True), ({**tools, "cpu_features": ["avx512f"]}, False)):
        for folder in (kept, gone):
            folder.mkdir(parents=True, exist_ok=True)
        assert stage._compile(before, "b") == {"build_id": "b"}
        assert (kept.is_dir(), gone.is_dir()) == (True, left)


def test_kernels_that_are_for_the_tests_are_built_anew():
    for checks in (False, True):
        facts = {"checks": checks}
        assert stage._is_of({"build_id": "b", **facts}, "b") is not checks
        assert stage._is_of({"build_id": "a", **facts}, "b") is False


def test_a_file_cut_short_never_bears_the_name(tmp_path, monkeypatch):
    path = tmp_path / "verdict.json"
    files.write_text(path, "old")

    def fails(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]
