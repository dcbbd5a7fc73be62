"""Two row formats for kvtrial's pool, each a module with its record and a candidate."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("narrow.so")
NOT_BUILT = None if LIBRARY.is_file() else f"{LIBRARY} is missing: install the package again"
# They have to outlive every capsule.
ROWS, KERNEL = b"kvtrial.kv_rows", b"kvtrial.kv_kernel"


def capsule(symbol: str, name: bytes) -> Any:
    """A symbol of the library in a PyCapsule of that name."""
    address = ctypes.addressof(ctypes.c_char.in_dll(ctypes.CDLL(str(LIBRARY)), symbol))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return new(address, name, None)
