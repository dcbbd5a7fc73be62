"""``python -m kvtrial``, and the installed command ``kvtrial``.

Nothing but Python's own is imported above `command`: Ctrl-C is to end it quietly from the first moment on.
"""

from __future__ import annotations

from kvtrial.run import loading


def command() -> None:
    """Load the command, then run it; see `kvtrial.run.exits.exit_with` for what becomes of Ctrl-C there."""
    loading.begun()
    from kvtrial.run.exits import exit_with
    from kvtrial.tools.command import main

    exit_with(main)


if __name__ == "__main__":
    command()
