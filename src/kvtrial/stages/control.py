"""Stage ``control``: the protocol's control candidate, measured once, beside the pairs.

``python -m kvtrial.stages.control --run-dir DIR --gguf FILE [--profile default|full]``

Reads what ``m1`` and ``m2`` read; writes ``events/control.parquet``: a block of a whole decode, as in
``m2``, and one of the attention region alone, as in ``m1``, each in a process where nobody else runs.
The control may be so slow that every block of the paired design would take minutes longer for it, so
it has none there.
"""

from __future__ import annotations

import sys
from functools import partial

from kvtrial.measure import shapes
from kvtrial.stages import m1, m2
from kvtrial.stages.common import Block, Cell, Stage, StageError, exit_tracked, run_blocks
from kvtrial.stages.progress import Progress


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("control", __doc__, argv)
    control = stage.protocol.get("control")
    with stage.attempt() as attempt:
        if control is None:
            return 0
        name = control["candidate"]
        try:
            stage.runnable(attempt, timed=True, names=[name])
        except StageError as reason:  # its own row is in the journal; the run goes on
            print(f"control: {reason}", file=sys.stderr, flush=True)
            return 0
        cell: Cell = {"context": control["context"], "sessions": 1, "threads": 1}
        decode = Block(cell, 0, [name])
        region = Block({**cell, "shape": shapes.name_of(stage.workload["shape"])}, 0, [name])
        estimated = stage.estimated(attempt, [decode, region], gated=True)
        with Progress("control", estimated, in_seconds=True) as progress:
            for kind, block in ((m2, decode), (m1, region)):
                run_blocks(
                    stage,
                    attempt,
                    kind.MODULE,
                    [block],
                    partial(kind.block_spec, stage),
                    progress,
                    gated=True,
                )
    return 0


if __name__ == "__main__":
    exit_tracked("control", main)
