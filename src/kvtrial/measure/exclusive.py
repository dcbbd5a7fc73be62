"""The machine for one measuring job at a time, whatever ``--cores`` says and whoever started it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_held: list[int] = []


class MachineHeld(RuntimeError):
    """Somebody measures on this machine; the message says who."""


def held() -> tuple[int, ...]:
    """Descriptors to pass on to measured processes.

    The lock then lasts until the last of them has ended: one that outlives a killed parent can't
    disturb the next job.
    """
    return tuple(_held)


def lock_path() -> Path:
    """One file for all users and checkouts of this machine, wherever ``TMPDIR`` points.

    ``KVTRIAL_LOCK`` names another, where jobs of one machine don't share ``/tmp``.
    """
    return Path(os.environ.get("KVTRIAL_LOCK") or "/tmp/kvtrial-machine.lock")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def exclusive(what: str, say: Callable[[str], None] = _say, *, wait: bool = True) -> Iterator[None]:
    """Hold the machine while the body runs; wait, and say for whom, while somebody else does.

    The lock belongs to the open file: it goes with the process and its measured children, even when
    they are killed, so that there is never one to clear by hand.

    Parameters
    ----------
    what : str
        What the others read while they wait, such as ``m2 of <run_id>``.
    say : callable
        Gets the message when there is something to wait for.
    wait : bool
        False: raise `MachineHeld` instead of waiting.
    """
    descriptor = _open(lock_path())
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 500, 0).decode(errors="replace").strip()
            held_by = f"the machine is held by {holder or 'another job'}"
            if not wait:
                raise MachineHeld(held_by) from None
            say(f"{what} waits: {held_by}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        _write(descriptor, f"{what} (process {os.getpid()})\n")
        _held.append(descriptor)
        try:
            yield
        finally:
            _held.remove(descriptor)
            _write(descriptor, "")
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """Open the lock file, made by whoever came first and open to all.

    An existing file is opened without O_CREAT: in a sticky folder Linux refuses that for a file of
    another user (fs.protected_regular). Reading suffices for the lock itself.
    """
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except PermissionError:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            pass
        try:
            created = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        os.fchmod(created, 0o666)  # past the umask
        return created


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):  # another user's file, open for reading only
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)
