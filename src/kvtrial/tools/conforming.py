"""``kvtrial conformance NAME``: the suite on one candidate, told as it goes, with a line at the end.

The suite runs in a process of its own (`kvtrial.conformance.isolated`): a kernel that crashes is a result too.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvtrial import candidates
from kvtrial.conformance import TESTS, isolated
from kvtrial.contract import CandidateNotBuilt
from kvtrial.contract.arguments import shown
from kvtrial.host import build, printed
from kvtrial.run.layout import ConfigError


def try_suite(
    name: str, page_tokens: tuple[int, ...], tests: Sequence[str] = (), out: Path | None = None
) -> isolated.Result:
    """Run the suite; a line a test goes to stdout as it ends.

    Parameters
    ----------
    name : str
        A registered candidate.
    page_tokens : tuple of int
        Page sizes P.
    tests : sequence of str
        Names of tests; none for all.
    out : Path, optional
        Where the JSON goes as well.

    Raises
    ------
    UnknownCandidate, CandidateNotBuilt, StaleBuild
    ConfigError
        No such test.
    """
    candidate = candidates.get(name)
    if candidate.not_built is not None:
        raise CandidateNotBuilt(f"{name} is not built: {candidate.not_built}")
    build.refuse_stale()
    known = [test.name for test in TESTS]
    for test in tests:
        if test not in known:
            raise ConfigError(
                f"no test {shown(test)}; known: {', '.join(known)}{printed.did_you_mean(test, known)}"
            )
    with tempfile.TemporaryDirectory(prefix="kvtrial-conformance-") as folder:
        return isolated.run_isolated(
            name,
            out or Path(folder) / f"{name}.json",
            page_tokens,
            tuple(tests),
            echo=lambda line: print(line, flush=True),
        )


def summary(found: isolated.Result) -> str:
    """``K1: 36 passed, 0 failed, 0 gaps``; that it crashed, and in what."""
    counts = Counter(
        outcome["status"] for sizes in found["outcomes"].values() for outcome in sizes.values()
    )
    said = [
        f"{counts['passed']} passed",
        f"{counts['failed']} failed",
        printed.count(counts["gap"], "gap"),
    ]
    text = f"{found['candidate']}: {', '.join(said)}"
    if found["failed"]:
        text += f" ({', '.join(found['failed'])})"
    return text + (f"; {found['crash']}" if found["crash"] else "")
