"""Rows about the surroundings of an arm: probes before and after, load, thread settings."""

from __future__ import annotations

import os
from typing import Any

import threadpoolctl

from kvtrial.host import machine
from kvtrial.measure import probes
from kvtrial.measure.child import Row
from kvtrial.measure.probes import Probes


class Bracket:
    """Probes around a piece of work. ``columns``: candidate and place of the rows."""

    def __init__(self, probe: Probes, **columns: Any) -> None:
        self._probe = probe
        self._columns = columns
        self.rows: list[Row] = []

    def __enter__(self) -> Bracket:
        self._take(0)
        self._throttled = machine.throttle_events()
        return self

    def __exit__(self, *error: object) -> None:
        self.rows += throttled_rows(self._throttled)
        self._take(1)
        self.rows += environment_rows(**self._columns)

    def best(self, metric: str) -> float:
        """The larger of the two readings of a rate."""
        return max(row["value"] for row in self.rows if row["metric"] == metric)

    def _take(self, index: int) -> None:
        self.rows += reading_rows(self._probe, index, **self._columns)


def throttled_rows(before: int | None) -> list[Row]:
    """Throttling events of CPUs and control group since a reading; none where nothing counts them."""
    now = machine.throttle_events()
    if before is None or now is None:
        return []
    return [{"metric": "probe/throttled", "value": float(now - before)}]


def reading_rows(probe: Probes, index: int, **columns: Any) -> list[Row]:
    """One reading of the machine, before (0) or after (1) the work that ``columns`` name."""
    reading = probe.measure()
    found = {
        "probe/spin_ms": reading.spin_ms,
        "probe/read_gb_per_s": reading.read_gb_per_s,
        "probe/cached_read_gb_per_s": reading.cached_read_gb_per_s,
        "probe/fma_gflop_per_s": reading.fma_gflop_per_s,
        "probe/load": probes.load(),
    }
    if (clock := machine.frequency_mhz()) is not None:
        found["probe/frequency_mhz"] = clock
    return [
        {**columns, "metric": metric, "index": index, "value": value}
        for metric, value in found.items()
    ]


def environment_rows(**columns: Any) -> list[Row]:
    """Thread settings that this process runs under: they must be the same in every arm."""
    texts = {name: os.environ.get(name, "") for name in machine.THREAD_VARIABLES}
    texts["affinity"] = ",".join(map(str, machine.affinity()))
    pools = [
        pool["num_threads"]
        for pool in threadpoolctl.threadpool_info()
        if pool["user_api"] in ("blas", "openmp")
    ]
    return [
        *({**columns, "metric": f"env/{key}", "text": text} for key, text in texts.items()),
        {**columns, "metric": "env/blas_threads", "value": float(max(pools, default=0))},
    ]
