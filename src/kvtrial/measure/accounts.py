"""Where the wall time of a step went: ran, waited for a CPU, waited for the disk, or stood still.

A busy neighbour makes a step wait for a CPU, and in a rotation it does so to all arms alike. A stop
(SIGSTOP, a frozen control group, a paused machine) is different: it hits the one step that it falls into.
The kernel's accounts tell the two apart: proc(5), ``/proc/PID/task/TID/schedstat`` (time on a CPU and time
runnable but waiting for one, ns) and field 42 of ``/proc/PID/stat`` (time blocked on I/O, in clock ticks).
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Reading(NamedTuple):
    """Sums over the process's threads since they began, ns; ``disk_faults`` counts pages read from disk."""

    wall_ns: int
    ran_ns: int
    waited_ns: int
    blocked_ns: int
    disk_faults: int


class Accounts:
    """Readings of this process's accounts, cheap enough to take between two steps (some 10 microseconds).

    Threads that begin later are not seen, so make one when they are all there. Where the system keeps no
    such accounts (macOS), ``complete`` is False, and what stood still can't be told from what waited.
    """

    def __init__(self) -> None:
        self._files = []
        for task in sorted(Path("/proc/self/task").glob("*")):
            with contextlib.suppress(OSError):
                self._files.append(os.open(task / "schedstat", os.O_RDONLY | os.O_CLOEXEC))
        try:
            self._stat = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._stat = -1
        self.complete = bool(self._files) and self._stat >= 0

    def close(self) -> None:
        """Give the files back."""
        for descriptor in [*self._files, self._stat]:
            if descriptor >= 0:
                os.close(descriptor)
        self._files, self._stat, self.complete = [], -1, False

    def read(self) -> Reading:
        """One reading."""
        waited = blocked = 0
        for descriptor in self._files:
            with contextlib.suppress(OSError):  # a thread that has ended
                waited += int(os.pread(descriptor, 64, 0).split()[1])
        if self._stat >= 0:
            # The name, in brackets, may hold spaces: count from its end.
            fields = os.pread(self._stat, 1024, 0).rpartition(b")")[2].split()
            blocked = int(fields[39]) * _TICK_NS
        return Reading(
            wall_ns=time.perf_counter_ns(),
            ran_ns=time.process_time_ns(),
            waited_ns=waited,
            blocked_ns=blocked,
            disk_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        )


def stood_still_ns(before: Reading, after: Reading) -> int:
    """Wall time between two readings in which no thread ran, waited for a CPU or for the disk; at least 0.

    Threads that ran at the same time are counted together, so this is a lower bound.
    """
    accounted = sum(getattr(after, key) - getattr(before, key) for key in _ACCOUNTED)
    return max(0, after.wall_ns - before.wall_ns - accounted)


_ACCOUNTED = ("ran_ns", "waited_ns", "blocked_ns")
