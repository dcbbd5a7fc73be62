"""``kvtrial compare RUN RUN`` and ``kvtrial history``: the same arms in other runs.

A machine is not the same from one day to the next, so times of two runs say little about the code between them.
What is compared is each arm's ratio over the reference of its own run, where both met the same minutes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from kvtrial.contract.arguments import shown
from kvtrial.decision import facts, stats, validity
from kvtrial.decision.contrasts import Measured, cell_key, digits
from kvtrial.decision.document import Document
from kvtrial.decision.verdict import refuse_mixed
from kvtrial.host import printed
from kvtrial.measure.plan import cell_name
from kvtrial.registration import Cell, Protocol
from kvtrial.run import events, protocol
from kvtrial.run.layout import ConfigError
from kvtrial.show import answers


@dataclass(frozen=True)
class _Run:
    """What a run has measured, and what it is of."""

    facts: facts.Run
    protocol: Protocol
    measured: Measured

    @classmethod
    def of(cls, run_dir: Path) -> _Run:
        registered = protocol.load(run_dir / "protocol.json")
        rows = events.read_run(run_dir)
        refuse_mixed(rows, registered)
        own = facts.of_run(rows)
        chosen, _ = validity.first_complete_attempts(rows)
        judged = validity.judge(chosen, registered)
        measured = Measured(judged.valid_rows, registered, own.profile, own.usable_cpus)
        return cls(own, registered, measured)

    def logs(self, cell: Cell, name: str) -> np.ndarray | None:
        """log of an arm's tokens/s over the reference's, by block; None where there are too few."""
        try:
            return self.measured.logs(cell, name, self.protocol["decision"]["reference"])
        except stats.Unusable:
            return None


class OfRun(TypedDict):
    """What a run is of."""

    run_id: str
    machine: str
    model: str
    measured: Mapping[str, str]
    protocol: str


class Compared(TypedDict):
    """Two runs beside each other: `compare`."""

    first: OfRun
    second: OfRun
    reference: str
    rows: list[dict[str, Any]]
    not_comparable: list[str]


class Past(TypedDict):
    """A decided run: `history`."""

    measured: Mapping[str, str]
    run_id: str
    machine: str
    model: str
    run: str
    language: str
    arms: Mapping[str, answers.Row | None]


def compare(first: Path, second: Path) -> Compared:
    """How each arm stands in the second run against how it stood in the first.

    Parameters
    ----------
    first, second : Path
        Folders of runs.

    Returns
    -------
    dict
        JSON-safe: ``first`` and ``second`` (what the runs are of), ``reference``, ``rows`` and
        ``not_comparable``, a sentence each. A row's ``ratio`` is the second run's ratio over the reference by
        the first's, with Welch's interval over blocks.

    Raises
    ------
    ConfigError
        The runs are of two models, or have two references: nothing of them compares.
    ProtocolError, MixedProtocol
        A run is of another protocol version, or its events were made under another than its own.
    """
    runs = [_Run.of(path) for path in (first, second)]
    for what, values in {
        "model": [run.facts.model for run in runs],
        "reference": [run.protocol["decision"]["reference"] for run in runs],
    }.items():
        if values[0] != values[1]:
            raise ConfigError(
                f"not comparable: the {what} is {values[0]} in {first.name} and {values[1]} in {second.name}"
            )
    reference = runs[0].protocol["decision"]["reference"]
    rows: list[dict[str, Any]] = []
    unlike: list[str] = []
    confidence = runs[0].protocol["decision"]["confidence"]
    others = {cell_name(cell): cell for cell in runs[1].measured.cells}
    for cell in runs[0].measured.cells:
        where = (
            f"{cell['context']:,} positions, {printed.count(int(cell['sessions']), 'session')}, "
            f"{printed.count(int(cell['threads']), 'thread') if cell['threads'] != 'all' else 'all threads'}"
        )
        if (twin := others.get(cell_name(cell))) is None:
            unlike.append(f"{where}: a cell of {first.name} alone")
            continue
        for name in runs[0].protocol["candidates"]:
            if name == reference:
                continue
            logs = [run.logs(own, name) for run, own in zip(runs, (cell, twin))]
            if logs[0] is None or logs[1] is None:
                if any(one is not None for one in logs):
                    unlike.append(f"{name} at {where}: not measured in both")
                continue
            rows.append(
                {**cell_key(cell), "candidate": name, **_change(logs[0], logs[1], confidence)}
            )
    return {
        "first": _described(runs[0]),
        "second": _described(runs[1]),
        "reference": reference,
        "rows": rows,
        "not_comparable": unlike,
    }


def _change(before: np.ndarray, after: np.ndarray, confidence: float) -> dict[str, Any]:
    interval = stats.welch_interval(after, before, confidence)
    return {
        "before": digits(stats.ratio_of(float(before.mean()))),
        "after": digits(stats.ratio_of(float(after.mean()))),
        "ratio": digits(interval.ratio),
        "ci95": [digits(interval.low), digits(interval.high)],
        "n_blocks": [len(before), len(after)],
    }


def _described(run: _Run) -> OfRun:
    return {
        "run_id": run.facts.run_id,
        "machine": run.facts.machine,
        "model": run.facts.model,
        "measured": run.facts.measured,
        "protocol": run.protocol["name"],
    }


def compared(document: Compared) -> list[dict[str, str]]:
    """The rows of `compare` as text, by column."""
    over = f"over {document['reference']}"
    return [
        {
            "arm": row["candidate"],
            "context": f"{row['context']:,}",
            "sessions": str(row["sessions"]),
            "threads": str(row["threads"]),
            f"{over}, before": f"{row['before']:.3f}",
            f"{over}, after": f"{row['after']:.3f}",
            "after / before": answers.interval(row, 3),
            "reading": _reading(row["ci95"]),
        }
        for row in document["rows"]
    ]


def _reading(bounds: Sequence[float | None]) -> str:
    low, high = bounds
    if low is not None and low > 1:
        return "faster"
    if high is not None and high < 1:
        return "slower"
    return "no difference shown"


def notes(document: Compared) -> list[str]:
    """What stands above and below the rows: the two runs, and what of them does not compare."""
    said = [
        f"{which}: {run['run_id']}, {run['machine']}, {answers.measured(run) or 'it does not say when'}"
        for which, run in (("before", document["first"]), ("after", document["second"]))
    ]
    if document["first"]["machine"] != document["second"]["machine"]:
        said.append("Two machines: a difference may be theirs as well as the code's.")
    return said + [f"not comparable: {text}" for text in document["not_comparable"]]


def history(verdicts: Iterable[Document], names: Sequence[str] = ()) -> list[Past]:
    """Every decided run, oldest first: what it answers, and how arms stood over its FP32 arm.

    Parameters
    ----------
    verdicts : dicts
        What verdict.json holds, of each.
    names : sequence of str
        Arms to follow; by default what each run says to run.

    Returns
    -------
    list of dict
        JSON-safe: ``measured``, ``run_id``, ``machine``, ``model``, ``run``, ``language``, and ``arms``: name →
        ratio in the primary cell with its interval, or None.

    Raises
    ------
    ConfigError
        No run has measured an arm of ``names``.
    """
    found: list[Past] = []
    measured: set[str] = set()
    for verdict in verdicts:
        primary = answers.primary_context(verdict)
        measured |= {arm["candidate"] for arm in verdict["arms"]}
        followed = names or [name for name in (verdict["run"]["store"],) if name]
        found.append(
            {
                "measured": verdict["measured"],
                "run_id": verdict["run_id"],
                "machine": verdict["machine"],
                "model": verdict["model"],
                "run": answers.store(verdict),
                "language": answers.outcome(verdict),
                "arms": {name: answers.over_fp32(verdict, name, primary) for name in followed},
            }
        )
    for name in names:
        if name not in measured:
            raise ConfigError(
                f"no run has the arm {shown(name)}; measured: {', '.join(sorted(measured))}"
            )
    return sorted(found, key=lambda row: (row["measured"]["begun"], row["run_id"]))


def told(rows: list[Past]) -> list[dict[str, str]]:
    """The rows of `history` as text, by column."""
    return [
        {
            "begun": row["measured"]["begun"][:16].replace("T", " ") or "-",
            "commit": row["measured"]["commit"][:8] or "-",
            "model": row["model"],
            "machine": row["machine"],
            "run": row["run"],
            "over the FP32 arm": ", ".join(
                f"{name} {answers.interval(ratio)}" for name, ratio in row["arms"].items() if ratio
            )
            or "-",
            "language": row["language"],
        }
        for row in rows
    ]
