"""Stage ``direct_write``: rows projected into the cache, against scratch and append, in rotation.

``python -m kvtrial.stages.direct_write --run-dir DIR --gguf FILE``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run;
writes ``events/direct_write.parquet``. Every candidate that hands out slots is two arms, ``K1.direct`` and
``K1.append``: the same store, one reserving a slot for each row, the other never.
"""

from __future__ import annotations

from dataclasses import replace

from kvtrial import candidates
from kvtrial.contract import Capability
from kvtrial.measure.aliases import WAYS, way_of
from kvtrial.measure.plan import SamplingPlan
from kvtrial.measure.specs import BlockSpec
from kvtrial.stages import m2
from kvtrial.stages.common import Block, Cell, CellRun, Stage, Work, exit_tracked, run_whole


def block_spec(stage: Stage, block: Block, names: list[str], slow: list[str] | None) -> BlockSpec:
    """That of ``m2``, with each arm's candidate and its way."""
    return replace(
        m2.block_spec(stage, block, names, slow),
        reference=f"{stage.protocol['decision']['reference']}.{WAYS[0]}",
        stands_for={name: way_of(name)[0] for name in names},
        ways={name: way_of(name)[1] for name in names},
        compare=False,
        alone_steps=0,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("direct_write", __doc__, argv)
    rules = stage.protocol["direct_write"]
    with stage.attempt() as attempt:
        names = [
            f"{name}.{way}"
            for name in stage.runnable(attempt, timed=True)
            if Capability.RESERVE_SLOT in candidates.get(name).capabilities
            for way in WAYS
        ]
        cell: Cell = {
            "context": rules["context"],
            "sessions": 1,
            "threads": 1,
            "rounds": rules["rounds"],
        }
        work = Work(m2.MODULE, lambda block, own, slow: block_spec(stage, block, own, slow), names)
        plan = SamplingPlan.fixed(stage.protocol, rules["blocks"])
        runs = [CellRun(stage, attempt, work, cell, plan)] if names else []
        run_whole(stage, attempt, runs)
    return 0


if __name__ == "__main__":
    exit_tracked("direct_write", main)
