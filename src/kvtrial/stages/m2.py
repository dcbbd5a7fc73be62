"""Stage ``m2``: whole decodes, paired by block.

``python -m kvtrial.stages.m2 --run-dir DIR --gguf FILE [--profile default|full]``

Reads ``manifest.json``, ``protocol.json``, ``workload.json`` and ``conformance/`` of the run;
writes ``events/m2.parquet``. Finished blocks are kept in the journal: after a kill the same command
goes on.
"""

from __future__ import annotations

import time
from typing import Any

from kvtrial.journal import Attempt
from kvtrial.measure import allocations, child
from kvtrial.stages.common import (
    Block,
    Cell,
    Progress,
    Row,
    Stage,
    blocks,
    exit_tracked,
    run_arms,
    run_blocks,
)

MODULE = "kvtrial.measure.block"
#: Steps of the allocation pass: over the end of a page whatever its size.
ALLOCATION_STEPS = 72
ALLOCATION_THREADS = (1, 2)


def block_spec(stage: Stage, cell: Cell) -> dict[str, Any]:
    """What `kvtrial.measure.block` is told, but for the candidates."""
    return {
        "gguf": str(stage.gguf),
        "snapshots": stage.snapshots(cell["context"], cell["sessions"]),
        "threads": cell["threads"],
        "page_tokens": stage.protocol["page_tokens"],
        "warmup_steps": stage.protocol["m2"]["warmup_steps"],
        "decode_steps": stage.protocol["decode_steps"],
        "probe": True,
    }


def estimate(
    stage: Stage, attempt: Attempt, planned: list[Block], names: list[str]
) -> dict[str, float]:
    """Seconds that each block takes, from two quick blocks without probes.

    Step time and the time to load are both nearly linear in the filled positions: the smallest and
    the largest cell fix the lines.
    """
    if not planned:
        return {}
    cells = sorted((b.cell for b in planned), key=lambda c: c["context"] * c["sessions"])
    steps = stage.protocol["m2"]["warmup_steps"] + stage.protocol["decode_steps"]
    points: list[tuple[int, float]] = []
    for cell in (cells[0], cells[-1]):
        columns = {key: cell[key] for key in ("context", "sessions", "threads")}
        spec = {**block_spec(stage, cell), "warmup_steps": 1, "decode_steps": 1, "probe": False}
        start = time.monotonic()
        rows = run_arms(stage, attempt, MODULE, names, spec, columns)
        whole = time.monotonic() - start
        step = sum(r["value"] for r in rows if r["metric"] == "m2/step_ms") / 1e3
        points.append((cell["context"] * cell["sessions"], whole + (steps - 2) * step))
    (x0, y0), (x1, y1) = points
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    probes = 0.2 * len(names)  # two readings an arm
    return {
        b.name: y0 + slope * (b.cell["context"] * b.cell["sessions"] - x0) + probes for b in planned
    }


def count_allocations(stage: Stage, attempt: Attempt, names: list[str]) -> None:
    """The untimed pass that counts allocation calls of all threads, in a process that can."""
    if attempt.has("allocations"):
        return
    rows: list[Row] = []
    for threads in ALLOCATION_THREADS:
        found = child.run(
            "kvtrial.measure.allocation_pass",
            {
                "shape": stage.workload["shape"],
                "candidates": [n for n in names if not attempt.has(f"died-{n}")],
                "threads": threads,
                "page_tokens": stage.protocol["page_tokens"],
                "steps": ALLOCATION_STEPS,
            },
            threads=threads,
            preload=allocations.preload_environment(),
        )
        rows += stage.events(found, threads=threads)
    attempt.put("allocations", rows)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("m2", __doc__, argv)
    with stage.attempt() as attempt:
        names = stage.runnable(attempt, timed=True)
        seed = stage.protocol["decision"]["bootstrap_seed"]
        planned = [b for cell in stage.cells() for b in blocks(cell, cell["blocks"], names, seed)]
        left = [b for b in planned if not attempt.has(f"{b.name}-trial0")]
        with Progress("m2", estimate(stage, attempt, left, names), in_seconds=True) as progress:
            run_blocks(
                stage,
                attempt,
                MODULE,
                planned,
                lambda block: block_spec(stage, block.cell),
                progress,
                gated=True,
            )
        count_allocations(stage, attempt, names)
    return 0


if __name__ == "__main__":
    exit_tracked("m2", main)
