"""The system calls that durability rests on, in one place, so that tests can count and break them.

Callers use these as ``disk.write_all(...)``: a test replaces one attribute of this module, or of
``os``, and sees every byte and every sync pass by.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtrial.cold.errors import StoreLocked, of_disk

Buffer = bytes | bytearray | memoryview

#: Buffers that one preadv or pwritev may take (IOV_MAX is 1,024 on Linux and macOS).
MAX_BUFFERS = 1024
#: What is said to a model is in the pages: a store's files and folder are its owner's alone.
FILE_MODE, FOLDER_MODE = 0o600, 0o700


@dataclass
class Counters:
    """Successful syncs of files by this process so far."""

    fsyncs: int = 0


counters = Counters()


def _move(
    call: Callable[[int, list[Buffer], int], int], fd: int, buffers: Sequence[Buffer], offset: int
) -> Iterator[int]:
    """Apply preadv or pwritev to all buffers, continuing short calls; yields each call's bytes, the last
    time 0 where nothing moves any more."""
    left = [buffer for buffer in buffers if memoryview(buffer).nbytes]
    while left:
        part = left[:MAX_BUFFERS]
        n = call(fd, part, offset)
        yield n
        if n == 0:
            return
        offset += n
        done = 0
        while done < len(part) and n >= len(part[done]):
            n -= len(part[done])
            done += 1
        left = left[done:]
        if n:
            left[0] = memoryview(left[0])[n:]


def write_all(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write all buffers of bytes one after the other at ``offset``; short writes are continued.

    Returns the bytes written, which are all. `OSError` leaves an unknown part written: the caller
    truncates. A call that moves nothing is one: what it left out must not be synced and acknowledged.
    """
    total = 0
    for n in _move(os.pwritev, fd, buffers, offset):
        total += n
        if n == 0:
            raise OSError(errno.EIO, f"a write took none of its bytes at offset {offset + total}")
    return total


def read_into(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Fill writable buffers of bytes from ``offset``; returns bytes read, fewer only at the end."""
    return sum(_move(os.preadv, fd, buffers, offset))


def fsync(fd: int) -> None:
    """Make the file's bytes and size durable."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone stops at the drive's cache
        fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(fd)
    counters.fsyncs += 1


def truncate(fd: int, size: int) -> None:
    """Cut a file to ``size`` bytes, durably: what was behind does not come back."""
    os.ftruncate(fd, size)
    fsync(fd)


def fsync_dir(path: Path) -> None:
    """Make names created, renamed or removed in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def names(path: Path) -> list[str]:
    """Names in a folder. One that can't be listed is an error: it is not empty."""
    try:
        return [inside.name for inside in path.iterdir()]
    except OSError as error:
        raise of_disk(error, path, "listed") from error


def next_data(fd: int, offset: int) -> int:
    """Where bytes that were written come next; a hole, which reads as zeros, may be very large."""
    if not hasattr(os, "SEEK_DATA"):
        return offset
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a filesystem without holes
            return offset
        return max(offset, os.fstat(fd).st_size)


def read_short(path: Path, nbytes: int) -> bytes:
    """A file's first bytes. What is no file (a pipe, say) is an error, and is not waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        data = bytearray(nbytes)
        return bytes(data[: read_into(fd, [data], 0)])
    finally:
        os.close(fd)


def make_dir(path: Path, mode: int = 0o777) -> None:
    """Create ``path`` (``mode``) and its missing parents, each durable in its own parent.

    One that is there may come from a maker who was killed before he synced its name, so that is synced
    again, where its parent can be read. What lies above was durable before it was made.
    """
    if path.is_dir():
        with suppress(PermissionError):
            fsync_dir(path.parent)
        return
    make_dir(path.parent)
    path.mkdir(mode, exist_ok=True)  # another may make it at the same time
    fsync_dir(path.parent)


def shut(path: Path) -> None:
    """Leave a folder to its owner alone: RocksDB makes its files as the umask says."""
    mode = path.stat().st_mode
    if mode & 0o077:
        path.chmod(mode & 0o700)


def write_file(path: Path, data: bytes) -> None:
    """Write beside, sync, rename, sync the folder: afterwards the file is there, whole."""
    beside = path.with_name(f".{path.name}.new")
    fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    try:
        write_all(fd, [data], 0)
        fsync(fd)
    finally:
        os.close(fd)
    beside.replace(path)
    fsync_dir(path.parent)


def free_bytes(path: Path) -> int:
    """Bytes that may be written to the filesystem of a folder, as far as it says; a quota it doesn't."""
    try:
        room = os.statvfs(path)
    except OSError:  # a folder that was taken away: who writes to it will say so
        return 1 << 63
    return room.f_bavail * room.f_frsize if room.f_blocks else 1 << 63


def allocate(path: Path, nbytes: int) -> None:
    """Give a file so many bytes of the disk, made where it is missing; what they are is of no matter."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:  # macOS
            write_all(fd, [bytes(nbytes)], 0)
    finally:
        os.close(fd)


def lock(path: Path) -> int:
    """Take the exclusive lock file at ``path``; returns the descriptor whose closing releases it.

    flock belongs to the open file, so a second opener in the same process is refused too, and a
    killed process leaves a file behind but no lock.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if not isinstance(error, BlockingIOError):
            raise
        raise StoreLocked(
            f"{path.parent} is open elsewhere (lock file {path.name}); one process may write: "
            "close the other store or use another folder"
        ) from None
    return fd
