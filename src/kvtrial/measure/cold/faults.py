"""A disk that fails on request: the Python side of ``native/disk_faults.c``.

It works in a process that was started with `preload_environment`, on Linux with glibc. There it counts,
breaks and remembers what is written below one folder, by our own calls and by RocksDB's. `power_cut` then
makes the folder that would be left behind.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
from pathlib import Path
from typing import Any

from kvtrial.measure.allocations import environment_with

#: `ANY` is a write or a sync.
WRITE, SYNC, ANY, READ = 0, 1, 2, 3
#: Beside the numbers of errno: the process is killed; the write takes fewer bytes than it was given.
DIE, SHORT = -1, -2


def library() -> Path | None:
    """The library to load first, or None on a platform that has none."""
    from kvtrial.cold import _reader  # beside which it was installed

    path = Path(_reader.__file__).with_name("disk_faults.so")
    return path if path.is_file() else None


def preload_environment() -> dict[str, str] | None:
    """Variables for a process whose disk can fail, or None where that can't be done."""
    disk = library()
    return None if disk is None else environment_with(disk)


@functools.cache
def _native() -> Any:
    return ctypes.CDLL(None)


def available() -> bool:
    """Whether this very process has such a disk."""
    return hasattr(_native(), "kvtrial_disk_watch")


def watch(folder: Path, memory: Path | None = None) -> None:
    """Watch the files below ``folder`` from here on, and heal whatever was broken.

    With ``memory``, an empty folder, syncs are remembered there instead of done, for `power_cut`.
    """
    resolved = os.fsencode(folder.resolve())
    _native().kvtrial_disk_watch(resolved, os.fsencode(memory.resolve()) if memory else b"")


def settle(folder: Path) -> None:
    """Make all that lies in a watched folder durable: it is what the machine found when it came up."""
    for path in (folder, *folder.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def fail(kind: int, error: int, after: int = 0, keep: int = 0) -> None:
    """Let calls fail with ``error`` (an errno, `DIE` or `SHORT`), those of ``kind`` after the next
    ``after`` ones; a write takes ``keep`` bytes first. With 0 for ``error`` the disk is well again.
    """
    _native().kvtrial_disk_fail(kind, error, ctypes.c_long(after), ctypes.c_long(keep))


def calls(kind: int) -> int:
    """Watched calls (`WRITE` or `SYNC`) since `watch`, failed ones too."""
    native = _native()
    native.kvtrial_disk_calls.restype = ctypes.c_long
    return int(native.kvtrial_disk_calls(kind))


def _key(path: Path) -> str | None:
    key = ctypes.create_string_buffer(64)
    if _native().kvtrial_disk_key(os.fsencode(path), key, ctypes.c_size_t(64)):
        return None
    return key.value.decode()


def power_cut(folder: Path, memory: Path, into: Path, draw: random.Random | None = None) -> None:
    """Make in ``into`` what a power cut leaves of a watched folder.

    A file has the bytes that it had as it was last synced, a folder the names; the rest is lost. With
    ``draw``, a file that was appended to since keeps some of that, up to a random byte: a torn write.
    """
    present: dict[str, Path] = {}
    if draw is not None:
        files = (path for path in folder.rglob("*") if path.is_file())
        present = {key: path for path in files if (key := _key(path))}

    def settle(key: str, target: Path) -> None:
        kept = memory / key
        target.mkdir()
        lines = kept.read_bytes().splitlines() if kept.is_file() else []
        for line in lines:
            inner, name = line.decode().split(" ", 1)
            if (folder / target.relative_to(into) / name).is_dir():
                settle(inner, target / name)
                continue
            data = (memory / inner).read_bytes() if (memory / inner).is_file() else b""
            if draw is not None and inner in present:
                now = present[inner].read_bytes()
                if len(now) > len(data) and now.startswith(data):
                    data = now[: draw.randint(len(data), len(now))]
            (target / name).write_bytes(data)

    settle("root", into)
