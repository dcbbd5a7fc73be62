"""What a run that has not finished says so far: the fixed rule on what is there, and what is missing.

Nothing is written. The rows are those of the tables that stages have left, and of the journals of stages that
are at work. The rule is asked with as many blocks as there are in place of those registered, so that it answers;
what comes out is no verdict, and says so wherever it is shown.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvtrial.decision import rule, validity
from kvtrial.decision.document import Document
from kvtrial.decision.verdict import NEEDED, Verdict, decide
from kvtrial.host import paths
from kvtrial.measure import figures
from kvtrial.measure.plan import SamplingPlan, cell_name
from kvtrial.registration import Cell, Protocol
from kvtrial.run import events, protocol
from kvtrial.run.journal import Journal
from kvtrial.run.layout import ConfigError

#: Blocks of which an interval can be made.
_FEWEST = 2
#: Columns that name a cell of whole decodes.
_CELL = ["context", "sessions", "threads"]


class NothingYet(ConfigError):
    """A run has too little to decide on; the message says what is there and what is missing."""


@dataclass(frozen=True)
class SoFar:
    """``verdict``: what the rule says to what is there. ``missing``: what a verdict still needs, in words."""

    verdict: Verdict
    missing: list[str]


def rows_so_far(run_dir: Path) -> pd.DataFrame:
    """Rows of every stage: of its table, else of its journal, which holds the finished blocks.

    A stage that was forced again has both; the table is then of attempts that are whole, and the journal has
    those and the one that goes on.
    """
    found = {path.stem: events.read(path) for path in (run_dir / "events").glob("*.parquet")}
    for folder in (run_dir / "journal").glob("*"):
        if rows := Journal(run_dir, folder.name).all_rows():
            found[folder.name] = events.to_frame(rows)
    tables = [found[stage] for stage in sorted(found)]
    return pd.concat(tables, ignore_index=True) if tables else events.to_frame([])


def decide_so_far(run_dir: Path) -> SoFar:
    """Decide on what a run has so far.

    Raises
    ------
    NothingYet
        The primary cell has too few blocks that count.
    kvtrial.decision.verdict.MixedProtocol
        Rows carry another protocol's hash.
    kvtrial.run.protocol.ProtocolError
        The run is of another protocol version.
    """
    registered = protocol.load(run_dir / "protocol.json")
    rows = rows_so_far(run_dir)
    missing = []
    for stage in NEEDED:
        own = rows[rows["stage"] == stage]
        if not (own["metric"] == "attempt/complete").any():
            missing.append(f"stage {stage} is not finished")
    decodes = _valid(rows, registered, "m2")
    counts = {
        cell_name(cell): len(figures.steps(_of(decodes, cell)))
        for cell in rule.judged_cells(registered)
    }
    for cell in rule.judged_cells(registered):
        needed, have = SamplingPlan.of_cell(registered, cell).first, counts[cell_name(cell)]
        if have < needed:
            missing.append(f"{have} of {needed} blocks at {cell['context']:,} positions")
    if next(iter(counts.values())) < _FEWEST:
        raise NothingYet(
            f"{run_dir.name} has no verdict yet, and too little to decide on: {'; '.join(missing)}. "
            f"{_FEWEST} blocks of the primary cell are needed: ask again later, or go on with `{paths.how_to()}`"
        )
    if (rows["protocol_sha256"] != protocol.sha256(registered)).any():
        decide(rows, registered)  # says what is mixed
    known = len(figures.steps(_valid(rows, registered, "aa")))
    relaxed = _relaxed(registered, counts, known)
    table = _as_if_complete(rows).assign(protocol_sha256=protocol.sha256(relaxed))
    data: Document = decide(table, relaxed).data
    roles = {cell_name(cell): cell["role"] for cell in registered["cells"]}
    for row in [*data["arms"], *data["contrasts"], *data["hypotheses"]]:
        row["role"] = roles[cell_name({key: row[key] for key in _CELL})]
    data["protocol_sha256"] = protocol.sha256(registered)
    return SoFar(Verdict(data), missing or [f"the verdict itself: give `{paths.how_to()}` again"])


def _valid(rows: pd.DataFrame, registered: Protocol, stage: str) -> pd.DataFrame:
    """Rows of a stage's blocks that count so far."""
    own = rows[rows["stage"] == stage]
    if own.empty:
        return own
    chosen, _ = validity.first_complete_attempts(own)
    return validity.judge(chosen, registered).valid_rows


def _of(rows: pd.DataFrame, cell: Cell) -> pd.DataFrame:
    """Those of a cell of one number of threads."""
    own = dict(cell)
    return rows[(rows[_CELL] == [own[key] for key in _CELL]).all(axis=1)]


def _relaxed(registered: Protocol, counts: dict[str, int], known: int) -> Protocol:
    """The protocol with as many blocks as there are.

    A veto cell that lacks blocks has no say yet: it is shown as one that decides nothing. Until the primary
    cell has its registered blocks, those that are there count as all.
    """
    relaxed = copy.deepcopy(registered)
    primary, *_ = counts.values()
    blocks = min(registered["sampling"]["blocks"], primary)
    relaxed["sampling"]["blocks"] = blocks
    relaxed["known_answers"]["blocks"] = max(_FEWEST, known)
    for cell in relaxed["cells"]:
        if cell["role"] == "veto" and counts[cell_name(cell)] < blocks:
            cell["role"] = "extra"
    return protocol.check(relaxed)


def _as_if_complete(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows, each needed stage's last attempt counted as complete where none is."""
    common = {key: rows[key].iloc[0] for key in ("protocol_sha256", "build_id")}
    added = []
    for stage in NEEDED:
        own = rows[rows["stage"] == stage]
        if not (own["metric"] == "attempt/complete").any():
            attempt = int(own["attempt"].max()) if len(own) else 1
            added.append(
                events.event("attempt/complete", stage=stage, attempt=attempt, value=1.0, **common)
            )
    return pd.concat([rows, events.to_frame(added)], ignore_index=True) if added else rows
