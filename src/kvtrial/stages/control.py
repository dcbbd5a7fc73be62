"""Stage ``control``: the protocol's control candidate, measured once, in rotation with the reference.

``python -m kvtrial.stages.control --run-dir DIR --gguf FILE [--profile default|full]``

Reads what ``m1`` and ``m2`` read; writes ``events/control.parquet``: a block of a whole decode, as in
``m2``, and one of the attention region alone, as in ``m1``. The control may be so slow that every block of
``m2`` would take minutes longer for it, so it has one of its own.
"""

from __future__ import annotations

import sys

from kvtrial.host import shapes
from kvtrial.measure.plan import SamplingPlan
from kvtrial.stages import m1, m2
from kvtrial.stages.common import (
    Cell,
    CellRun,
    Stage,
    StageError,
    exit_tracked,
    progress_of,
    run_cells,
)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("control", __doc__, argv)
    control = stage.protocol.get("control")
    with stage.attempt() as attempt:
        if control is None:
            return 0
        names = [stage.protocol["decision"]["reference"], control["candidate"]]
        try:
            stage.runnable(attempt, timed=True, names=names[1:])
        except StageError as reason:  # its own row is in the journal; the run goes on
            print(f"control: {reason}", file=sys.stderr, flush=True)
            return 0
        cell: Cell = {"context": control["context"], "sessions": 1, "threads": 1}
        region: Cell = {**cell, "shape": shapes.name_of(stage.workload.shape)}
        once = SamplingPlan.fixed(stage.protocol, 1)
        runs = [
            CellRun(stage, attempt, m2.work(stage, names), cell, once),
            CellRun(stage, attempt, m1.work(stage, names[1:]), region, once),
        ]
        with progress_of(stage, attempt, runs) as progress:
            if (ended := run_cells(runs, progress)) is not None:
                progress.say(f"not measured: {ended[1].reason}")
    return 0


if __name__ == "__main__":
    exit_tracked("control", main)
