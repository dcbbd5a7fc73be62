"""SIGTERM to the driver of a pipeline ends the stage that it waits for, as Ctrl-C at a terminal does.

Ctrl-C reaches every process of the terminal. A batch system, `timeout` or `kill` signals the driver alone, and
Snakemake then waits for the job, half an hour where it is a measuring stage; the batch system kills before. So the
driver hands the signal on. A stage ends cleanly by it within seconds, and its finished blocks are kept.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from types import FrameType
from typing import Any

import psutil

#: In the command line of what may be ended so; measured processes are their stage's to end.
_STAGES = "kvtrial.stages."
#: Seconds between two looks.
_LOOK_S = 0.5


def hand_on_sigterm() -> None:
    """From now on SIGTERM is sent on to the stages below this process, before what it did until now.

    To be called in the main thread when the driver has set its own handler, which is called all the same.
    """
    before = signal.getsignal(signal.SIGTERM)

    def hand_on(number: int, frame: FrameType | None) -> None:
        # In a thread of its own: Snakemake's handler takes a lock that the main thread may hold.
        threading.Thread(target=_end, args=(before, number), daemon=True).start()

    signal.signal(signal.SIGTERM, hand_on)


def _end(before: Any, number: int) -> None:
    if callable(before):
        before(number, None)  # no further job is begun
    told: set[psutil.Process] = set()
    while True:  # a job that was about to begin is met by a later look
        for process in stages_below(psutil.Process()):
            if process not in told:
                told.add(process)
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
        time.sleep(_LOOK_S)


def stages_below(process: psutil.Process) -> list[psutil.Process]:
    """The stages that run below a process, at any depth."""
    stages = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(part.startswith(_STAGES) for part in child.cmdline()[1:3]):
                stages.append(child)
    return stages
