"""Stage ``aa``: one candidate registered twice, measured as two. Its ratio is known to be 1.

``python -m kvtrial.stages.aa --run-dir DIR --gguf FILE [--profile default|full]``

Reads what ``m2`` reads; writes ``events/aa.parquet``. Blocks, gates and orders are those of ``m2`` at
the primary cell, with two arms that differ in nothing but their place.
"""

from __future__ import annotations

from typing import Any

from kvtrial.decision.known_answers import ARMS
from kvtrial.stages import m2
from kvtrial.stages.common import Block, Stage, blocks, exit_tracked, run_blocks
from kvtrial.stages.progress import Progress


def block_spec(stage: Stage, block: Block) -> dict[str, Any]:
    """That of ``m2``, with both arms standing for the registered candidate."""
    same = stage.protocol["aa"]["candidate"]
    return {
        **m2.block_spec(stage, block),
        "baseline": ARMS[0],
        "stands_for": dict.fromkeys(ARMS, same),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("aa", __doc__, argv)
    rules = stage.protocol["aa"]
    with stage.attempt() as attempt:
        runs = rules["candidate"] in stage.runnable(attempt, timed=True)
        primary = [c for c in stage.measured_cells(attempt) if c["role"] == "primary"]
        seed = stage.protocol["decision"]["bootstrap_seed"]
        planned = [
            block
            for cell in primary
            for block in blocks(cell, rules["blocks"], list(ARMS), seed)
            if runs
        ]
        estimated = stage.estimated(attempt, planned, gated=True)
        with Progress("aa", estimated, in_seconds=True) as progress:
            run_blocks(
                stage,
                attempt,
                m2.MODULE,
                planned,
                lambda block: block_spec(stage, block),
                progress,
                gated=True,
            )
    return 0


if __name__ == "__main__":
    exit_tracked("aa", main)
