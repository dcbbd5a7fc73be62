"""Counts malloc, calloc, realloc, aligned_alloc, posix_memalign and mmap calls of native code, and
the bytes that its memcpy and memmove calls move.

`tracemalloc` doesn't see what Cython and Rust allocate. `native/alloc_count.c` does: loaded before
the C library it stands in front of the allocator and counts, per thread. That takes a process of
its own, started with `preload_environment`; elsewhere `count_calls` gives None, "not available".

Decided here: a count is never taken in a timed process, since the counter costs a little on each
call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvtrial.measure._allocations as _allocations


def library() -> Path | None:
    """The library to load first, or None on a platform that has none (it needs Linux and glibc)."""
    path = Path(_allocations.__file__).with_name("alloc_count.so")
    return path if path.is_file() else None


def preload_environment() -> dict[str, str] | None:
    """Environment variables that make a child process count, or None where that can't be done."""
    found = library()
    return None if found is None else environment_with(found)


def environment_with(preloaded: Path) -> dict[str, str]:
    """Environment variables that load a library before the C library.

    The folder goes on the search path and only the name is preloaded: LD_PRELOAD itself can't hold
    a path with a space.
    """
    search = [str(preloaded.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_PRELOAD": preloaded.name, "LD_LIBRARY_PATH": ":".join(search)}


def available() -> bool:
    """Whether this very process counts."""
    return bool(_allocations.preloaded())


def count_calls(function: Callable[..., Any], *args: Any, every_thread: bool = False) -> int | None:
    """Allocation calls made while ``function(*args)`` runs.

    Parameters
    ----------
    function, args
        What is called, once. The interpreter's own allocations count too: warm it up first, so that
        its caches are filled.
    every_thread : bool
        Count the calls of all threads, not of this one alone; only where no other thread is busy.

    Returns
    -------
    int or None
        None where nothing counts in this process.
    """
    calls = _allocations.count_calls(function, args, every_thread)
    return None if calls < 0 else calls


def copied_bytes(function: Callable[..., Any], *args: Any) -> int | None:
    """Bytes that this thread copies while ``function(*args)`` runs, the interpreter's own included.

    Copies that the compiler made loops or moves of are not seen; a row or a page is copied by a call.
    None where nothing counts in this process.
    """
    copied = _allocations.count_copied_bytes(function, args)
    return None if copied < 0 else copied
