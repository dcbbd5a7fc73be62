"""Which of the compiled SIMD kernels this machine runs: with vectors of eight floats, or of sixteen."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from kvtrial.host import build


@functools.cache
def lanes() -> int:
    """Floats of a vector in the kernels of every SIMD arm, Rust's too: 16 where they were built and this
    machine has AVX-512, else 8."""
    wide = build.facts().get("wide")
    return 16 if wide == "portable" or (wide and _has_avx512()) else 8


def _has_avx512() -> bool:
    from kvtrial.hot._cpu import has_avx512

    return bool(has_avx512())


def simd_kernel(format: str, head_dim: int, *, clang: bool = False) -> Any:
    """The SIMD kernel of a page format, a ``kv_span_fn`` in a PyCapsule.

    Parameters
    ----------
    format : str
        "fp32", "fp16", "q8_0", "fp32t" or "fp16t"; see `kvtrial.hot.paged.open_paged`.
    head_dim : int
        Rows that are not whole vectors of sixteen go to the kernels of eight.
    clang : bool
        The kernel as clang compiles it, of "fp32" alone.
    """
    name = "_kernels" + ("_panel" if format.endswith("t") else "") + ("_clang" if clang else "")
    if lanes() == 16 and head_dim % 16 == 0:
        name += "_avx512"
    elif not clang:
        name += "_simd"
    return import_module(f"kvtrial.hot.{name}").kernels()[format]
