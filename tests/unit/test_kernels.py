"""Which of the compiled kernels a store gets."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvtrial.hot import kernels


@pytest.mark.parametrize(
    ("format", "clang", "module"),
    [
        ("fp32", False, "_kernels_simd"),
        ("fp16", False, "_kernels_simd"),
        ("q8_0", False, "_kernels_simd"),
        ("fp32", True, "_kernels_clang"),
        ("fp32t", False, "_kernels_panel_simd"),
        ("fp16t", False, "_kernels_panel_simd"),
    ],
)
def test_the_format_says_which_module(
    monkeypatch: pytest.MonkeyPatch, format: str, clang: bool, module: str
) -> None:
    asked = ModuleType(module)
    asked.kernels = lambda: {format: module}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, f"kvtrial.hot.{module}", asked)
    assert kernels.simd_kernel(format, clang=clang) == module
