"""Stage ``cold_tier``: Z1, Z2 and a plain file side by side, then writers that are killed.

``python -m kvtrial.stages.cold_tier --run-dir DIR --gguf FILE``

Reads ``manifest.json``, ``protocol.json`` and ``workload.json`` of the run; writes
``events/cold_tier.parquet``. The stores lie in the run's folder while they are measured, so it is the
disk that holds the results which is measured. The two stores are judged as one pair, so a failure of
either leaves the cold verdict open and the rest of the run untouched.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtrial.cold import KINDS, crash
from kvtrial.journal import Attempt
from kvtrial.stages.common import Block, Row, Stage, blocks, exit_tracked, run_blocks
from kvtrial.stages.progress import Progress

MODULE = "kvtrial.cold.measure"
#: Whose pages are spilled: the reference path's.
STORE = "K1"
WARM_REPETITIONS = 3
#: Such a round takes about a second, a measured block about ten.
_CRASH_WEIGHT, _BLOCK_WEIGHT = 1.0, 10.0


def block_spec(stage: Stage, block: Block, folder: Path) -> dict[str, Any]:
    """What `kvtrial.cold.measure` is told, but for the candidates."""
    return {
        "folder": str(folder),
        "snapshot": stage.snapshots(block.cell["context"], 1)[0],
        "store": STORE,
        "shape": stage.workload["shape"],
        "model_sha256": stage.model["sha256"],
        "page_tokens": stage.protocol["page_tokens"],
        "prefix_tokens": stage.protocol["cold"]["prefix_tokens"],
        "batches": stage.protocol["cold"]["batches"],
        "repetitions": WARM_REPETITIONS,
    }


def crash_rows(results: list[crash.Crash], kind: str) -> list[Row]:
    """Rows of the killed writers of one store; ``crash_recovered`` is 1 where nothing was lost."""
    rows: list[Row] = []
    for index, result in enumerate(results):
        columns = {"candidate": kind, "index": index}
        numbers = {
            "crash_recovered": float(not result.faults),
            "crash_acknowledged": float(result.acknowledged),
        }
        rows += [{**columns, "metric": f"cold/{m}", "value": v} for m, v in numbers.items()]
        rows += [{**columns, "metric": "cold/crash_fault", "text": f} for f in result.faults]
    return rows


def crash_all(stage: Stage, attempt: Attempt, folder: Path, progress: Progress) -> None:
    """Kill the registered number of writers of each store."""
    for kind in KINDS:
        unit = f"crash-{kind}"
        if not attempt.has(unit):
            rounds = stage.protocol["cold"]["crash_rounds"]
            results = crash.crash_rounds(kind, folder / unit, rounds)
            attempt.put(unit, stage.events(crash_rows(results, kind)))
        progress.done(unit)


@contextmanager
def scratch(stage: Stage) -> Iterator[Path]:
    """An empty folder beside the run's results; what a killed run left in it goes first."""
    folder = stage.run_dir / "cold-scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("cold_tier", __doc__, argv)
    rules = stage.protocol["cold"]
    cell = {"context": rules["prefix_tokens"], "sessions": 1, "threads": 1}
    seed = stage.protocol["decision"]["bootstrap_seed"]
    planned = blocks(cell, rules["blocks"], [*KINDS, "plain"], seed)
    weights = {f"crash-{kind}": _CRASH_WEIGHT * rules["crash_rounds"] for kind in KINDS}
    weights |= {block.name: _BLOCK_WEIGHT for block in planned}
    with (
        stage.attempt() as attempt,
        scratch(stage) as folder,
        Progress("cold_tier", weights) as progress,
    ):
        run_blocks(
            stage,
            attempt,
            MODULE,
            planned,
            lambda block: block_spec(stage, block, folder),
            progress,
            gated=False,
        )
        crash_all(stage, attempt, folder, progress)
    return 0


if __name__ == "__main__":
    exit_tracked("cold_tier", main)
