"""Registers the candidate Lazy: kvtrial's pages, a kernel in Rust."""

import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvtrial.contract import Candidate, Capability
from kvtrial.hot.formats.fp32 import FP32
from kvtrial.hot.paged import open_paged

_LIBRARY = Path(__file__).with_name("kernel.so")
_NAME = b"kvtrial.kv_kernel"  # has to outlive every capsule


def _lazy() -> Any:
    kernel = ctypes.cast(ctypes.CDLL(str(_LIBRARY)).lazy, ctypes.c_void_p)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return new(kernel, _NAME, None)


LAZY = Candidate(
    name="Lazy",
    title="Paged, lazy rescale, FP32",
    role="contender",
    profile=FP32.profile,
    language="Rust",
    owner="Cython",
    layout="paged [kv_head][token][head_dim]",
    capabilities=frozenset(Capability),
    open=partial(open_paged, format=replace(FP32, kernel=_lazy)),
    not_built=None if _LIBRARY.is_file() else f"{_LIBRARY} is missing: install the package again",
)
