"""How a command line ends: an error becomes one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvtrial.host.printed import print_anything
from kvtrial.run import loading
from kvtrial.run.layout import ConfigError, prepare_environment
from kvtrial.run.loading import EXIT_INTERRUPTED

EXIT_FAILED, EXIT_USAGE = 1, 2
#: Of `kvtrial verdict` and `kvtrial decide`: all went well, and the answer is that nothing could be decided.
EXIT_INCONCLUSIVE = 4
#: Of `kvtrial try --fail-below`: all went well, and the candidate is slower than that.
EXIT_SLOWER = 5


def _is_ours(error: BaseException) -> bool:
    """Whether the message was written for the person at the terminal."""
    # An error of the module that runs as a command, such as a stage's own, is of __main__.
    return type(error).__module__.partition(".")[0] in ("kvtrial", "__main__")


def exit_with(main: Callable[[], int]) -> None:
    """Run a command line and exit: 0, 1 failed, 2 wrong usage or unknown name, 130 interrupted.

    Errors of this package and of the operating system are one line on stderr; anything else is a
    fault of ours and keeps its traceback.
    """
    prepare_environment()
    print_anything()
    try:
        loading.done()
        code = main()
    except KeyboardInterrupt:
        print("kvtrial: interrupted; what was finished is kept", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; there is nobody to tell.
        sys.stderr.close()
        code = EXIT_FAILED
    except Exception as error:
        if not (_is_ours(error) or isinstance(error, OSError)):
            raise
        print(f"kvtrial: {error}", file=sys.stderr)
        unknown = isinstance(error, (LookupError, ConfigError))
        code = EXIT_USAGE if unknown else EXIT_FAILED
    sys.exit(code)
