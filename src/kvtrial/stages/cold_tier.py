"""Stage ``cold_tier``: Z1, Z2, a plain file and a prefill side by side, then the crash matrix.

``python -m kvtrial.stages.cold_tier --run-dir DIR --gguf FILE``

Reads ``manifest.json``, ``protocol.json`` and ``workload.json`` of the run; writes
``events/cold_tier.parquet``. The disk below `kvtrial.host.paths.scratch_dir` is the one that is measured: that of
the results, or that of ``$KVTRIAL_SCRATCH``. The two stores are judged as one pair, so a failure of either leaves
the cold verdict open and the rest of the run untouched.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtrial.cold import KINDS
from kvtrial.host import paths
from kvtrial.measure import rotation
from kvtrial.measure.cold import faults
from kvtrial.measure.plan import SamplingPlan
from kvtrial.measure.specs import CrashSpec, RestoreSpec
from kvtrial.registration import Cell
from kvtrial.run.journal import Attempt
from kvtrial.run.layout import ConfigError
from kvtrial.stages import workload
from kvtrial.stages.common import Block, CellRun, Stage, Work, exit_tracked, run_arms, run_cells
from kvtrial.stages.progress import Progress

MODULE = "kvtrial.measure.cold.restore"
CRASH_MODULE = "kvtrial.measure.cold.crash"
#: Whose pages are spilled: the reference path's.
STORE = "K1"
WARM_REPETITIONS = 3
#: Such a round takes about half a second, with the other faults; a measured block about ten.
_CRASH_WEIGHT, _BLOCK_WEIGHT = 1.0, 10.0
#: A prefill is measured up to here; computing more tokens takes at least in proportion.
RECOMPUTE_TOKENS = 512


def block_spec(stage: Stage, block: Block, names: list[str], folder: Path) -> RestoreSpec:
    """What `kvtrial.measure.cold.restore` is told."""
    seed = stage.protocol["decision"]["seed"]
    return RestoreSpec(
        candidates=names,
        folder=str(folder),
        order=rotation.orders(names, block.number + 1, seed)[block.number],
        snapshot=stage.snapshots(block.cell["context"], 1)[0],
        store=STORE,
        shape=stage.workload.shape,
        # The workload's name says how the rows were made: rows of another way are never restored.
        model_sha256=f"{stage.model.sha256}+{stage.workload.workload_id}",
        activations=workload.ACTIVATIONS,
        page_tokens=stage.protocol["page_tokens"],
        prefix_tokens=stage.protocol["cold"]["prefix_tokens"],
        gguf=str(stage.gguf),
        recompute_tokens=RECOMPUTE_TOKENS,
        batches=stage.protocol["cold"]["batches"],
        repetitions=WARM_REPETITIONS,
    )


def crash_all(stage: Stage, attempt: Attempt, folder: Path, progress: Progress) -> None:
    """The crash matrix of each store, in a process whose disk can fail."""
    for kind in KINDS:
        unit = f"crash-{kind}"
        if not attempt.has(unit):
            spec = CrashSpec(
                candidates=[kind],
                folder=str(folder / unit),
                rounds=stage.protocol["cold"]["crash_rounds"],
                batches=stage.protocol["cold"]["batches"],
                seed=stage.protocol["decision"]["seed"],
            )
            alone = {"threads": 1}
            preload = faults.preload_environment()
            rows = run_arms(stage, attempt, CRASH_MODULE, spec, alone, preload)
            attempt.put(unit, stage.events(rows))
        progress.done(unit)


@contextmanager
def scratch(stage: Stage) -> Iterator[Path]:
    """An empty folder on the disk to be measured; what a killed run left in it goes first."""
    folder = paths.scratch_dir(stage.run_dir)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"the cold tier can't be measured in {folder}: {error.strerror}; let KVTRIAL_SCRATCH name a folder on "
            "this machine's own disk, or unset it"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("cold_tier", __doc__, argv)
    rules = stage.protocol["cold"]
    cell: Cell = {"context": rules["prefix_tokens"], "sessions": 1, "threads": 1}
    names = [*KINDS, "plain", "recompute"]
    plan = SamplingPlan.fixed(stage.protocol, rules["blocks"])
    planned = [Block(cell, number) for number in range(plan.first)]
    weights = {f"crash-{kind}": _CRASH_WEIGHT * rules["crash_rounds"] for kind in KINDS}
    weights |= {block.name: _BLOCK_WEIGHT for block in planned}
    with (
        stage.attempt() as attempt,
        scratch(stage) as folder,
        Progress("cold_tier", weights) as progress,
    ):
        work = Work(MODULE, lambda block, own, _: block_spec(stage, block, own, folder), names)
        run_cells([CellRun(stage, attempt, work, cell, plan)], progress)
        crash_all(stage, attempt, folder, progress)
    return 0


if __name__ == "__main__":
    exit_tracked("cold_tier", main)
