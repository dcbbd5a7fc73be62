"""Ctrl-C while a command still loads its modules ends it with 130 and one line, as it does later.

Nothing but Python's own is imported here, so that it comes first.
"""

from __future__ import annotations

import os
import signal

EXIT_INTERRUPTED = 130


def _end(number: int, frame: object) -> None:
    """End at once: an exception amid an import may be taken for an import that failed."""
    os.write(2, b"kvtrial: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def begun() -> None:
    """From here to `done` Ctrl-C ends the process; whoever is not to hear it (nohup) goes on not hearing it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def done() -> None:
    """All is loaded: Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
