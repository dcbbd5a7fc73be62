"""Rows about the surroundings of an arm: probes before and after, load, thread settings."""

from __future__ import annotations

import os
from typing import Any

import threadpoolctl

from kvtrial.host import machine
from kvtrial.measure import probes
from kvtrial.measure.child import Row
from kvtrial.measure.probes import CpuMeter, Probes


class Bracket:
    """Probes around a piece of work. ``columns``: candidate and place of the rows."""

    def __init__(self, probe: Probes, **columns: Any) -> None:
        self._probe = probe
        self._columns = columns
        self.rows: list[Row] = []

    def __enter__(self) -> Bracket:
        self._take(0)
        self._cpus = CpuMeter(self._probe.threads)
        return self

    def __exit__(self, *error: object) -> None:
        found = {
            "probe/stolen_fraction": self._cpus.stolen_fraction(),
            "probe/cpus_short": self._cpus.cpus_short(),
            "probe/throttled": self._cpus.throttled(),
        }
        self._take(1)
        for metric, value in found.items():
            if value is not None:
                self._add(metric, 1, float(value))
        self.rows += environment_rows(**self._columns)

    def best(self, metric: str) -> float:
        """The larger of the two readings of a rate."""
        return max(row["value"] for row in self.rows if row["metric"] == metric)

    def _take(self, index: int) -> None:
        self.rows += reading_rows(self._probe, index, **self._columns)

    def _add(self, metric: str, index: int, value: float) -> None:
        self.rows.append({**self._columns, "metric": metric, "index": index, "value": value})


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
