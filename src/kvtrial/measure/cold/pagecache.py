"""The kernel's page cache: empty it of some files, and see whether it is.

Linux; elsewhere nothing can be evicted, and `resident_fraction` says None.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path


def evict(files: Sequence[Path]) -> None:
    """Drop what the page cache holds of the files; dirty pages are written out first."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_fraction(files: Sequence[Path]) -> float | None:
    """The part of the files' pages that is in the page cache, by mincore(2)."""
    if not hasattr(os, "posix_fadvise"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    resident = pages = 0
    for path in files:
        size = path.stat().st_size
        if size == 0:
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as view:
            n = -(-size // mmap.PAGESIZE)
            states = (ctypes.c_ubyte * n)()
            start = ctypes.c_char.from_buffer(view)
            failed = libc.mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), states
            )
            del start
            if failed:
                raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
            resident += sum(state & 1 for state in states)
            pages += n
    return resident / pages if pages else 0.0
