"""The one clock, and the thread's own. Timed code takes its time here, so that a test can put another clock in its
place."""

from __future__ import annotations

import time


class TimerResolution(RuntimeError):
    """An interval was too short for the clock: a rate made of it would mean nothing."""


def now_ns() -> int:
    """A monotonic time in nanoseconds."""
    return time.perf_counter_ns()


def own_ns() -> int:
    """Nanoseconds that this thread has run on a CPU."""
    return time.thread_time_ns()


def elapsed_ns(start: int, stop: int, what: str) -> int:
    """``stop - start`` in nanoseconds; `TimerResolution` when the clock did not move.

    Parameters
    ----------
    start, stop : int
        Two readings of `now_ns`.
    what : str
        Names the interval in the error.
    """
    if stop <= start:
        raise TimerResolution(
            f"{what} took {stop - start} ns by a clock with a resolution of "
            f"{time.get_clock_info('perf_counter').resolution * 1e9:g} ns; time more work at once"
        )
    return stop - start
