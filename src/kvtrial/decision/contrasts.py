"""What was measured, by block, and how two arms compare: the numbers a verdict is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvtrial.decision import gates, rule, stats
from kvtrial.run import protocol as registered


def digits(value: float | None) -> float | None:
    """To 12 significant digits; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.12g}")


def cell_key(cell: dict[str, Any]) -> dict[str, Any]:
    """The columns that name a cell in a row of the verdict."""
    return {k: cell[k] for k in ("context", "sessions", "threads", "role")}


class Layouts:
    """How each arm lays out its rows, from the rows of stage ``run``."""

    def __init__(self, events: pd.DataFrame) -> None:
        rows = events[(events["stage"] == "run") & (events["metric"] == "candidate/layout")]
        self._of = dict(zip(rows["candidate"], rows["text"]))

    def differ(self, one: str, other: str) -> bool:
        """Whether a contrast of the two arms is one of layouts too, whatever else it is of."""
        return self._of.get(one) != self._of.get(other)


class Measured:
    """tokens/s and latencies by (cell, candidate, block), from rows of valid blocks.

    Attributes
    ----------
    cells : list of dict
        The profile's cells, as registered. Threads "all" are ``usable_cpus``, and no cell of their own
        where that is one.
    shapes : list of str
        Head shapes whose attention was measured alone, such as ``9q3kv``.
    """

    def __init__(
        self, rows: pd.DataFrame, protocol: dict[str, Any], profile: str, usable_cpus: int
    ) -> None:
        self.cells = [
            cell
            for cell in registered.cells(protocol, profile)
            if cell["threads"] != "all" or usable_cpus > 1
        ]
        self._usable_cpus = usable_cpus
        self._decision = protocol["decision"]
        self._steps = self._by_cell(
            rows[(rows["stage"] == "m2") & (rows["metric"] == "m2/step_ms")]
        )
        attention = rows[rows["metric"] == "m1/attention_ms"]
        self.shapes = sorted(set(attention["shape"]))
        self._attention = {
            shape: self._by_cell(attention[attention["shape"] == shape]) for shape in self.shapes
        }
        sessions = {gates.cell_name(cell): cell["sessions"] for cell in self.cells}
        self._rates = {
            (cell, name): {block: _rate(steps, sessions[cell]) for block, steps in blocks.items()}
            for (cell, name), blocks in self._steps.items()
        }

    def _by_cell(
        self, rows: pd.DataFrame
    ) -> dict[tuple[str, str], dict[int, npt.NDArray[np.float64]]]:
        """(cell name, candidate) → block → values."""
        found: dict[tuple[str, str], dict[int, npt.NDArray[np.float64]]] = {}
        keys = ["context", "sessions", "threads", "candidate", "block"]
        for (context, sessions, threads, name, block), own in rows.groupby(keys)["value"]:
            for cell in self.cells:
                wanted = self._usable_cpus if cell["threads"] == "all" else cell["threads"]
                if (context, sessions, threads) == (cell["context"], cell["sessions"], wanted):
                    key = (gates.cell_name(cell), name)
                    found.setdefault(key, {})[int(block)] = own.to_numpy(np.float64)
        return found

    def tokens_per_s(self, cell: dict[str, Any], name: str) -> dict[int, float]:
        """Block → tokens/s, total over total; NaN where a step time means nothing."""
        return self._rates.get((gates.cell_name(cell), name), {})

    def attention_ms(self, cell: dict[str, Any], name: str, shape: str) -> dict[int, float]:
        """Block → median milliseconds of one attention region of that head shape."""
        blocks = self._attention[shape].get((gates.cell_name(cell), name), {})
        return {block: float(np.median(values)) for block, values in blocks.items()}

    def blocks_wanted(self, cell: dict[str, Any]) -> int:
        """How many blocks the cell is to have by its first ones; see `kvtrial.decision.rule.blocks_wanted`.

        The registered number where the registered contrast has no interval to judge by.
        """
        contrast = self._decision["precision"]
        try:
            logs = self.log_ratios(cell, contrast["to"], [contrast["from"]])[0]
        except stats.Unusable:
            return int(cell["blocks"])
        if logs.size < cell["blocks"]:
            return int(cell["blocks"])
        return int(rule.blocks_wanted(logs, cell, self._decision))

    def log_ratios(
        self, cell: dict[str, Any], challenger: str, incumbents: Sequence[str]
    ) -> npt.NDArray[np.float64]:
        """log(challenger / incumbent) of tokens/s, shape (incumbents, blocks).

        Raises
        ------
        InsufficientData, PairingError, NonFinite
            As `kvtrial.decision.stats.paired_log_ratios`; the message names the incumbent and the context.
        """
        rows = []
        for incumbent in incumbents:
            try:
                logs = paired_logs(
                    self.tokens_per_s(cell, challenger), self.tokens_per_s(cell, incumbent)
                )
                stats.check(logs, self._decision["min_blocks"])
            except stats.Unusable as problem:
                raise type(problem)(
                    f"against {incumbent} at {cell['context']}: {problem}"
                ) from problem
            rows.append(logs)
        return np.stack(rows)

    def arm(self, cell: dict[str, Any], name: str) -> dict[str, Any] | None:
        """One arm in one cell, described; intervals are over blocks."""
        blocks = self._steps.get((gates.cell_name(cell), name))
        if blocks is None:
            return None
        rates = np.array(list(self.tokens_per_s(cell, name).values()))
        row: dict[str, Any] = {
            **cell_key(cell),
            "candidate": name,
            "n_blocks": len(rates),
        }
        total = _rate(np.concatenate(list(blocks.values())), cell["sessions"])
        row["tokens_per_s"] = digits(total)
        row["tokens_per_s_ci95"] = self._over_blocks(rates, cell["blocks"])[1]
        for label, share in (("p50", 0.50), ("p95", 0.95)):
            quantiles = np.array([np.quantile(steps, share) for steps in blocks.values()])
            row[f"step_ms_{label}"], row[f"step_ms_{label}_ci95"] = self._over_blocks(
                quantiles, cell["blocks"]
            )
        return row

    def _over_blocks(
        self, values: npt.NDArray[np.float64], first: int
    ) -> tuple[float | None, list[float | None] | None]:
        """Geometric mean of positive numbers, one a block, and its t interval; ``first`` as in
        `stats.t_bounds`."""
        if not (np.isfinite(values).all() and (values > 0).all()):
            return None, None
        logs = np.log(values)
        center = digits(float(np.exp(logs.mean())))
        if len(logs) < self._decision["min_blocks"]:
            return center, None
        interval = stats.t_interval(logs, self._decision["confidence"], first=first)
        return center, [digits(interval.low), digits(interval.high)]


def _rate(steps: npt.NDArray[np.float64], sessions: int) -> float:
    try:
        return stats.tokens_per_s(steps, sessions)
    except stats.NonFinite:
        return math.nan


def paired_logs(top: dict[int, float], bottom: dict[int, float]) -> npt.NDArray[np.float64]:
    """log(top / bottom) by block; `InsufficientData` where an arm has no valid block."""
    if not top or not bottom:
        raise stats.InsufficientData("no valid blocks")
    return stats.paired_log_ratios(top, bottom)


def contrast(
    top: dict[int, float],
    bottom: dict[int, float],
    protocol: dict[str, Any],
    first: int | None = None,
) -> dict[str, Any]:
    """ratio top / bottom with its intervals, or the reason why there is none.

    ``ci95`` decides; ``first`` is how many blocks fixed the number of all, where that was open. The
    three bootstraps are for show; ``drift_p`` tests the paired difference for a slope over block
    order, ``lag1`` is its autocorrelation; they void nothing.
    """
    decision = protocol["decision"]
    try:
        logs = paired_logs(top, bottom)
        interval = stats.t_interval(logs, decision["confidence"], decision["min_blocks"], first)
    except stats.Unusable as problem:
        return _no_ratio(problem)
    bootstraps = stats.bootstrap_intervals(
        logs,
        confidence=decision["confidence"],
        resamples=decision["bootstrap_resamples"],
        seed=decision["bootstrap_seed"],
    )
    shown = {
        key: [digits(bootstraps[method].low), digits(bootstraps[method].high)]
        for key, method in (
            ("bootstrap95", "percentile"),
            ("bootstrap_bca95", "BCa"),
            ("bootstrap_t95", "studentised"),
        )
    }
    return {
        "ratio": digits(interval.ratio),
        "ci95": [digits(interval.low), digits(interval.high)],
        **shown,
        "drift_p": digits(stats.drift_p(logs, sorted(top))),
        "lag1": digits(stats.lag1(logs)),
        "n_blocks": interval.n,
    }


def unpaired_contrast(
    top: dict[int, float], bottom: dict[int, float], protocol: dict[str, Any]
) -> dict[str, Any]:
    """ratio top / bottom of two conditions that share no process, with Welch's interval."""
    decision = protocol["decision"]
    try:
        logs = [_logs(values) for values in (top, bottom)]
        interval = stats.welch_interval(
            logs[0], logs[1], decision["confidence"], decision["min_blocks"]
        )
    except stats.Unusable as problem:
        return _no_ratio(problem)
    return {
        "ratio": digits(interval.ratio),
        "ci95": [digits(interval.low), digits(interval.high)],
        "n_blocks": interval.n,
    }


def _logs(values: dict[int, float]) -> npt.NDArray[np.float64]:
    numbers = np.array(list(values.values()), np.float64)
    if not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise stats.NonFinite("a block has a value that is no positive number")
    return np.log(numbers)


def _no_ratio(problem: stats.Unusable) -> dict[str, Any]:
    return {"ratio": None, "ci95": None, "n_blocks": 0, "problem": str(problem)}
