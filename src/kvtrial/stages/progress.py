"""What is done and what is left: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from kvtrial.host import printed

#: Seconds between two lines about one unit in a log.
LOG_EVERY_S = 15.0


class Progress:
    """Says what is done and what is left. Units may be reported from several threads.

    Parameters
    ----------
    title : str
        The stage.
    weights : dict of str to float
        Unit → its share of the work; for ``in_seconds`` the time that it is estimated to take.
    in_seconds : bool
        Time left is then the estimate of what is left, which `expect` may correct; otherwise it comes
        from how long the finished units took.
    """

    def __init__(self, title: str, weights: dict[str, float], in_seconds: bool = False) -> None:
        self._title = title
        self.in_seconds = in_seconds
        self._left = dict(weights)
        self._shares: dict[str, float] = {}  # of units begun; what is not in `_left` does not count
        self._finished = 0.0
        self._start = time.monotonic()
        self._said = self._start
        self._lock = threading.RLock()
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.progress import TimeElapsedColumn, TimeRemainingColumn

            self._bar = printed.progress(
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                refresh_per_second=1,  # drawing takes time from a block on all cores
            )
            self._task = self._bar.add_task(title, total=self._total or 1.0)

    @property
    def _total(self) -> float:
        return self._finished + sum(self._left.values())

    @property
    def _completed(self) -> float:
        begun = (share * self._left.get(unit, 0.0) for unit, share in self._shares.items())
        return self._finished + sum(begun)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        if self.in_seconds and self._left:
            self.say(f"estimated time {duration(self._total)}")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.in_seconds and self._finished and error[0] is None:
            self.say(f"took {duration(time.monotonic() - self._start)}")

    def expect(self, weights: dict[str, float]) -> None:
        """Correct the weights of units that are left, and add those that were not planned."""
        self._left |= weights
        if self._bar is not None:
            self._bar.update(self._task, total=self._total)

    def say(self, text: str) -> None:
        """One line above the bar, or in the log."""
        line = f"{self._title}: {text}"
        with self._lock:
            if self._bar is not None:
                self._bar.console.print(line)
            else:
                print(line, file=sys.stderr, flush=True)

    def within(self, unit: str, share: float) -> None:
        """A long unit is done to this share; in a log at most one line in `LOG_EVERY_S`."""
        now = time.monotonic()
        with self._lock:
            self._shares[unit] = share
            if self._bar is not None:
                self._bar.update(self._task, completed=self._completed)
            elif now - self._said >= LOG_EVERY_S and share < 1:
                self._said = now
                self._say_share(f"{unit} at {share:.0%}")

    def done(self, unit: str, remark: str = "") -> None:
        """A unit is finished."""
        with self._lock:
            self._finished += self._left.pop(unit, 0.0)
            self._shares.pop(unit, None)
            if self._bar is not None:
                self._bar.update(self._task, completed=self._completed)
                if not remark:
                    return
            self._said = time.monotonic()
            self._say_share(f"{unit} done{f' ({remark})' if remark else ''}")

    def _say_share(self, what: str) -> None:
        total, completed = self._total, self._completed
        share = completed / total if total else 1.0
        if self.in_seconds:
            left = total - completed
        else:
            spent = time.monotonic() - self._start
            left = spent * (1 - share) / share if share > 0 else 0.0
        self.say(f"{what}, {share:.0%} of all, about {duration(left)} left")


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``1 h 05 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
