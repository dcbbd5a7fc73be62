"""Stage ``m2``: whole decodes, paired by block.

``python -m kvtrial.stages.m2 --run-dir DIR --gguf FILE [--profile default|full]``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run;
writes ``events/m2.parquet``. Where the protocol leaves the number of a cell's blocks open, the spread
of the first ones fixes it (`kvtrial.decision.rule.blocks_wanted`); their mean has no say. Finished blocks are
kept in the journal: after a kill the same command goes on.
"""

from __future__ import annotations

from typing import Any

from kvtrial.decision import gates
from kvtrial.decision.contrasts import Measured
from kvtrial.measure import allocations
from kvtrial.run import events
from kvtrial.run.journal import Attempt
from kvtrial.stages.common import (
    Block,
    Cell,
    Row,
    Stage,
    blocks,
    exit_tracked,
    run_arms,
    run_blocks,
)
from kvtrial.stages.progress import Progress

MODULE = "kvtrial.measure.block"
#: Steps of the allocation pass: over the end of a page whatever its size.
ALLOCATION_STEPS = 72
ALLOCATION_THREADS = (1, 2)


def block_spec(stage: Stage, block: Block) -> dict[str, Any]:
    """What `kvtrial.measure.block` is told, but for the candidates."""
    cell = block.cell
    return {
        "gguf": str(stage.gguf),
        "snapshots": stage.snapshots(cell["context"], cell["sessions"]),
        "baseline": stage.protocol["parity"]["baseline"],
        "threads": cell["threads"],
        "probes": stage.protocol["probes"],
        "page_tokens": stage.protocol["page_tokens"],
        "warmup_steps": stage.protocol["m2"]["warmup_steps"],
        "decode_steps": stage.protocol["decode_steps"],
        "seed": stage.protocol["decision"]["bootstrap_seed"] + block.number,
        "check": stage.name == "m2" and block.number == 0,  # the oracle is slow
    }


def further_blocks(stage: Stage, attempt: Attempt, cell: Cell, names: list[str]) -> list[Block]:
    """What the registered precision asks for beyond the cell's first blocks, all of which are done."""
    judged = gates.judge(events.to_frame(attempt.rows()), stage.protocol)
    measured = Measured(judged.valid_rows, stage.protocol, stage.profile, stage.usable_cpus)
    registered = next(c for c in measured.cells if gates.cell_name(c) == gates.cell_name(cell))
    seed = stage.protocol["decision"]["bootstrap_seed"]
    return blocks(cell, measured.blocks_wanted(registered), names, seed)[cell["blocks"] :]


def count_allocations(stage: Stage, attempt: Attempt, names: list[str]) -> None:
    """The untimed pass that counts allocation calls of all threads, in a process that can."""
    if attempt.has("allocations"):
        return
    rows: list[Row] = []
    for threads in ALLOCATION_THREADS:
        spec = {
            "shape": stage.workload["shape"],
            "threads": threads,
            "page_tokens": stage.protocol["page_tokens"],
            "steps": ALLOCATION_STEPS,
        }
        columns = {"threads": threads}
        preload = allocations.preload_environment()
        found = run_arms(
            stage, attempt, "kvtrial.measure.allocation_pass", names, spec, columns, preload
        )
        rows += stage.events(found, **columns)
    attempt.put("allocations", rows)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("m2", __doc__, argv)
    with stage.attempt() as attempt:
        names = stage.runnable(attempt, timed=True)
        seed = stage.protocol["decision"]["bootstrap_seed"]
        cells = stage.measured_cells(attempt)
        planned = [b for cell in cells for b in blocks(cell, cell["blocks"], names, seed)]
        estimated = stage.estimated(attempt, planned, gated=True)
        with Progress("m2", estimated, in_seconds=True) as progress:

            def run(wanted: list[Block]) -> None:
                run_blocks(
                    stage,
                    attempt,
                    MODULE,
                    wanted,
                    lambda block: block_spec(stage, block),
                    progress,
                    gated=True,
                )

            run(planned)
            for cell in cells:
                if "max_blocks" not in cell:
                    continue
                if more := further_blocks(stage, attempt, cell, names):
                    progress.say(
                        f"{len(more)} more blocks at {gates.cell_name(cell)}, by its spread"
                    )
                    run(more)
        count_allocations(stage, attempt, names)
    return 0


if __name__ == "__main__":
    exit_tracked("m2", main)
