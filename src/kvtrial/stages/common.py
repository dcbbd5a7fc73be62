"""What the measuring stages share: the run they belong to, who is timed, attempts, blocks."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtrial import candidates, tracking
from kvtrial.host import build, machine
from kvtrial.host.records import read
from kvtrial.measure import child, figures
from kvtrial.measure.exclusive import exclusive
from kvtrial.measure.plan import Hopeless, SamplingPlan, Seen, cell_name
from kvtrial.measure.rotation import TooLarge
from kvtrial.measure.specs import Spec
from kvtrial.measure.stores import Snapshot
from kvtrial.measure.void import void_reason
from kvtrial.registration import Cell, Protocol
from kvtrial.run import corpus, events, exits, models, protocol
from kvtrial.run.journal import COMPLETE, Attempt, Journal, Row
from kvtrial.run.layout import pipeline_start
from kvtrial.stages.progress import Progress

#: Columns of an event that name a cell: three numbers, and for m1 the head shape's name.
CELL_COLUMNS = ("context", "sessions", "threads", "shape")


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


def refuse_another_model(run_dir: Path, known: str, gguf: Path) -> None:
    """`StageError` where a run was begun with another file of the model's name: ``known`` is its sha256."""
    found = models.sha256(gguf)
    if known != found:
        raise StageError(
            f"{gguf} has sha256 {found[:12]}…, and {run_dir} is a run of {known[:12]}…: put "
            "that file back, or move the run's folder away and begin again"
        )


@dataclass(frozen=True)
class TrialModel:
    """The model of a run: its name and its file's sha256."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``workload.json``: what a run loads."""

    workload_id: str = ""  #: names the model's bytes, the texts and the way of making
    shape: dict[str, int]  #: of the model's stores: layers, q_heads, kv_heads, head_dim
    skipped: dict[str, str]  #: cell → why this machine can't hold it
    snapshots: dict[str, list[str]]  #: context → folders, one a session, relative to the results


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
    model : TrialModel
        As the manifest has it.
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
    model: TrialModel
    profile: str
    usable_cpus: int
    protocol: Protocol

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
        refuse_another_model(args.run_dir, manifest["model"]["sha256"], args.gguf)
        return cls(
            name=name,
            run_dir=args.run_dir,
            gguf=args.gguf,
            model=TrialModel(manifest["model"]["name"], manifest["model"]["sha256"]),
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
            found.setdefault(cell_name(cell), cell)
        return list(found.values())

    def measured_cells(self, attempt: Attempt) -> list[Cell]:
        """The cells that the machine can hold; each of the others gets a ``cell/skipped`` row."""
        skipped = self.workload.skipped
        left_out = [cell for cell in self.cells() if cell_name(cell) in skipped]
        if left_out and not attempt.has("skipped"):
            rows = [
                self.event("cell/skipped", text=skipped[cell_name(cell)], **columns(cell))
                for cell in left_out
            ]
            attempt.put("skipped", rows)
        return [cell for cell in self.cells() if cell not in left_out]

    @functools.cached_property
    def workload(self) -> Workload:
        """What ``workload.json`` says."""
        path = self.run_dir / "workload.json"
        return read(Workload, json.loads(path.read_bytes()), str(path))

    def estimated(self, attempt: Attempt, planned: Iterable[Block]) -> dict[str, float]:
        """Block → seconds that it is going to take, for those that are left.

        The sum is kept in the attempt's events, beside what it will have taken.
        """
        path = self.run_dir / "estimate.json"
        seconds = json.loads(path.read_text(encoding="utf-8"))["blocks"][self.name]
        left = {
            # 0 where memory has become free since: the cell was to be left out then.
            block.name: seconds.get(cell_name(block.cell), 0.0)
            for block in planned
            if not attempt.has(f"{block.name}-trial0")
        }
        if not attempt.has("estimated"):
            total = sum(left.values())
            attempt.put("estimated", [self.event("attempt/estimated_s", value=total)])
        return left

    @functools.cached_property
    def anchors(self) -> list[str]:
        """The arms that are in every group of a block: the reference, and the challenger that is tested."""
        decision = self.protocol["decision"]
        tested = [n for n in decision["challengers"] if self._why_not(n, timed=True) is None][:1]
        return [decision["reference"], *tested]

    def snapshots(self, context: int, sessions: int, steps: int = 0) -> list[str]:
        """Folders of the filled contexts, one a session, as the stage ``workload`` left them.

        ``steps``: tokens that are going to be fed behind them.
        """
        folders = self.workload.snapshots.get(str(context), [])
        if len(folders) < sessions:
            raise StageError(
                f"{self.run_dir / 'workload.json'} has {len(folders)} snapshots of context "
                f"{context}; {sessions} are needed: run `snakemake --cores 1 --forcerun workload`"
            )
        paths = [self.run_dir.parent / folder for folder in folders[:sessions]]
        for path in paths:
            if (held := Snapshot.open(path).forced.size) < steps:
                raise StageError(
                    f"{path.name} has a forced stream of {held} tokens, and {steps} steps are registered: "
                    f"lower `rounds` in the protocol; at most {corpus.FORCED_TOKENS} tokens are kept"
                )
        return [str(path) for path in paths]

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
        if name in protocol.untimed(self.protocol, self.profile):
            return "timed in profile full alone, as registered"
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
    """One replicate of a cell, in fresh processes."""

    cell: Cell
    number: int

    @property
    def name(self) -> str:
        """Such as ``4096x1x1-block03``; its runs add ``-trial0``, ``-trial1``, …"""
        return f"{cell_name(self.cell)}-block{self.number:02d}"


def columns(cell: Cell) -> Row:
    """The columns of a cell's events."""
    own = dict(cell)
    return {key: own[key] for key in CELL_COLUMNS if key in own}


@dataclass(frozen=True)
class Work:
    """What a stage's blocks are: the module that measures, and what it is told.

    Attributes
    ----------
    module : str
        Run as ``python -m`` in a fresh process.
    spec : callable
        (block, names, arms known to be slow, None while no block of the cell has shown them) → the
        specification.
    names : list of str
        The arms.
    groups : callable
        (cell, names) → names that are open together; one process each. By default all.
    """

    module: str
    spec: Callable[[Block, list[str], list[str] | None], Spec]
    names: list[str]
    groups: Callable[[Cell, list[str]], list[list[str]]] = lambda cell, names: [names]


class CellRun:
    """A cell of one attempt: its blocks so far, and the running of further ones.

    Which block comes next, and when there are enough, is the plan's to say.
    """

    def __init__(
        self, stage: Stage, attempt: Attempt, work: Work, cell: Cell, plan: SamplingPlan
    ) -> None:
        self.stage, self.attempt, self.work, self.cell, self.plan = stage, attempt, work, cell, plan
        self._void = 0
        self._slow: list[str] | None = None
        self._trials: dict[int, int] = {}
        self.valid: set[int] = set()
        self._figures: dict[int, figures.Block] = {}
        for number in itertools.count():
            trial = 0
            while attempt.has(self._unit(number, trial)):
                self._take(number, trial, attempt.unit(self._unit(number, trial)))
                trial += 1
            if trial == 0:
                break
        self._void = 0  # what was void before this process began is not held against it

    def _unit(self, number: int, trial: int) -> str:
        return f"{Block(self.cell, number).name}-trial{trial}"

    def _take(self, number: int, trial: int, rows: list[Row]) -> str | None:
        """Enter a run of a block; why it is void, or None."""
        table = events.to_frame(rows)
        self._trials[number] = trial + 1
        if self._slow is None:
            self._slow = sorted(set(table.loc[table["metric"] == "rotation/slow", "candidate"]))
        void = void_reason(table, self.stage.protocol["void"])
        if void is None:
            self.valid.add(number)
            self._figures |= figures.blocks(table, self.stage.anchors)
        else:
            self._void += 1
        return void

    def next(self) -> int | Hopeless | None:
        """What the plan says to what there is."""
        return self.plan.next(Seen(self.valid, self._void, list(self.logs().values())))

    def wanted(self) -> int:
        """How many blocks the cell is to have, as far as its first ones have said."""
        return self.plan.planned(list(self.logs().values()))

    def logs(self) -> dict[tuple[str, str], np.ndarray]:
        """Log ratios of the plan's pairs over the valid blocks; without pairs that some block lacks."""
        blocks = [block for _, block in sorted(self._figures.items())]
        return figures.pair_logs(blocks, self.plan.pairs)

    def run(self, number: int) -> str | None:
        """Run a block, keep its rows, and say why it is void, or None."""
        block, trial = Block(self.cell, number), self._trials.get(number, 0)
        start = time.monotonic()
        alive = [n for n in self.work.names if not self.attempt.has(f"died-{n}")]
        rows: list[Row] = []
        try:
            groups = self.work.groups(self.cell, alive)
        except TooLarge as error:
            raise StageError(
                f"{cell_name(self.cell)} can't be held: {error}; free some, then give the same command "
                "again, or leave the cell out of the protocol"
            ) from None
        for group, names in enumerate(groups):
            spec = self.work.spec(block, names, self._slow)
            found = run_arms(self.stage, self.attempt, self.work.module, spec, columns(self.cell))
            rows += [{"group": group, **row} for row in found]
        rows.append({"metric": "block/taken_s", "value": time.monotonic() - start})
        at = {"block": number, "trial": trial, **columns(self.cell)}
        self.attempt.put(self._unit(number, trial), self.stage.events(rows, **at))
        return self._take(number, trial, self.attempt.unit(self._unit(number, trial)))


def run_cells(
    runs: Iterable[CellRun],
    progress: Progress,
    after: Callable[[CellRun], None] = lambda run: None,
    hopeless: Callable[[CellRun], Hopeless | None] = lambda run: None,
) -> tuple[CellRun, Hopeless] | None:
    """Run cells to their ends, one after the other; the first that is hopeless ends it and is returned.

    ``after`` is called for every block that counts; ``hopeless`` says what the plan can't know.
    """
    for run in runs:
        number = hopeless(run) or run.next()
        while isinstance(number, int):
            start = time.monotonic()
            void = run.run(number)
            seconds = time.monotonic() - start
            left = range(number if void else number + 1, max(run.wanted(), number + 1))
            if progress.in_seconds:
                progress.expect({Block(run.cell, n).name: seconds for n in left})
            if void is None:
                progress.done(Block(run.cell, number).name)
                after(run)
            else:
                progress.say(f"{Block(run.cell, number).name} is void: {void}; it is run again")
            number = hopeless(run) or run.next()
        if number is not None:
            return run, number
    return None


def planned(runs: Iterable[CellRun]) -> list[Block]:
    """The blocks that the cells have in any case."""
    return [Block(run.cell, number) for run in runs for number in range(run.plan.first)]


def progress_of(stage: Stage, attempt: Attempt, runs: Iterable[CellRun]) -> Progress:
    """The progress of a stage whose blocks were estimated."""
    return Progress(stage.name, stage.estimated(attempt, planned(runs)), in_seconds=True)


def run_whole(stage: Stage, attempt: Attempt, runs: list[CellRun]) -> None:
    """Run all cells of a stage that is nothing without one of them.

    Raises
    ------
    StageError
        A cell is hopeless.
    """
    with progress_of(stage, attempt, runs) as progress:
        if (ended := run_cells(runs, progress)) is not None:
            _, why = ended
            raise StageError(f"{stage.name}: {why.reason}; {why.remedy}")


def run_arms(
    stage: Stage,
    attempt: Attempt,
    module: str,
    spec: Spec,
    columns: Mapping[str, Any],
    preload: dict[str, str] | None = None,
) -> list[Row]:
    """Rows of one measured process.

    An arm that raises where the others can't go on, hangs, or takes the process down gets a ``failed`` row
    and is left out of the rest of the attempt; the process is run again without it.
    """

    def left_out(name: str, what: str) -> None:
        print(f"{stage.name}: {name} is out: {what}", file=sys.stderr, flush=True)
        row = stage.event("failed", candidate=name, text=what, **columns)
        attempt.put(f"died-{name}", [row])

    alive = [name for name in spec.candidates if not attempt.has(f"died-{name}")]
    try:
        rows = child.run_survivors(
            module,
            replace(spec, candidates=alive),
            columns["threads"],
            preload,
            left_out=left_out,
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
