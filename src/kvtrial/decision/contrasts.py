"""What was measured, by block, and how two arms compare: the numbers a verdict is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvtrial.decision import facts, stats
from kvtrial.measure import figures
from kvtrial.measure.plan import SamplingPlan, Seen, cell_name
from kvtrial.registration import Cell, Protocol
from kvtrial.run.protocol import cells as cells_of

Logs = npt.NDArray[np.float64]


def digits(value: float | None) -> float | None:
    """To 12 significant digits; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.12g}")


def cell_key(cell: Cell) -> dict[str, int | str]:
    """The columns that name a cell in a row of the verdict."""
    return {k: cell[k] for k in ("context", "sessions", "threads", "role")}


@dataclass(frozen=True)
class Course:
    """How a contrast's blocks went: for people, and nothing is voided by it.

    Attributes
    ----------
    median_ratio : float or None
        That of the rounds' own ratios.
    tail : str or None
        Where the median ratio lies outside of the interval: the arm whose slow steps move the total.
    drift_p : float or None
        Of a test of the paired difference for a slope over block order.
    lag1 : float or None
        Its autocorrelation.
    """

    median_ratio: float | None
    tail: str | None
    drift_p: float | None
    lag1: float | None


class ContrastRow(TypedDict):
    """What a row of verdict.json holds of a `Contrast`, and of its `Course`."""

    ratio: float | None
    ci95: list[Any] | None  #: bounds, None past the largest float
    n_blocks: int
    problem: NotRequired[str]
    median_ratio: NotRequired[float | None]
    tail: NotRequired[str | None]
    drift_p: NotRequired[float | None]
    lag1: NotRequired[float | None]


@dataclass(frozen=True)
class Contrast:
    """A ratio of two figures with its interval over blocks, or the reason why there is none.

    Attributes
    ----------
    ratio : float or None
    ci95 : (low, high) or None
        Of the plan's confidence, or of the one that was asked for; a bound past the largest float is None.
    n_blocks : int
    problem : str or None
        Why there is no ratio.
    course : Course or None
        Where it was asked for.
    """

    ratio: float | None
    ci95: tuple[float | None, float | None] | None
    n_blocks: int
    problem: str | None = None
    course: Course | None = None

    @classmethod
    def none(cls, problem: stats.Unusable) -> Contrast:
        """One without numbers, with the reason."""
        return cls(None, None, 0, str(problem))

    def said(self) -> tuple[float, float, float]:
        """Ratio and interval as numbers for a sentence; infinite where a bound is past the largest float."""
        low, high = self.ci95 or (None, None)
        return tuple(math.inf if x is None else x for x in (self.ratio, low, high))  # type: ignore[return-value]

    def as_json(self) -> ContrastRow:
        """What a row of verdict.json holds of it."""
        row: ContrastRow = {
            "ratio": self.ratio,
            "ci95": None if self.ci95 is None else list(self.ci95),
            "n_blocks": self.n_blocks,
        }
        if self.problem is not None:
            row["problem"] = self.problem
        return row if self.course is None else cast(ContrastRow, {**row, **asdict(self.course)})


class Layouts:
    """How each arm lays out its rows, from the rows of stage ``run``."""

    def __init__(self, events: pd.DataFrame) -> None:
        self._of = facts.by_candidate(events, "candidate/layout")

    def differ(self, one: str, other: str) -> bool:
        """Whether a contrast of the two arms is one of layouts too, whatever else it is of."""
        return self._of.get(one) != self._of.get(other)


class Measured:
    """Steps and latencies by (cell, candidate, block), from rows of valid blocks.

    Attributes
    ----------
    cells : list of dict
        The profile's cells, as registered. Threads "all" are ``usable_cpus``, and no cell of their own
        where that is one.
    shapes : list of str
        Head shapes whose attention was measured alone, such as ``9q3kv``.
    """

    def __init__(
        self, rows: pd.DataFrame, protocol: Protocol, profile: str, usable_cpus: int
    ) -> None:
        self.cells = [
            cell
            for cell in cells_of(protocol, profile)
            if cell["threads"] != "all" or usable_cpus > 1
        ]
        self._protocol = protocol
        self._usable_cpus = usable_cpus
        decision = protocol["decision"]
        self._anchors = [decision["reference"], *decision["challengers"]]
        m2 = rows[rows["stage"] == "m2"]
        self._blocks = {
            cell_name(cell): figures.blocks(self._of(m2, cell), self._anchors)
            for cell in self.cells
        }
        self._medians = _by_arm(m2[m2["metric"].isin(_DESCRIBED)]).median().to_dict()
        self._attention_total = _by_arm(m2[m2["metric"] == "m2/attention_ms"]).sum().to_dict()
        attention = rows[rows["metric"] == "m1/attention_ms"]
        self.shapes = sorted(set(attention["shape"]))
        self._attention = attention

    def _threads(self, cell: Cell) -> int:
        return self._usable_cpus if cell["threads"] == "all" else int(cell["threads"])

    def _of(self, rows: pd.DataFrame, cell: Cell) -> pd.DataFrame:
        same = (rows["context"] == cell["context"]) & (rows["sessions"] == cell["sessions"])
        return rows[same & (rows["threads"] == self._threads(cell))]

    def plan(self, cell: Cell) -> SamplingPlan:
        """The cell's sampling plan."""
        return SamplingPlan.of_cell(self._protocol, cell)

    def blocks(self, cell: Cell) -> dict[int, figures.Block]:
        """The cell's valid blocks, ascending."""
        return self._blocks.get(cell_name(cell), {})

    def has(self, cell: Cell, name: str) -> bool:
        """Whether an arm was measured in a cell."""
        return any(name in block.arms for block in self.blocks(cell).values())

    def logs(self, cell: Cell, top: str, bottom: str) -> Logs:
        """log(top / bottom) of tokens/s by block (n,), in block order.

        Raises
        ------
        InsufficientData
            Fewer valid blocks than the plan's first ones have both arms.
        PairingError
            A valid block lacks one of the arms: what is left is no sample that was planned.
        NonFinite
            A time that is no positive number; the message names the arms and the context.
        """
        where = f"{top} against {bottom} at {cell['context']}"
        own = {number: b.log_speed(top, bottom) for number, b in self.blocks(cell).items()}
        lacking = [number for number, log in own.items() if log is None]
        try:
            logs = stats.check(
                [log for log in own.values() if log is not None], self.plan(cell).first
            )
            if lacking:
                raise stats.PairingError(
                    f"blocks {lacking} lack one of them; nothing is cut to fit"
                )
        except stats.Unusable as problem:
            raise type(problem)(f"{where}: {problem}") from problem
        return logs

    def pair_logs(self, cell: Cell) -> dict[tuple[str, str], Logs]:
        """Those of the plan's pairs that the cell's number of blocks rests on."""
        return figures.pair_logs(list(self.blocks(cell).values()), self.plan(cell).pairs)

    def short(self, cell: Cell) -> str | None:
        """Why the cell's blocks are not those that its plan asks for, or None."""
        valid, logs = self.blocks(cell).keys(), list(self.pair_logs(cell).values())
        if self.plan(cell).next(Seen(valid, 0, logs)) is None:
            return None
        return f"{len(valid)} valid blocks; {self.plan(cell).planned(logs)} are registered"

    def tokens_per_s(self, cell: Cell, name: str) -> dict[int, float]:
        """Block → tokens/s, total over total; NaN where a step time means nothing."""
        return {
            number: _rate(block.all_steps(name), cell["sessions"])
            for number, block in self.blocks(cell).items()
            if name in block.arms
        }

    def attention_ms(self, cell: Cell, name: str, shape: str) -> dict[int, float]:
        """Block → median milliseconds of one attention region of that head shape."""
        own = self._of(self._attention, cell)
        own = own[(own["candidate"] == name) & (own["shape"] == shape)]
        return {int(b): float(v.median()) for b, v in own.groupby("block")["value"]}

    def contrast(self, cell: Cell, top: str, bottom: str) -> Contrast:
        """ratio top / bottom of tokens/s with its interval and its course, or the reason why there is none."""
        try:
            logs = self.logs(cell, top, bottom)
        except stats.Unusable as problem:
            return Contrast.none(problem)
        found = interval_of(logs, self.plan(cell))
        medians = [b.median_log_speed(top, bottom) for b in self.blocks(cell).values()]
        median = float(np.mean([m for m in medians if m is not None]))
        _, low, high = (float(x) for x in self.plan(cell).bounds(logs))
        slack = self._protocol["decision"]["relative_slack"]
        tail = top if median > high + slack else bottom if median < low - slack else None
        course = Course(
            median_ratio=digits(stats.ratio_of(median)),
            tail=tail,
            drift_p=digits(stats.drift_p(logs, range(len(logs)))),
            lag1=digits(stats.lag1(logs)),
        )
        return replace(found, course=course)

    def unpaired(self, top: tuple[Cell, str], bottom: tuple[Cell, str]) -> Contrast:
        """ratio top / bottom of tokens/s in two cells, whose processes differ, with Welch's interval."""
        confidence = self._protocol["decision"]["confidence"]
        return unpaired(self.tokens_per_s(*top), self.tokens_per_s(*bottom), confidence)

    def arm(self, cell: Cell, name: str) -> dict[str, Any] | None:
        """One arm in one cell, described; intervals are over blocks."""
        blocks = {n: b.all_steps(name) for n, b in self.blocks(cell).items() if name in b.arms}
        if not blocks:
            return None
        rates = list(self.tokens_per_s(cell, name).values())
        steps = [step for own in blocks.values() for step in own]
        row: dict[str, Any] = {
            **cell_key(cell),
            "candidate": name,
            "n_blocks": len(blocks),
            "tokens_per_s": digits(_rate(steps, cell["sessions"])),
            "tokens_per_s_ci95": self._over_blocks(rates, cell)[1],
        }
        for label, share in (("p50", 0.50), ("p95", 0.95)):
            quantiles = [
                float(np.quantile(own, share)) if np.isfinite(own).all() else math.nan
                for own in blocks.values()
            ]
            row[f"step_ms_{label}"], row[f"step_ms_{label}_ci95"] = self._over_blocks(
                quantiles, cell
            )
        at = (cell["context"], cell["sessions"], self._threads(cell), name)
        for metric, key in _DESCRIBED.items():
            row[key] = digits(self._medians.get((*at, metric)))
        spent, total = self._attention_total.get((*at, "m2/attention_ms"), 0.0), math.fsum(steps)
        row["attention_share"] = digits(spent / total) if total > 0 else None
        return row

    def _over_blocks(
        self, values: list[float], cell: Cell
    ) -> tuple[float | None, list[float | None] | None]:
        """Geometric mean of positive numbers, one a block, and its interval."""
        numbers = np.array(values)
        if not (np.isfinite(numbers).all() and (numbers > 0).all()):
            return None, None
        logs = np.log(numbers)
        center = digits(math.exp(float(logs.mean())))
        if len(logs) < 2:
            return center, None
        low, high = interval_of(logs, self.plan(cell)).ci95 or (None, None)
        return center, [low, high]


#: Metric → key of an arm's row: medians over everything.
_DESCRIBED = {
    "m2/row_bytes": "row_bytes",
    "m2/kv_bytes_per_token": "kv_bytes_per_token",
    "m2/resident_bytes": "resident_bytes",
    "m2/append_us": "append_us",
    "m2/rollback_us": "rollback_us",
    "m2/branch_us": "branch_us",
    "m2/alone_step_ms": "alone_step_ms",
    "m2/logits_kld": "logits_kld",
    "m2/logits_top1": "logits_top1",
    "m2/logits_shift": "logits_shift",
}


def _by_arm(rows: pd.DataFrame) -> Any:
    """Values by (context, sessions, threads, arm, metric)."""
    return rows.groupby(["context", "sessions", "threads", "candidate", "metric"])["value"]


def _rate(steps: list[float], sessions: int) -> float:
    try:
        return stats.tokens_per_s(steps, sessions)
    except stats.Unusable:
        return math.nan


def interval_of(logs: Logs, plan: SamplingPlan, confidence: float | None = None) -> Contrast:
    """The ratio of log ratios (n,), one a block, with its interval of the plan's confidence, or of another."""
    mean, low, high = (digits(stats.ratio_of(float(x))) for x in plan.bounds(logs, confidence))
    return Contrast(mean, (low, high), int(logs.size))


def contrast(top: dict[int, float], bottom: dict[int, float], plan: SamplingPlan) -> Contrast:
    """ratio top / bottom of two figures by block with its interval, or the reason why there is none."""
    try:
        logs: Sequence[float] | Logs = []
        if top and bottom:
            logs = stats.paired_log_ratios(top, bottom)
    except stats.Unusable as problem:
        return Contrast.none(problem)
    return contrast_of(logs, plan)


def contrast_of(logs: Sequence[float] | Logs, plan: SamplingPlan) -> Contrast:
    """The ratio of log ratios (n,), one a block, with its interval, or the reason why there is none."""
    try:
        if len(logs) == 0:
            raise stats.InsufficientData("no valid blocks")
        return interval_of(stats.check(logs), plan)
    except stats.Unusable as problem:
        return Contrast.none(problem)


def unpaired(top: dict[int, float], bottom: dict[int, float], confidence: float) -> Contrast:
    """ratio top / bottom of two conditions that share no process, with Welch's interval."""
    try:
        interval = stats.welch_interval(_logs(top), _logs(bottom), confidence)
    except stats.Unusable as problem:
        return Contrast.none(problem)
    return Contrast(
        digits(interval.ratio), (digits(interval.low), digits(interval.high)), interval.n
    )


def _logs(values: dict[int, float]) -> Logs:
    numbers = np.array(list(values.values()), np.float64)
    if not (np.isfinite(numbers).all() and (numbers > 0).all()):
        raise stats.NonFinite("a block has a value that is no positive number")
    return np.log(numbers)
