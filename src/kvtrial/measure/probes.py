"""What the machine does right now, by fixed work: clock speed, read bandwidth, arithmetic, load.

They describe the machine and are the ceilings that M1 is compared with; they void nothing. Each
reading is the best of several passes: a ceiling is what the machine can do, and the best pass is the
one that the neighbours on a shared machine disturbed least.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from kvtrial.host import machine
from kvtrial.measure import clock
from kvtrial.measure._probes import FMA_FLOPS, fma, read, spin

SPIN_LINKS = 4_000_000  # about 5 ms a pass
FMA_ROUNDS = 1_000_000  # about 2 ms a pass
# What config/protocol.yaml registers, for whoever probes without a protocol.
PASSES = 6
#: Reads take more: on a shared machine the best of six wanders by a tenth within a second.
READ_PASSES = 24
#: The buffer is this many times the last-level cache, so that a pass reads memory, not cache.
LLC_MULTIPLE = 4.0
_WORDS = 64  # the read loop takes 64 words at once
# After a read of all the buffer a last-level cache keeps new lines only when they come again and again:
# on a Zen 3 the sixth read of 8 MiB was three times as fast as the first.
_CACHED_READS = 8


@dataclass(frozen=True)
class Reading:
    """One reading of all probes.

    Attributes
    ----------
    spin_ms : float
        A fixed chain of dependent integer multiplications, one thread: it moves with the clock.
    read_gb_per_s : float
        Streaming read over all threads, 1e9 bytes a second.
    cached_read_gb_per_s : float
        The same from the last-level cache: a quarter of it, read again and again.
    fma_gflop_per_s : float
        FP32 multiply-adds over all threads, 1e9 operations a second (two a multiply-add).
    """

    spin_ms: float
    read_gb_per_s: float
    cached_read_gb_per_s: float
    fma_gflop_per_s: float


class Probes:
    """Fixed work for a number of threads; takes its buffer once.

    Parameters
    ----------
    threads : int
        Threads that read and calculate at the same time.
    llc_multiple : float
        The buffer that is read is this many times the last-level caches of the threads, at most a
        quarter of the memory that is available.
    read_passes, passes : int
        Passes of a reading, the best of which counts: over the buffer, and of the others.
    """

    def __init__(
        self,
        threads: int = 1,
        *,
        llc_multiple: float = LLC_MULTIPLE,
        read_passes: int = READ_PASSES,
        passes: int = PASSES,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; give at least 1")
        cache_bytes = machine.last_level_cache_bytes(threads)
        buffer_bytes = min(int(llc_multiple * cache_bytes), machine.available_memory_bytes() // 4)
        per_thread = max(buffer_bytes // (8 * _WORDS * threads), 1) * _WORDS
        # Written once: pages that nobody wrote to would all be the one zero page.
        self._buffer = np.arange(per_thread * threads, dtype=np.uint64)
        self._chunks = np.split(self._buffer, threads)
        cached = cache_bytes // (4 * 8 * _WORDS * threads) * _WORDS
        self._cached = [chunk[: max(cached, _WORDS)] for chunk in self._chunks]
        self._read_passes, self._passes = read_passes, passes
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def measure(self) -> Reading:
        """Take a reading; about a third of a second with the defaults.

        The probes take turns, each spread over the whole of that time: whoever takes the core for
        a tenth of a second then spoils some passes of each, not all of one.
        """
        whole, cached = ([(c,) for c in chunks] for chunks in (self._chunks, self._cached))
        probes: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]], int]] = {
            "spin": (spin, [(7, SPIN_LINKS)], self._passes),
            "read": (read, whole, self._read_passes),
            "cached read": (read, cached, self._passes),
            "fma": (fma, [(0.5, 1.0, FMA_ROUNDS)] * self.threads, self._passes),
        }
        turns = max(self._passes, self._read_passes)
        taken: dict[str, list[int]] = {name: [] for name in probes}
        for turn in range(turns):
            for name, (probe, work, passes) in probes.items():
                if passes * turn // turns > passes * (turn - 1) // turns:
                    again = _CACHED_READS if name == "cached read" else 1
                    taken[name] += [self._time_ns(probe, work) for _ in range(again)]
        best = {name: min(spent) for name, spent in taken.items()}
        return Reading(
            spin_ms=best["spin"] / 1e6,
            read_gb_per_s=self._buffer.nbytes / best["read"],
            cached_read_gb_per_s=sum(c.nbytes for c in self._cached) / best["cached read"],
            fma_gflop_per_s=self.threads * FMA_ROUNDS * FMA_FLOPS / best["fma"],
        )

    def _time_ns(self, function: Callable[..., Any], work: list[tuple[Any, ...]]) -> int:
        """Nanoseconds until all of ``work``, one tuple of arguments a thread, is done."""
        start = clock.now_ns()
        if len(work) == 1 or self._pool is None:
            for args in work:
                function(*args)
        else:
            for running in [self._pool.submit(function, *args) for args in work]:
                running.result()
        return clock.elapsed_ns(start, clock.now_ns(), f"probe {function.__name__}")

    def close(self) -> None:
        """Give threads and buffer back."""
        if self._pool is not None:
            self._pool.shutdown()
        self._chunks, self._cached = [], []
        self._buffer = np.empty(0, np.uint64)


def load() -> float:
    """Runnable tasks, averaged over the last minute."""
    return psutil.getloadavg()[0]
