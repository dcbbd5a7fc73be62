"""``python -m kvtrial``, and the installed command ``kvtrial``.

Nothing but Python's own is imported above `command`: Ctrl-C is to end it quietly from the first moment on.
"""

from __future__ import annotations

import os
import signal

_INTERRUPTED = 130  # run.exits.EXIT_INTERRUPTED, before it can be imported


def _end(number: int, frame: object) -> None:
    """End at once: an exception amid an import may be taken for an import that failed."""
    os.write(2, b"kvtrial: interrupted\n")
    os._exit(_INTERRUPTED)


def command() -> None:
    """Load the command, then run it; see `kvtrial.run.exits.exit_with` for what becomes of Ctrl-C there."""
    before = signal.getsignal(signal.SIGINT)
    if (
        before is signal.default_int_handler
    ):  # whoever is not to hear it (nohup) goes on not hearing it
        signal.signal(signal.SIGINT, _end)
    from kvtrial.run.exits import exit_with
    from kvtrial.tools.command import main

    signal.signal(signal.SIGINT, before)
    exit_with(main)


if __name__ == "__main__":
    command()
