"""``python -m kvtrial``."""

from kvtrial.cli import exit_with, main

exit_with(main)
