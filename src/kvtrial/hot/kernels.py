"""Which of the compiled SIMD kernels this machine runs: with vectors of eight floats, or of sixteen."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from kvtrial import build

#: What the vectors of sixteen floats use of AVX-512.
AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})


@functools.cache
def lanes() -> int:
    """Floats of a vector in the kernels of every arm, Rust's too: 16 where they were built and this
    machine has AVX-512, else 8."""
    wide = build.facts().get("wide")
    return 16 if wide == "portable" or (wide and set(build.cpu_features()) >= AVX512) else 8


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
