"""Stage ``report``: the page for people, with the figures that MLflow shows too.

``python -m kvtrial.stages.after.report --run-dir results/<run_id>``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtrial import tracking
from kvtrial.run import events
from kvtrial.show import report


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    args = parser.parse_args(argv)
    report.write(args.run_dir, events.read_run(args.run_dir))
    tracking.log_verdict(args.run_dir)
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
