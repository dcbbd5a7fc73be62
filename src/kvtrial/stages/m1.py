"""Stage ``m1``: one attention region at a time, candidates interleaved.

``python -m kvtrial.stages.m1 --run-dir DIR --gguf FILE [--profile default|full]``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run;
writes ``events/m1.parquet``. Cells with several sessions are left out: a region belongs to one
session.
"""

from __future__ import annotations

from typing import Any

from kvtrial.measure.order import mirrored_orders
from kvtrial.stages.common import Block, Progress, Stage, blocks, exit_tracked, run_blocks

MODULE = "kvtrial.measure.attention"


def block_spec(stage: Stage, block: Block, seed: int) -> dict[str, Any]:
    """What `kvtrial.measure.attention` is told, but for the candidates."""
    rules = stage.protocol["m1"]
    iterations = rules["warmup_iterations"] + rules["iterations"]
    return {
        "shape": stage.workload["shape"],
        "orders": mirrored_orders(block.order, iterations, seed + block.number),
        "snapshots": stage.snapshots(block.cell["context"], 1),
        "threads": block.cell["threads"],
        "page_tokens": stage.protocol["page_tokens"],
        "warmup_iterations": rules["warmup_iterations"],
        "rotation_llc_multiple": rules["rotation_llc_multiple"],
        "seed": seed + block.number,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("m1", __doc__, argv)
    with stage.attempt() as attempt:
        names = stage.runnable(attempt, timed=True)
        seed = stage.protocol["decision"]["bootstrap_seed"]
        count = stage.protocol["m1"]["blocks"]
        cells = [cell for cell in stage.cells() if cell["sessions"] == 1]
        planned = [b for cell in cells for b in blocks(cell, count, names, seed)]
        left = [b for b in planned if not attempt.has(f"{b.name}-trial0")]
        with Progress("m1", {b.name: float(b.cell["context"]) for b in left}) as progress:
            run_blocks(
                stage,
                attempt,
                MODULE,
                planned,
                lambda block: block_spec(stage, block, seed),
                progress,
                gated=True,
            )
    return 0


if __name__ == "__main__":
    exit_tracked("m1", main)
