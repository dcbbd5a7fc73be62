"""What the kernels were built with: recorded, and refused where it doesn't fit."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtrial.contract import InvalidArgument, StaleBuild, StoreSpec
from kvtrial.host import build
from kvtrial.hot.formats.fp32 import FP32
from kvtrial.hot.paged import open_paged

ROOT = Path(__file__).resolve().parents[2]


def test_a_cpu_that_lacks_a_feature_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """B26: kernels made for another CPU are refused before they run, not by an illegal instruction."""
    facts = {**build.facts(), "cpu_features": ["avx2", "fma"]}
    monkeypatch.setattr(build, "facts", lambda: facts)
    monkeypatch.setattr(build, "cpu_features", lambda: ["avx2"])
    refuse = build.refuse_stale.__wrapped__
    with pytest.raises(StaleBuild, match="built for a CPU with fma, which this one lacks"):
        refuse()
    facts["native_isa"] = False  # made for any CPU of the kind
    refuse()
    facts["native_isa"] = True
    monkeypatch.setattr(build, "cpu_features", lambda: ["avx2", "fma"])
    refuse()


def test_arithmetic_is_ieee() -> None:
    """B19: no flag lets the compiler forget NaN and inf, or flush subnormals for the process."""
    flags = build.facts()["c_flags"].split()
    assert "-O3" in flags
    assert not {"-ffast-math", "-Ofast", "-ffinite-math-only", "-funsafe-math-optimizations"} & set(
        flags
    )


def test_kernels_without_the_interpreter_lock_can_not_raise() -> None:
    """B24: an exception in a `nogil` function would be lost, or take the lock at every call."""
    signature = re.compile(r"^ *cdef [^=\n]*\([^)]*\)[^:\n]*nogil[^:\n]*:$", re.MULTILINE)
    found = 0
    for path in sorted((ROOT / "src" / "kvtrial").rglob("*.pyx")):
        for line in signature.findall(path.read_text(encoding="utf-8")):
            found += 1
            assert "noexcept" in line, f"{path.name}: {line}"
    assert found > 30


def test_a_kernels_code_becomes_an_exception() -> None:
    """B24: what a kernel returns inside `nogil` is raised outside of it."""
    kernel = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda span: 3)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    name = ctypes.c_char_p(b"kvtrial.kv_kernel")
    failing = capsule(ctypes.cast(kernel, ctypes.c_void_p), name, None)
    store = open_paged(
        StoreSpec(1, 2, 1, 8, budget_bytes=1 << 16),
        format=replace(FP32, kernel=lambda: failing),
    )
    session = store.open_session()
    row = np.ones((1, 1, 8), np.float32)
    session.append(0, [0], row, row)
    q = np.ones((2, 8), np.float32)
    with pytest.raises(InvalidArgument, match="refused"):
        session.attend(0, q, q.copy(), 1.0)
    with pytest.raises(InvalidArgument, match="refused"):
        session.attend_partial(0, q, 1.0)
