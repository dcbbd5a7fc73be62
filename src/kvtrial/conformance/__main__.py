"""``python -m kvtrial.conformance CANDIDATE OUT.json``: the suite on one candidate.

Status 0 when nothing failed, 1 when something did, 2 when there was nothing to try. Progress goes to
stdout, a line a test. Starts itself again with the allocation counter in front of the C library,
where the platform has one.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path

from kvtrial import candidates
from kvtrial.conformance.isolated import result, write
from kvtrial.conformance.suite import TESTS, Outcome, run
from kvtrial.contract import PAGE_TOKENS, CandidateNotBuilt, KVError
from kvtrial.contract.arguments import shown
from kvtrial.host import build
from kvtrial.host.arguments import page_sizes
from kvtrial.measure import allocations


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtrial.conformance", description=__doc__)
    parser.add_argument("candidate", help="a registered name, such as K1")
    parser.add_argument("out", type=Path, help="the JSON to write")
    parser.add_argument(
        "--page-tokens",
        type=page_sizes,
        default=PAGE_TOKENS,
        help="page sizes P in tokens, with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--tests",
        nargs="+",
        choices=[test.name for test in TESTS],
        metavar="NAME",
        default=[test.name for test in TESTS],
        help="names of tests (default: all)",
    )
    chosen = parser.parse_args(arguments)
    faulthandler.enable()
    count_allocations()
    try:
        candidate = candidates.get(chosen.candidate)
        if candidate.not_built is not None:
            raise CandidateNotBuilt(f"{candidate.name} is not built: {candidate.not_built}")
        build.refuse_stale()
    except KVError as error:
        parser.exit(2, f"{error}\n")
    tests = [test for test in TESTS if test.name in chosen.tests]
    document = result(candidate, run(candidate, chosen.page_tokens, tests, _tell))
    try:
        write(chosen.out, document)
    except OSError as error:
        parser.exit(2, f"{shown(str(chosen.out))} can't be written ({error}); give another file\n")
    return 0 if document["passed"] else 1


def count_allocations() -> None:
    """Replace this process by one that counts, unless it does or can't."""
    wanted = allocations.preload_environment()
    if wanted is None or os.environ.get("LD_PRELOAD") == wanted["LD_PRELOAD"]:
        return
    arguments = [sys.executable, "-m", "kvtrial.conformance", *sys.argv[1:]]
    os.execve(sys.executable, arguments, {**os.environ, **wanted})


def _tell(outcome: Outcome) -> None:
    detail = f"  {outcome.detail}" if outcome.detail else ""
    print(f"{outcome.status.value:6} P={outcome.page_tokens} {outcome.test}{detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
