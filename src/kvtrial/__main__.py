"""``python -m kvtrial``, and the installed command ``kvtrial``.

Nothing but Python's own is imported above `command`: Ctrl-C is to end it quietly from the first moment on.
"""

from __future__ import annotations

import sys

from kvtrial.run import loading


def command() -> None:
    """Load the command, then run it; see `kvtrial.run.exits.exit_with` for what becomes of Ctrl-C there."""
    loading.begun()
    if sys.argv[1:2] == ["--names"]:  # a shell completes a word, and a person waits
        from kvtrial.tools import completion

        print(*completion.names(sys.argv[-1]), sep="\n")
        return
    from kvtrial.run.exits import exit_with
    from kvtrial.tools.command import main

    exit_with(main)


if __name__ == "__main__":
    command()
