"""Stage ``m1``: one attention region at a time, candidates interleaved.

``python -m kvtrial.stages.m1 --run-dir DIR --gguf FILE [--profile default|full]``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run;
writes ``events/m1.parquet``. The model's own head shape is measured on the filled contexts, the
registered others on synthetic rows. Cells with several sessions are left out: a region belongs to
one session.
"""

from __future__ import annotations

from kvtrial.host.shapes import name_of
from kvtrial.measure import rotation
from kvtrial.measure.plan import SamplingPlan, block_seed
from kvtrial.measure.specs import AttentionSpec
from kvtrial.registration import Protocol
from kvtrial.run.journal import Attempt
from kvtrial.stages.common import (
    Block,
    Cell,
    CellRun,
    Stage,
    Work,
    exit_tracked,
    run_whole,
)

MODULE = "kvtrial.measure.attention"
#: Layers of different rows that a synthetic shape has.
SYNTHETIC_LAYERS = 4


def shapes(protocol: Protocol, own: dict[str, int]) -> dict[str, dict[str, int]]:
    """Name → shape; the model's own first, then those that are registered beside it."""
    found = {name_of(own): own}
    for shape in protocol["m1"]["shapes"]:
        sizes = {key: int(size) for key, size in shape.items() if isinstance(size, int)}
        found.setdefault(name_of(shape), {**sizes, "layers": SYNTHETIC_LAYERS})
    return found


def work(stage: Stage, names: list[str]) -> Work:
    """What a block of this stage is."""
    return Work(MODULE, lambda block, own, _: block_spec(stage, block, own), names)


def cell_runs(stage: Stage, attempt: Attempt, cells: list[Cell], names: list[str]) -> list[CellRun]:
    """Every head shape and context."""
    rules = stage.protocol["m1"]
    own, *others = shapes(stage.protocol, stage.workload.shape)
    counts = {own: rules["blocks"], **dict.fromkeys(others, rules["shape_blocks"])}
    return [
        CellRun(
            stage,
            attempt,
            work(stage, names),
            {**cell, "shape": name},
            SamplingPlan.fixed(stage.protocol, count),
        )
        for name, count in counts.items()
        for cell in cells
        if cell["sessions"] == 1
    ]


def block_spec(stage: Stage, block: Block, names: list[str]) -> AttentionSpec:
    """What `kvtrial.measure.attention` is told."""
    rules = stage.protocol["m1"]
    warmup = rules["warmup_iterations"]
    seed = block_seed(stage.protocol["decision"]["seed"], block.cell, block.number)
    own = stage.workload.shape
    shape = shapes(stage.protocol, own)[block.cell["shape"]]
    return AttentionSpec(
        candidates=names,
        shape=shape,
        orders=rotation.orders(names, warmup, seed)[:warmup]
        + rotation.orders(names, rules["iterations"], seed + 1),
        snapshots=stage.snapshots(block.cell["context"], 1) if shape == own else [],
        synthetic_tokens=block.cell["context"],
        threads=block.cell["threads"],
        probes=stage.protocol["probes"],
        page_tokens=stage.protocol["page_tokens"],
        warmup_iterations=warmup,
        rotation_llc_multiple=rules["rotation_llc_multiple"],
        seed=seed,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("m1", __doc__, argv)
    with stage.attempt() as attempt:
        names = stage.runnable(attempt, timed=True)
        runs = cell_runs(stage, attempt, stage.measured_cells(attempt), names)
        run_whole(stage, attempt, runs)
    return 0


if __name__ == "__main__":
    exit_tracked("m1", main)
