"""Stage ``m2``: whole decodes, all arms in rotation.

``python -m kvtrial.stages.m2 --run-dir DIR --gguf FILE [--profile default|full]``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run;
writes ``events/m2.parquet``. Which blocks there are is for `kvtrial.measure.plan.SamplingPlan` to say.
Finished blocks are kept in the journal: after a kill the same command goes on.
"""

from __future__ import annotations

import math

from kvtrial.host import machine
from kvtrial.measure import allocations, rotation
from kvtrial.measure.plan import Hopeless, SamplingPlan, block_seed, cell_name
from kvtrial.measure.specs import AllocationSpec, BlockSpec
from kvtrial.measure.stores import HEADROOM_BYTES, needed_bytes
from kvtrial.registration import Protocol
from kvtrial.run.journal import Attempt
from kvtrial.stages.common import (
    Block,
    Cell,
    CellRun,
    Row,
    Stage,
    StageError,
    Work,
    columns,
    exit_tracked,
    progress_of,
    run_arms,
    run_cells,
)

MODULE = "kvtrial.measure.block"
#: Steps of the allocation pass: over the end of a page whatever its size.
ALLOCATION_STEPS = 72
ALLOCATION_THREADS = (1, 2)


def steps_of(protocol: Protocol, cell: Cell, arms: int) -> int:
    """Tokens that are fed behind the context at most, whichever of so many arms turn out to be slow."""
    rules = protocol["rotation"]
    rounds = cell.get("rounds", rules["rounds"])
    return rotation.most_steps(arms, rounds, rules["warmup_rounds"], rules["alone_steps"])


def groups(stage: Stage, cell: Cell, names: list[str]) -> list[list[str]]:
    """Arms that are open together: all, where memory holds them."""
    steps = steps_of(stage.protocol, cell, len(names))
    needed = {
        name: needed_bytes(
            name,
            stage.workload.shape,
            tokens=cell["context"] + steps,
            sessions=cell["sessions"],
            page_tokens=stage.protocol["page_tokens"],
        )
        for name in names
    }
    room = machine.available_memory_bytes() - stage.gguf.stat().st_size - HEADROOM_BYTES
    return rotation.groups(names, stage.anchors, needed, room)


def work(stage: Stage, names: list[str]) -> Work:
    """What a block of this stage is."""
    return Work(
        MODULE,
        lambda block, names, slow: block_spec(stage, block, names, slow),
        names,
        lambda cell, names: groups(stage, cell, names),
    )


def block_spec(stage: Stage, block: Block, names: list[str], slow: list[str] | None) -> BlockSpec:
    """What `kvtrial.measure.block` is told."""
    cell, rules = block.cell, stage.protocol["rotation"]
    rounds = cell.get("rounds", rules["rounds"])
    steps = steps_of(stage.protocol, cell, len(names))
    return BlockSpec(
        candidates=names,
        gguf=str(stage.gguf),
        snapshots=stage.snapshots(cell["context"], cell["sessions"], steps),
        reference=stage.protocol["decision"]["reference"],
        threads=cell["threads"],
        probes=stage.protocol["probes"],
        page_tokens=stage.protocol["page_tokens"],
        rotation=rules,
        step_limit_s=rules["step_limit_s"],
        rounds=rounds,
        slow=slow,
        seed=block_seed(stage.protocol["decision"]["seed"], cell, block.number),
        compare=block.number == 0,  # float64 logarithms of all logits are slow
        alone_steps=rules["alone_steps"] if block.number == 0 else 0,
    )


def count_allocations(stage: Stage, attempt: Attempt, names: list[str]) -> None:
    """The untimed pass that counts allocation calls of all threads, in a process that can."""
    if attempt.has("allocations"):
        return
    rows: list[Row] = []
    for threads in ALLOCATION_THREADS:
        spec = AllocationSpec(
            candidates=names,
            shape=stage.workload.shape,
            threads=threads,
            page_tokens=stage.protocol["page_tokens"],
            steps=ALLOCATION_STEPS,
        )
        columns = {"threads": threads}
        preload = allocations.preload_environment()
        counted = run_arms(
            stage, attempt, "kvtrial.measure.allocation_pass", spec, columns, preload
        )
        rows += stage.events(counted, **columns)
    attempt.put("allocations", rows)


def lost_incumbent(stage: Stage, attempt: Attempt, cell: Cell) -> Hopeless | None:
    """Whether a deciding cell has lost an arm that a challenger has to beat: nothing decides it any more."""
    if cell["role"] == "extra":
        return None
    for name in stage.protocol["decision"]["incumbents"]:
        if attempt.has(f"died-{name}"):
            (row,) = attempt.unit(f"died-{name}")
            return Hopeless(
                f"{name}, which a challenger has to beat, is out: {row['text']}",
                f"repair {name}, or take it out of the protocol",
                again=False,
            )
    return None


def provisional(run: CellRun) -> str:
    """What the blocks so far say of the cell's deciding pairs."""
    said = []
    for (top, bottom), logs in run.logs().items():
        if len(logs) >= 2:
            mean, low, high = (math.exp(float(x)) for x in run.plan.bounds(logs))
            said.append(f"{top}/{bottom} {mean:.3f} [{low:.3f}, {high:.3f}]")
    blocks = f"{len(run.valid)} of {run.wanted()} blocks"
    return f"{cell_name(run.cell)} after {blocks}: {', '.join(said) or 'no pair yet'} (provisional)"


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("m2", __doc__, argv)
    with stage.attempt() as attempt:
        names = stage.runnable(attempt, timed=True)
        runs = [
            CellRun(
                stage, attempt, work(stage, names), cell, SamplingPlan.of_cell(stage.protocol, cell)
            )
            for cell in stage.measured_cells(attempt)
        ]
        with progress_of(stage, attempt, runs) as progress:
            ended = run_cells(
                runs,
                progress,
                after=lambda run: progress.say(provisional(run)),
                hopeless=lambda run: lost_incumbent(stage, attempt, run.cell),
            )
        if ended is not None:
            run, why = ended
            text = f"{cell_name(run.cell)} can't be decided: {why.reason}; {why.remedy}"
            if why.again:
                raise StageError(text)
            progress.say(f"{text}; nothing more is measured")
            attempt.put("lost", [stage.event("cell/lost", text=why.reason, **columns(run.cell))])
        else:
            count_allocations(stage, attempt, names)
    return 0


if __name__ == "__main__":
    exit_tracked("m2", main)
