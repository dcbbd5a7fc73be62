"""What the measuring stages share: the run they belong to, who is timed, attempts, blocks."""

from __future__ import annotations

import argparse
import functools
import json
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtrial import candidates, tracking
from kvtrial.decision import gates
from kvtrial.host import build, machine
from kvtrial.measure import child
from kvtrial.measure.exclusive import exclusive
from kvtrial.measure.order import mirrored_orders
from kvtrial.run import events, exits, models, protocol
from kvtrial.run.journal import COMPLETE, Attempt, Journal
from kvtrial.run.layout import pipeline_start
from kvtrial.stages.progress import Progress

Row = dict[str, Any]
#: context, sessions and threads as numbers; for m1 also the head shape's name.
Cell = dict[str, Any]
#: Columns of an event that name a cell.
CELL_COLUMNS = ("context", "sessions", "threads", "shape")
#: Share of blocks that are void on an ordinary shared machine, until the stage has seen its own.
VOID_PRIOR = 0.1
_VOID_PRIOR_BLOCKS = 10


class StageError(RuntimeError):
    """A stage can't go on; the message says what to do."""


class DoneElsewhere(Exception):
    """Another pipeline has finished the stage since this one began; nothing is left to do."""


class Terminated(KeyboardInterrupt):
    """Somebody asked this process to end (SIGTERM): a batch system, or `timeout`."""


def _terminate(*_: object) -> None:
    raise Terminated


def exit_tracked(name: str, main: Callable[[], int]) -> None:
    """Run a stage's command line with its MLflow run around it, and exit; see `exits.exit_with`.

    MLflow is called before and after, never while something is measured, and being away costs a
    warning. A stage that is interrupted or asked to end is KILLED there, one that fails FAILED.
    """
    signal.signal(signal.SIGTERM, _terminate)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--run-dir", type=Path)
    run_dir = parser.parse_known_args()[0].run_dir

    def tracked() -> int:
        if run_dir is None:  # --help, or wrong usage
            return main()
        tracking.begin_stage(run_dir, name)
        try:
            code = main()
        except DoneElsewhere as done:
            tracking.leave_stage(run_dir, name, str(done))
            print(f"{name}: {done}", file=sys.stderr)
            return 0
        except KeyboardInterrupt as error:
            tracking.stop_stage(run_dir, name, "KILLED", type(error).__name__)
            raise
        except BaseException as error:
            tracking.stop_stage(run_dir, name, "FAILED", f"{type(error).__name__}: {error}")
            raise
        tracking.finish_stage(run_dir, name)
        # Last: a stage that is stopped while MLflow is written to has nothing to measure again.
        Journal(run_dir, name).publish()
        return code

    exits.exit_with(tracked)


def refuse_another_model(run_dir: Path, manifest: dict[str, Any], gguf: Path) -> None:
    """`StageError` where a run was begun with another file of the model's name."""
    known, found = manifest["model"]["sha256"], models.sha256(gguf)
    if known != found:
        raise StageError(
            f"{gguf} has sha256 {found[:12]}…, and {run_dir} is a run of {known[:12]}…: put "
            "that file back, or move the run's folder away and begin again"
        )


@dataclass(frozen=True)
class Stage:
    """A stage of a run and the columns that all its rows share.

    Attributes
    ----------
    name : str
        ``m1``, ``m2``, …: the column ``stage`` and the name of the table.
    run_dir : Path
        ``results/<run_id>``.
    gguf : Path
        The model's file.
    model : dict
        What the manifest says of it: name, sha256, bytes, synthetic.
    profile : str
        ``default`` or ``full``.
    usable_cpus : int
        CPUs that could be used when the run was begun: what threads "all" are.
    protocol : dict
        The registered protocol as it is run.
    """

    name: str
    run_dir: Path
    gguf: Path
    model: dict[str, Any]
    profile: str
    usable_cpus: int
    protocol: dict[str, Any]

    @classmethod
    def from_command_line(cls, name: str, doc: str | None, argv: list[str] | None) -> Stage:
        """Parse ``--run-dir DIR --gguf FILE [--profile default|full]``."""
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--run-dir", type=Path, required=True, help="results/<run_id>")
        parser.add_argument("--gguf", type=Path, required=True, help="the model's file")
        parser.add_argument("--profile", help="default or full; the manifest's by default")
        args = parser.parse_args(argv)
        build.refuse_stale()
        build.fingerprint()  # taken now, for the whole stage
        manifest = json.loads((args.run_dir / "manifest.json").read_text(encoding="utf-8"))
        of_run, here = manifest["build"]["build_id"], build.facts()["build_id"]
        if of_run != here:
            raise StageError(
                f"{args.run_dir} is a run of build {of_run}, and the kernels are {here}; binaries "
                "are never mixed: run `snakemake --cores 1 verdict`, which names a run for them"
            )
        refuse_another_model(args.run_dir, manifest, args.gguf)
        return cls(
            name=name,
            run_dir=args.run_dir,
            gguf=args.gguf,
            model=manifest["model"],
            profile=args.profile or manifest["profile"],
            usable_cpus=manifest["usable_cpus"],
            protocol=protocol.load(args.run_dir / "protocol.json"),
        )

    def event(self, metric: str, **columns: Any) -> Row:
        """A row of this stage."""
        return events.event(metric, **self._common, **columns)

    @functools.cached_property
    def _common(self) -> dict[str, str]:
        return {
            "stage": self.name,
            "protocol_sha256": protocol.sha256(self.protocol),
            "build_id": build.facts()["build_id"],
            "binary_sha256": build.binary_sha256(),
        }

    def events(self, rows: Iterable[Row], **columns: Any) -> list[Row]:
        """Rows of a measured process, completed; a row's own column wins over ``columns``."""
        return [self.event(**{**columns, **row}) for row in rows]

    def cells(self) -> list[Cell]:
        """The profile's cells with ``threads`` as a number; what "all" makes equal is there
        once.

        Raises
        ------
        StageError
            Threads "all" are asked for, and another number of CPUs is usable than at the run's start.
        """
        found: dict[str, Cell] = {}
        for cell in protocol.cells(self.protocol, self.profile):
            if cell["threads"] == "all":
                if (usable := machine.usable_cpus()) != self.usable_cpus:
                    raise StageError(
                        f"{self.run_dir} was begun with {self.usable_cpus} usable CPUs, and {usable} "
                        "are usable now: run it with as many (taskset, the container's limit), or "
                        "move the run's folder away and begin again"
                    )
                cell = {**cell, "threads": self.usable_cpus}
            found.setdefault(gates.cell_name(cell), cell)
        return list(found.values())

    def measured_cells(self, attempt: Attempt) -> list[Cell]:
        """The cells that the machine can hold; each of the others gets a ``cell/skipped`` row."""
        skipped = self.workload["skipped"]
        left_out = [cell for cell in self.cells() if gates.cell_name(cell) in skipped]
        if left_out and not attempt.has("skipped"):
            rows = [
                self.event("cell/skipped", text=skipped[gates.cell_name(cell)], **columns(cell))
                for cell in left_out
            ]
            attempt.put("skipped", rows)
        return [cell for cell in self.cells() if cell not in left_out]

    @functools.cached_property
    def workload(self) -> dict[str, Any]:
        """``workload.json``: ``shape`` of the model's stores, ``snapshots``, and ``skipped`` cells."""
        path = self.run_dir / "workload.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def estimated(self, attempt: Attempt, planned: list[Block], *, gated: bool) -> dict[str, float]:
        """Block → seconds that it is going to take, void trials too, for those that are left.

        The sum is kept in the attempt's events, beside what it will have taken.
        """
        path = self.run_dir / "estimate.json"
        seconds = json.loads(path.read_text(encoding="utf-8"))["blocks"][self.name]
        found = {
            # 0 where memory has become free since: the cell was to be left out then.
            block.name: seconds.get(gates.cell_name(block.cell), 0.0)
            / (1 - VOID_PRIOR if gated else 1)
            for block in planned
            if not attempt.has(f"{block.name}-trial0")
        }
        if not attempt.has("estimated"):
            total = sum(found.values())
            attempt.put("estimated", [self.event("attempt/estimated_s", value=total)])
        return found

    def snapshots(self, context: int, sessions: int) -> list[str]:
        """Folders of the filled contexts, one a session, as the stage ``workload`` left them."""
        folders = self.workload["snapshots"].get(str(context), [])
        if len(folders) < sessions:
            raise StageError(
                f"{self.run_dir / 'workload.json'} has {len(folders)} snapshots of context "
                f"{context}; {sessions} are needed: run `snakemake --cores 1 --forcerun workload`"
            )
        return [str(self.run_dir.parent / folder) for folder in folders[:sessions]]

    def runnable(
        self, attempt: Attempt, *, timed: bool, names: list[str] | None = None
    ) -> list[str]:
        """Candidates to run, of ``names`` or all of the protocol; for each of the others a
        ``not_run`` row goes into the journal.

        ``timed``: only what has passed the conformance suite is timed.
        """
        asked = self.protocol["candidates"] if names is None else names
        reasons = {name: self._why_not(name, timed) for name in asked}
        if not attempt.has("not-run"):
            attempt.put(
                "not-run",
                [self.event("not_run", candidate=n, text=r) for n, r in reasons.items() if r],
            )
        fit = [name for name, reason in reasons.items() if reason is None]
        if not fit:
            said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise StageError(f"no candidate to run ({said})")
        return fit

    def _why_not(self, name: str, timed: bool) -> str | None:
        not_built = candidates.get(name).not_built
        if not_built is not None:
            return f"not built: {not_built}"
        if not timed:
            return None
        path = self.run_dir / "conformance" / f"{name}.json"
        if not path.is_file():
            return "conformance was not run"
        result = json.loads(path.read_text(encoding="utf-8"))
        if not result["passed"]:
            failed = ", ".join(result["failed"]) or result.get("crash") or "it did not finish"
            return f"conformance failed: {failed}"
        return None

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """The attempt to work on, with the machine held; its table is written when the body is
        done, and `exit_tracked` publishes it.

        If the body raises, or the process is killed, finished units stay and the next run goes on.

        Raises
        ------
        DoneElsewhere
            Another pipeline on this run has finished an attempt since this one began.
        """
        journal = Journal(self.run_dir, self.name)
        with exclusive(f"{self.name} of {self.run_dir.name}"):
            if journal.completed_since(pipeline_start()):
                # Snakemake has removed the other's table to make room for ours.
                self._write_table(journal)
                raise DoneElsewhere(f"another process has finished {self.name} of {self.run_dir}")
            start = time.monotonic()
            attempt = journal.attempt()
            yield attempt
            if not attempt.has(COMPLETE):
                seconds = {"attempt/taken_s": time.monotonic() - start, "attempt/complete": 1.0}
                attempt.put(COMPLETE, [self.event(m, value=v) for m, v in seconds.items()])
            self._write_table(journal)

    def _write_table(self, journal: Journal) -> None:
        table = events.to_frame(journal.all_rows())
        events.write(table, self.run_dir / "events" / f"{self.name}.parquet")


@dataclass(frozen=True)
class Block:
    """One replicate of a cell: who runs in which order, in a process of its own."""

    cell: Cell
    number: int
    order: list[str]

    @property
    def name(self) -> str:
        """Such as ``4096x1x1-block03``; its trials add ``-trial0``, ``-trial1``, …"""
        return f"{gates.cell_name(self.cell)}-block{self.number:02d}"


def blocks(cell: Cell, count: int, names: list[str], seed: int) -> list[Block]:
    """The blocks of a cell, with mirrored orders; in each cell an arm has other neighbours."""
    own_seed = seed + zlib.crc32(gates.cell_name(cell).encode())
    return [
        Block(cell, number, order)
        for number, order in enumerate(mirrored_orders(names, count, own_seed))
    ]


def columns(cell: Cell) -> dict[str, Any]:
    """The columns of a cell's events."""
    return {key: cell[key] for key in CELL_COLUMNS if key in cell}


def run_blocks(
    stage: Stage,
    attempt: Attempt,
    module: str,
    planned: list[Block],
    spec_of: Callable[[Block], dict[str, Any]],
    progress: Progress,
    *,
    gated: bool,
) -> None:
    """Run every block that the journal does not have yet.

    ``gated``: a block that the gates call void is run again, as another trial, up to the protocol's
    cap; how the arms compare has no say in it. How long a block took is what the others of its cell
    are expected to take, with the share of void ones so far.
    """
    limits = stage.protocol["gates"]
    valid = voids = 0
    for place, block in enumerate(planned):
        void: str | None = None
        for trial in range(limits["max_trials"] if gated else 1):
            unit = f"{block.name}-trial{trial}"
            if not attempt.has(unit):
                start = time.monotonic()
                spec = spec_of(block)
                rows = run_arms(stage, attempt, module, block.order, spec, columns(block.cell))
                seconds = time.monotonic() - start
                rows.append({"metric": "block/taken_s", "value": seconds})
                cell = {"block": block.number, "trial": trial, **columns(block.cell)}
                attempt.put(unit, stage.events(rows, **cell))
                rate = (voids + VOID_PRIOR * _VOID_PRIOR_BLOCKS) / (
                    valid + voids + _VOID_PRIOR_BLOCKS
                )
                each = seconds / (1 - rate if gated else 1)
                left = [b.name for b in planned[place:] if b.cell == block.cell]
                if progress.in_seconds:
                    progress.expect(dict.fromkeys(left, each))
            if gated:
                void = gates.void_reason(events.to_frame(attempt.unit(unit)), limits)
            if void is None:
                valid += 1
                break
            voids += 1
            progress.say(f"{unit} is void: {void}")
        progress.done(block.name, "void, no trial left" if void else "")


def run_arms(
    stage: Stage,
    attempt: Attempt,
    module: str,
    order: list[str],
    spec: dict[str, Any],
    columns: dict[str, Any],
    preload: dict[str, str] | None = None,
) -> list[Row]:
    """Rows of one measured process.

    A candidate that takes the process down gets a ``failed`` row and is left out of the rest of the
    attempt; the process is run again without it.
    """

    def left_out(name: str, what: str) -> None:
        print(f"{stage.name}: {name} is out: {what}", file=sys.stderr, flush=True)
        row = stage.event("failed", candidate=name, text=what, **columns)
        attempt.put(f"died-{name}", [row])

    alive = [name for name in order if not attempt.has(f"died-{name}")]
    try:
        rows = child.run_survivors(
            module, {**spec, "candidates": alive}, columns["threads"], preload, left_out=left_out
        )
    except child.ChildDied as error:
        raise StageError(str(error)) from None
    for row in rows:
        if row["metric"] == "failed":
            _say_failed(stage.name, row["candidate"], row["text"])
    return rows


@functools.cache
def _say_failed(stage: str, name: str, text: str) -> None:
    """Say it once, not with every block."""
    print(f"{stage}: {name} failed: {text}", file=sys.stderr, flush=True)
