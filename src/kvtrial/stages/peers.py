"""Stage ``peers``: llama.cpp, PyTorch, ONNX Runtime and OpenVINO beside ours, paired by block. Optional.

``python -m kvtrial.stages.peers --run-dir DIR --gguf FILE [--contexts N …] [--threads N …] [--blocks N]``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run; writes
``peers.json``, the comparison, and ``peers.parquet``, the raw rows. They lie outside of ``events/``: the
verdict does not rest on them.

Three works are compared: decode from a filled context, prefill of the smallest context, attention alone.
A block of decode is one fresh process, in which all arms of both engines take turns step by step. A block
of the other works is a fresh process for each program, one right after the other, in balanced orders of programs,
and of the arms within each. Warm-up, steps, iterations and rotation are those of the protocol. Nothing is void
here: there is no decision to protect, and the interval carries the noise.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from kvtrial import candidates
from kvtrial.decision.peers import compare
from kvtrial.host import machine, shapes
from kvtrial.host.files import write_text
from kvtrial.measure import rotation
from kvtrial.measure.exclusive import exclusive
from kvtrial.measure.peers import programs
from kvtrial.measure.specs import AttentionSpec, BlockSpec, PrefillSpec, Spec
from kvtrial.run import events
from kvtrial.run.journal import COMPLETE, Attempt, Journal
from kvtrial.show import report
from kvtrial.show.plots import peers as figure
from kvtrial.stages import m1, m2
from kvtrial.stages.common import Block, Cell, Row, Stage, StageError, exit_tracked, run_arms
from kvtrial.stages.progress import Progress

#: Work → the module of each of its processes → the programs that take turns in it. "ours" are the arms of this
#: project.
PROCESSES: dict[str, list[tuple[str, tuple[str, ...]]]] = {
    "decode": [("kvtrial.measure.peers.decode", ("ours", "llama.cpp"))],
    "prefill": [
        ("kvtrial.measure.peers.prefill", ("ours",)),
        ("kvtrial.measure.peers.llama_prefill", ("llama.cpp",)),
    ],
    "attention": [
        (m1.MODULE, ("ours",)),
        *(
            ("kvtrial.measure.peers.attention", (program,))
            for program in ("torch", "onnxruntime", "openvino")
        ),
    ],
}
#: Work → the metric of its rows.
METRICS = {"decode": "m2/step_ms", "prefill": "prefill/ms", "attention": "m1/attention_ms"}
ROLES = ("contender", "profile")


@dataclass(frozen=True)
class Round:
    """One block of one work: its processes in their order, each a module with its arms in theirs."""

    work: str
    cell: Cell
    number: int
    processes: list[tuple[str, list[str]]]

    @property
    def name(self) -> str:
        """Such as ``decode-4096x1x1-block03``."""
        return f"{self.work}-{Block(self.cell, self.number).name}"


def _orders(names: list[str], count: int, seed: int) -> list[list[str]]:
    """One balanced order a block."""
    return rotation.orders(names, count, seed)[:count]


def rounds(
    work: str, cell: Cell, count: int, arms: dict[str, list[str]], seed: int
) -> Iterator[Round]:
    """The blocks of a work in a cell, orders mirrored. ``arms``: program → its arms."""
    modules, within = {}, {}
    for module, turns in PROCESSES[work]:
        if any(program in arms for program in turns):
            name = "+".join(turns)
            modules[name] = module
            own = [arm for program in turns for arm in arms.get(program, [])]
            within[name] = _orders(own, count, seed)
    for number, order in enumerate(_orders(list(modules), count, seed)):
        yield Round(work, cell, number, [(modules[name], within[name][number]) for name in order])


def plan(
    contexts: list[int], threads: list[int], count: int, arms: dict[str, list[str]], seed: int
) -> list[Round]:
    """All rounds of a run; works without a peer are left out.

    The works of a cell follow one another, so that a run that is stopped early has whole cells.
    """
    found: list[Round] = []
    for context in sorted(contexts):
        for n in threads:
            cell: Cell = {"context": context, "sessions": 1, "threads": n}
            for work, processes in PROCESSES.items():
                there = {program for _, turns in processes for program in turns}
                alone = not (there - {"ours"}) & arms.keys()
                if not alone and (work != "prefill" or context == min(contexts)):
                    found += rounds(work, cell, count, arms, seed)
    return found


def spec_of(stage: Stage, planned: Round, order: list[str]) -> Spec:
    """What a measuring module is told, ours and theirs alike."""
    cell = planned.cell
    if planned.work == "decode":
        return m2.block_spec(stage, Block(cell, planned.number), order, [])
    if planned.work == "attention":
        named: Cell = {**cell, "shape": shapes.name_of(stage.workload.shape)}
        return m1.block_spec(stage, Block(named, planned.number), order)
    (folder,) = stage.snapshots(cell["context"], 1)
    tokens = json.loads((Path(folder) / "tokens.json").read_text(encoding="utf-8"))
    return PrefillSpec(
        candidates=order,
        gguf=str(stage.gguf),
        ids=tokens["ids"],
        threads=cell["threads"],
        page_tokens=stage.protocol["page_tokens"],
    )


def shortened(spec: Spec) -> tuple[Spec, float]:
    """A quick version of a specification, and how often its timed part is in the whole one."""
    if isinstance(spec, BlockSpec):
        arms, rules = len(spec.candidates), spec.rotation
        whole = rotation.rounds_of(arms, spec.rounds)
        quick = replace(spec, rounds=1, rotation={**rules, "warmup_rounds": 2})
        return quick, whole / rotation.rounds_of(arms, 1)
    if isinstance(spec, AttentionSpec):
        few_orders = replace(spec, warmup_iterations=1, orders=spec.orders[:2])
        return few_orders, len(spec.orders) - spec.warmup_iterations
    assert isinstance(spec, PrefillSpec)
    few = spec.ids[: max(1, len(spec.ids) // 8)]
    return replace(spec, ids=few), len(spec.ids) / len(few)


def run_round(
    stage: Stage, attempt: Attempt, planned: Round, quick: bool = False
) -> tuple[list[Row], float]:
    """Rows of one round, and the seconds that it takes: for ``quick`` those of the whole round."""
    rows: list[Row] = []
    start = time.monotonic()
    more = 1.0
    for module, order in planned.processes:
        spec = spec_of(stage, planned, order)
        if quick:
            spec, more = shortened(spec)
        rows += run_arms(stage, attempt, module, spec, planned.cell)
        rows += [
            {"metric": "package", "candidate": program, "text": programs.package_of(program)}
            for program in programs.programs_of(order)
        ]
    spent = time.monotonic() - start
    timed = sum(r["value"] for r in rows if r["metric"] == METRICS[planned.work]) / 1e3
    return rows, spent + (more - 1) * timed


def estimate(stage: Stage, attempt: Attempt, left: list[Round]) -> dict[str, float]:
    """Seconds that each round takes, from quick ones in the smallest and the largest cell.

    What a round takes is nearly linear in the filled positions. Several threads are taken for as
    slow as the fewest.
    """
    found: dict[str, float] = {}
    for work in PROCESSES:
        own = [r for r in left if r.work == work]
        first = {r.cell["context"]: r for r in reversed(own)}
        ends = sorted({min(first, default=0), max(first, default=0)} & first.keys())
        seconds = [run_round(stage, attempt, first[end], quick=True)[1] for end in ends]
        found |= {r.name: float(np.interp(r.cell["context"], ends, seconds)) for r in own}
    return found


def our_arms(stage: Stage, attempt: Attempt) -> list[str]:
    """Candidates that stand for us: they passed conformance and are meant to win."""
    return [
        name for name in stage.runnable(attempt, timed=True) if candidates.get(name).role in ROLES
    ]


def write_comparison(stage: Stage, table: pd.DataFrame) -> list[Row]:
    """Write ``peers.parquet``, ``peers.json`` and the figure from the raw rows of all attempts."""
    arms = set(table["candidate"]) & set(stage.protocol["candidates"])
    rows = compare(
        table,
        model=stage.model.name,
        shape=stage.workload.shape,
        profiles={name: candidates.get(name).profile.name for name in sorted(arms)},
        confidence=stage.protocol["decision"]["confidence"],
    )
    events.write(table, stage.run_dir / "peers.parquet")
    write_text(stage.run_dir / "peers.json", json.dumps(rows, indent=2) + "\n")
    drawn = figure.draw({"peers": rows}, table)
    if drawn is not None:
        report.save_figure(drawn, "peers", stage.run_dir / "figures")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--contexts", type=int, nargs="*", default=[])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--blocks", type=int, default=6)
    asked, rest = parser.parse_known_args(argv)
    stage = Stage.from_command_line("peers", __doc__, rest)
    absent = programs.missing()
    present = [program for program in programs.PROGRAMS if program not in absent]
    if absent:
        print(f"peers: {programs.what_to_install(absent)}", flush=True)
    seed = stage.protocol["decision"]["seed"]
    known = sorted(map(int, stage.workload.snapshots))
    contexts = asked.contexts or known
    if unknown := sorted(set(contexts) - set(known)):
        raise StageError(
            f"peers.contexts has {', '.join(map(str, unknown))}; the protocol fills "
            f"{', '.join(map(str, known))}: give some of these"
        )
    cpus = machine.usable_cpus()
    threads = [n for n in asked.threads if n <= cpus]
    if not threads:
        raise StageError(
            f"peers.threads is {', '.join(map(str, asked.threads))}; {cpus} CPUs are usable: give some "
            f"up to {cpus}"
        )
    if left_out := [n for n in asked.threads if n > cpus]:
        print(f"peers: no rows of {left_out} threads: {cpus} CPUs are usable", flush=True)
    with exclusive(f"peers of {stage.run_dir.name}"):
        journal = Journal(stage.run_dir, "peers")
        attempt = journal.attempt()
        arms = {"ours": our_arms(stage, attempt)} | {p: programs.arms_of(p) for p in present}
        planned = plan(contexts, threads, asked.blocks, arms, seed)
        left = [r for r in planned if not attempt.has(r.name)]
        seconds = estimate(stage, attempt, left)
        with Progress("peers", seconds, in_seconds=True) as progress:
            for r in left:
                rows, _ = run_round(stage, attempt, r)
                attempt.put(r.name, stage.events(rows, block=r.number, **r.cell))
                progress.done(r.name)
        compared = write_comparison(stage, events.to_frame(journal.all_rows()))
        if not attempt.has(COMPLETE):
            attempt.put(COMPLETE, [])
    if not compared:
        attempt.publish()  # what is mended since is measured anew
        raise StageError(
            f"no engine gave a row to compare with ours; the reason is in {stage.run_dir / 'logs/peers.log'}"
        )
    print(f"peers: {len(compared)} rows in {stage.run_dir / 'peers.json'}", flush=True)
    return 0


if __name__ == "__main__":
    exit_tracked("peers", main)
