"""Stage ``aa``: known answers. The rotation at the primary cell, on arms whose ratios are known.

``python -m kvtrial.stages.aa --run-dir DIR --gguf FILE [--profile default|full]``

Reads what ``m2`` reads; writes ``events/aa.parquet``. One candidate is registered three times: twice as it is
(their ratio is 1), and once with a planted slowness (`kvtrial.measure.aliases.ARMS`).
"""

from __future__ import annotations

from dataclasses import replace

from kvtrial.measure.aliases import ARMS, PLANTED
from kvtrial.measure.plan import SamplingPlan
from kvtrial.measure.specs import BlockSpec
from kvtrial.stages import m2
from kvtrial.stages.common import Block, CellRun, Stage, Work, exit_tracked, run_whole


def block_spec(stage: Stage, block: Block, slow: list[str] | None) -> BlockSpec:
    """That of ``m2``, with all arms standing for the registered candidate."""
    rules = stage.protocol["known_answers"]
    return replace(
        m2.block_spec(stage, block, list(ARMS), slow),
        reference=ARMS[0],
        stands_for=dict.fromkeys(ARMS, rules["candidate"]),
        spins={PLANTED: rules["planted"]},
        compare=False,
        alone_steps=0,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("aa", __doc__, argv)
    rules = stage.protocol["known_answers"]
    with stage.attempt() as attempt:
        runs = []
        if rules["candidate"] in stage.runnable(attempt, timed=True):
            work = Work(
                m2.MODULE, lambda block, _, slow: block_spec(stage, block, slow), list(ARMS)
            )
            plan = SamplingPlan.fixed(stage.protocol, rules["blocks"])
            runs = [
                CellRun(stage, attempt, work, cell, plan)
                for cell in stage.measured_cells(attempt)
                if cell["role"] == "primary"
            ]
        run_whole(stage, attempt, runs)
    return 0


if __name__ == "__main__":
    exit_tracked("aa", main)
