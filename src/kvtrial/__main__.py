"""``python -m kvtrial``."""

from kvtrial.tools.command import exit_with, main

exit_with(main)
