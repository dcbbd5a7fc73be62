"""Stage ``m1``: one attention region at a time, candidates interleaved.

``python -m kvtrial.stages.m1 --run-dir DIR --gguf FILE [--profile default|full]``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run;
writes ``events/m1.parquet``. The model's own head shape is measured on the filled contexts, the
registered others on synthetic rows. Cells with several sessions are left out: a region belongs to
one session.
"""

from __future__ import annotations

from typing import Any

from kvtrial.measure.order import mirrored_orders
from kvtrial.measure.shapes import name_of
from kvtrial.stages.common import Block, Cell, Stage, blocks, exit_tracked, run_blocks
from kvtrial.stages.progress import Progress

MODULE = "kvtrial.measure.attention"
#: Layers of different rows that a synthetic shape has.
SYNTHETIC_LAYERS = 4


def shapes(protocol: dict[str, Any], own: dict[str, int]) -> dict[str, dict[str, int]]:
    """Name → shape; the model's own first, then those that are registered beside it."""
    found = {name_of(own): own}
    for shape in protocol["m1"]["shapes"]:
        found.setdefault(name_of(shape), {**shape, "layers": SYNTHETIC_LAYERS})
    return found


def planned_blocks(stage: Stage, cells: list[Cell], names: list[str]) -> list[Block]:
    """Every block of every head shape and context."""
    rules = stage.protocol["m1"]
    seed = stage.protocol["decision"]["bootstrap_seed"]
    own, *others = shapes(stage.protocol, stage.workload["shape"])
    single = [cell for cell in cells if cell["sessions"] == 1]
    counts = {own: rules["blocks"], **dict.fromkeys(others, rules["shape_blocks"])}
    return [
        block
        for name, count in counts.items()
        for cell in single
        for block in blocks({**cell, "shape": name}, count, names, seed)
    ]


def block_spec(stage: Stage, block: Block) -> dict[str, Any]:
    """What `kvtrial.measure.attention` is told, but for the candidates."""
    rules = stage.protocol["m1"]
    iterations = rules["warmup_iterations"] + rules["iterations"]
    seed = stage.protocol["decision"]["bootstrap_seed"] + block.number
    own = stage.workload["shape"]
    shape = shapes(stage.protocol, own)[block.cell["shape"]]
    return {
        "shape": shape,
        "orders": mirrored_orders(block.order, iterations, seed),
        "snapshots": stage.snapshots(block.cell["context"], 1) if shape == own else [],
        "synthetic_tokens": block.cell["context"],
        "threads": block.cell["threads"],
        "probes": stage.protocol["probes"],
        "page_tokens": stage.protocol["page_tokens"],
        "warmup_iterations": rules["warmup_iterations"],
        "rotation_llc_multiple": rules["rotation_llc_multiple"],
        "seed": seed,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("m1", __doc__, argv)
    with stage.attempt() as attempt:
        names = stage.runnable(attempt, timed=True)
        planned = planned_blocks(stage, stage.measured_cells(attempt), names)
        estimated = stage.estimated(attempt, planned, gated=True)
        with Progress("m1", estimated, in_seconds=True) as progress:
            run_blocks(
                stage,
                attempt,
                MODULE,
                planned,
                lambda block: block_spec(stage, block),
                progress,
                gated=True,
            )
    return 0


if __name__ == "__main__":
    exit_tracked("m1", main)
