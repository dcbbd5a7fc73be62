"""What a fork makes of open stores.

A forked child has the parent's files and memory and none of its threads. RocksDB waits for its own threads
when it closes, and so for ever; two processes that append at one place destroy what the other wrote; and a
lock lives as long as any copy of its descriptor. So the child lets go of every store, says nothing to
RocksDB, and opens none of its own: RocksDB's threads are of the process, not of the database.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol

from kvtrial.cold.errors import ForkedProcess

_ADVICE = (
    "open stores in processes that were started anew (multiprocessing.get_context('spawn')), or fork "
    "before the first one is opened"
)


class Held(Protocol):
    """What has to be let go of in a forked child."""

    def let_go(self) -> None:
        """Called in the child, where no other thread runs."""


_held: weakref.WeakSet[Held] = weakref.WeakSet()
#: The process in which RocksDB was first used.
_process: int | None = None


def hold(opened: Held) -> None:
    """From here on a fork calls ``opened.let_go()`` in the child."""
    _held.add(opened)


def use_rocksdb() -> None:
    """To be called before a database is opened; `ForkedProcess` where its threads were left behind."""
    global _process
    if _process is None:
        _process = os.getpid()
    elif _process != os.getpid():
        raise ForkedProcess(
            f"process {os.getpid()} was forked from {_process}, which has had a cold store open; {_ADVICE}"
        )


def refuse_fork(process: int, what: object) -> None:
    """`ForkedProcess` in any other process than the one that opened ``what``."""
    if process != os.getpid():
        raise ForkedProcess(
            f"{what} was opened by process {process}, and this one, {os.getpid()}, is a fork of it: two "
            f"would write at one place; {_ADVICE}"
        )


def never_freed(thing: object) -> None:
    """Keep something for good: its end would wait for threads that are not there."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _forked() -> None:
    for opened in list(_held):
        opened.let_go()


os.register_at_fork(after_in_child=_forked)
