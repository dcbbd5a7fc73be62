"""Which of the compiled kernels a store gets."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtrial.host import build
from kvtrial.hot import _cpu, kernels


@pytest.fixture(autouse=True)
def fresh() -> Any:
    kernels.lanes.cache_clear()
    yield
    kernels.lanes.cache_clear()


@pytest.mark.parametrize(
    ("wide", "has", "lanes"),
    [("avx512", True, 16), ("avx512", False, 8), ("", True, 8), ("portable", False, 16)],
)
def test_sixteen_lanes_need_the_kernels_and_the_machine(
    monkeypatch: pytest.MonkeyPatch, wide: str, has: bool, lanes: int
) -> None:
    monkeypatch.setattr(build, "facts", lambda: {"wide": wide})
    monkeypatch.setattr(_cpu, "has_avx512", lambda: has)
    assert kernels.lanes() == lanes


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux lists a CPU's features there")
def test_the_cpu_is_asked_as_linux_lists_it() -> None:
    wanted = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert _cpu.has_avx512() == (wanted <= set(build.cpu_features()))


def test_without_a_build_there_are_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "facts", dict)
    assert kernels.lanes() == 8


@pytest.mark.parametrize(
    ("lanes", "format", "head_dim", "clang", "module"),
    [
        (8, "fp32", 64, False, "_kernels_simd"),
        (8, "fp16t", 64, False, "_kernels_panel_simd"),
        (8, "fp32", 64, True, "_kernels_clang"),
        (16, "q8_0", 80, False, "_kernels_avx512"),
        (16, "fp32t", 128, False, "_kernels_panel_avx512"),
        (16, "fp32", 64, True, "_kernels_clang_avx512"),
        (16, "fp32", 72, False, "_kernels_simd"),  # not whole vectors of sixteen
        (16, "fp32t", 59, False, "_kernels_panel_simd"),
        (16, "fp32", 8, True, "_kernels_clang"),
    ],
)
def test_rows_of_whole_vectors_get_the_widest(
    monkeypatch: pytest.MonkeyPatch,
    lanes: int,
    format: str,
    head_dim: int,
    clang: bool,
    module: str,
) -> None:
    asked = ModuleType(module)
    asked.kernels = lambda: {format: module}  # type: ignore[attr-defined]
    monkeypatch.setattr(kernels, "lanes", lambda: lanes)
    monkeypatch.setitem(sys.modules, f"kvtrial.hot.{module}", asked)
    assert kernels.simd_kernel(format, head_dim, clang=clang) == module
