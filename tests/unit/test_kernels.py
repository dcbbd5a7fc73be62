"""Which of the compiled kernels a store gets."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from kvtrial import build
from kvtrial.hot import kernels

AVX512 = ["avx2", "avx512bw", "avx512dq", "avx512f", "avx512vl", "fma"]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    kernels.lanes.cache_clear()
    yield
    kernels.lanes.cache_clear()


@pytest.mark.parametrize(
    ("wide", "features", "lanes"),
    [
        ("avx512", AVX512, 16),
        ("avx512", [f for f in AVX512 if f != "avx512vl"], 8),
        ("avx512", ["avx2", "fma"], 8),
        ("", AVX512, 8),
        ("portable", [], 16),
    ],
)
def test_sixteen_lanes_need_the_kernels_and_the_machine(
    monkeypatch: pytest.MonkeyPatch, wide: str, features: list[str], lanes: int
) -> None:
    monkeypatch.setattr(build, "facts", lambda: {"wide": wide})
    monkeypatch.setattr(build, "cpu_features", lambda: features)
    assert kernels.lanes() == lanes


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
