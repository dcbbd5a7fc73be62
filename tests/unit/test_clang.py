"""K1C: K1's kernel by another compiler, and what is said where there is none."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cmake import CMAKE_BIN_DIR
from ninja import BIN_DIR

from kvtrial import candidates
from kvtrial.contract import CandidateNotBuilt, StoreSpec
from kvtrial.host import build
from kvtrial.hot import paged
from kvtrial.hot.formats.fp32 import FP32

MODULE = "kvtrial.hot._kernels_clang"


def test_it_is_k1_but_for_the_compiler() -> None:
    k1, k1c = paged.K1, paged.K1C
    assert candidates.get("K1C") == k1c
    assert k1c.role == "control"
    same = {"name": "K1", "title": k1.title, "role": k1.role, "open": k1.open, "not_built": None}
    assert replace(k1c, **same) == k1


def test_the_facts_say_who_compiled_it() -> None:
    facts = build.facts()
    assert paged.K1C.not_built == (facts["clang_missing"] or None)
    if paged.K1C.not_built is None:
        import kvtrial.hot._kernels_clang as module

        assert "clang version" in facts["clang"]
        # What a compiler writes into its objects.
        assert b"clang version" in Path(module.__file__).read_bytes()


def test_without_its_module_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    monkeypatch.setattr(build, "facts", lambda: {"clang_missing": "clang was not found"})
    assert build.why_missing(MODULE, "clang") == "clang was not found"
    monkeypatch.setattr(build, "facts", dict)
    assert MODULE in (build.why_missing(MODULE, "clang") or "")
    missing = replace(paged.K1C, not_built="clang was not found")
    monkeypatch.setattr(candidates, "candidates", lambda: {"K1C": missing})
    with pytest.raises(CandidateNotBuilt, match="K1C is not built: clang was not found"):
        candidates.open_store("K1C", layers=1, q_heads=1, kv_heads=1, head_dim=8, budget_bytes=1)


# --- the build --------------------------------------------------------------------------------------


def path_without(program: str, folder: Path) -> str:
    """PATH, but for ``program``; a folder that has it is replaced by one of links to the rest."""
    kept = []
    for i, place in enumerate(os.environ["PATH"].split(os.pathsep)):
        if not (Path(place) / program).exists():
            kept.append(place)
            continue
        links = folder / str(i)
        links.mkdir()
        for path in Path(place).iterdir():
            if path.name != program:
                (links / path.name).symlink_to(path)
        kept.append(str(links))
    return os.pathsep.join(kept)


def stand_in(folder: Path, version: str) -> str:
    """A PATH whose first clang is ours: it says ``version``, a command, and compiles as cc does."""
    script = folder / "clang"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit; fi\nexec cc "$@"\n',
        encoding="utf-8",
    )
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def cmake(path: str, *arguments: str | Path) -> None:
    command = [Path(CMAKE_BIN_DIR) / "cmake", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def build_with(path: str, folder: Path, target: str) -> None:
    """Configure in ``folder`` and make one target of CMakeLists.txt, where PATH is ``path``."""
    cmake(
        path, "-S", build.ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        f"-DCMAKE_MAKE_PROGRAM={Path(BIN_DIR) / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}",
    )  # fmt: skip
    cmake(path, "--build", folder, "--target", target)


def facts_with(path: str, folder: Path) -> dict[str, Any]:
    build_with(path, folder, "build_facts")
    return runpy.run_path(str(folder / "_build_facts.py"))["FACTS"]


def test_each_build_looks_for_clang_again(tmp_path: Path) -> None:
    made, ours, links = (tmp_path / name for name in ("made", "ours", "links"))
    ours.mkdir()
    links.mkdir()
    found = facts_with(stand_in(ours, "echo 'clang version 99'"), made)
    assert (found["clang"], found["clang_missing"]) == ("clang version 99", "")
    broken = facts_with(stand_in(ours, "exit 1"), made)
    assert (broken["clang"], broken["clang_missing"]) == ("", "clang was found but does not run")
    hidden = facts_with(path_without("clang", links), made)
    assert hidden["clang"] == ""
    assert hidden["clang_missing"] == "clang was not found when the kernels were built"
    assert found["build_id"] != broken["build_id"] == hidden["build_id"]


@pytest.mark.slow
def test_its_module_is_made_by_what_is_called_clang(tmp_path: Path) -> None:
    """The whole way where there is no clang: a stand-in compiles, and what it made attends as K1 does."""
    path = stand_in(tmp_path, "echo 'clang version 99'")
    build_with(path, tmp_path / "made", "kv_hot__kernels_clang")
    (library,) = (tmp_path / "made" / "modules" / "hot").glob("_kernels_clang*")
    spec = spec_from_file_location(MODULE, library)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = StoreSpec(1, 9, 3, 64, budget_bytes=1 << 22)
    draw = np.random.default_rng(1)
    k, v = draw.standard_normal((2, 133, 3, 64), np.float32)
    q = draw.standard_normal((9, 64), np.float32)
    outputs = []
    for store in (
        paged.open_paged(shape),
        paged.open_paged(shape, format=replace(FP32, kernel=lambda: module.kernels()["fp32"])),
    ):
        session = store.open_session()
        session.append(0, np.arange(133), k, v)
        outputs.append(np.zeros_like(q))
        session.attend(0, q, outputs[-1], 0.125)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
