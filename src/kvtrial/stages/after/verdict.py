"""Stage ``verdict``: apply the fixed rule to a run's raw events.

``python -m kvtrial.stages.after.verdict --run-dir results/<run_id>``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtrial import tracking
from kvtrial.decision.verdict import Verdict, decide
from kvtrial.host.files import write_text
from kvtrial.run import events, protocol


def write_verdict(run_dir: Path) -> Verdict:
    """Decide from ``events/*.parquet`` and ``protocol.json`` alone and write ``verdict.json``.

    The same events give the same bytes: no time of day and no path is in them.
    """
    verdict = decide(events.read_run(run_dir), protocol.load(run_dir / "protocol.json"))
    write_text(run_dir / "verdict.json", verdict.to_json())
    return verdict


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        write_verdict(args.run_dir)
    except Exception as error:
        tracking.stop_trial(args.run_dir, f"{type(error).__name__}: {error}")
        raise
    tracking.log_verdict(args.run_dir)
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
