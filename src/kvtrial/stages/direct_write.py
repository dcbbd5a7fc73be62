"""Stage ``direct_write``: rows projected into the cache, against scratch and append.

``python -m kvtrial.stages.direct_write --run-dir DIR --gguf FILE``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run;
writes ``events/direct_write.parquet``. Both ways of a candidate run in one process, the order
alternating from block to block.
"""

from __future__ import annotations

from typing import Any

from kvtrial.stages.common import Block, Stage, blocks, exit_tracked, run_blocks
from kvtrial.stages.progress import Progress


def block_spec(stage: Stage, block: Block) -> dict[str, Any]:
    """What `kvtrial.measure.direct` is told, but for the candidates."""
    return {
        "gguf": str(stage.gguf),
        "snapshots": stage.snapshots(block.cell["context"], 1),
        "threads": block.cell["threads"],
        "probes": stage.protocol["probes"],
        "page_tokens": stage.protocol["page_tokens"],
        "warmup_steps": max(1, stage.protocol["m2"]["warmup_steps"]),  # they are watched
        "decode_steps": stage.protocol["decode_steps"],
        "direct_first": block.number % 2 == 0,
    }


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("direct_write", __doc__, argv)
    rules = stage.protocol["direct_write"]
    with stage.attempt() as attempt:
        names = stage.runnable(attempt, timed=True)
        cell = {"context": rules["context"], "sessions": 1, "threads": 1}
        seed = stage.protocol["decision"]["bootstrap_seed"]
        planned = blocks(cell, rules["blocks"], names, seed)
        estimated = stage.estimated(attempt, planned, gated=True)
        with Progress("direct_write", estimated, in_seconds=True) as progress:
            run_blocks(
                stage,
                attempt,
                "kvtrial.measure.direct",
                planned,
                lambda block: block_spec(stage, block),
                progress,
                gated=True,
            )
    return 0


if __name__ == "__main__":
    exit_tracked("direct_write", main)
