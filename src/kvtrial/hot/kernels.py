"""Which compiled module has the SIMD kernel of a page format."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def simd_kernel(format: str, *, clang: bool = False) -> Any:
    """The SIMD kernel of a page format, a ``kv_span_fn`` in a PyCapsule.

    Parameters
    ----------
    format : str
        "fp32", "fp16", "q8_0", "fp32t" or "fp16t"; see `kvtrial.hot.paged.open_paged`.
    clang : bool
        The kernel as clang compiles it, of "fp32" alone.
    """
    rows = "_kernels_clang" if clang else "_kernels_simd"
    module = "_kernels_panel_simd" if format.endswith("t") else rows
    return import_module(f"kvtrial.hot.{module}").kernels()[format]
