"""A candidate's result as JSON, made in a process of its own so that a crash is a result too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtrial import build
from kvtrial.conformance.suite import Outcome, Status
from kvtrial.contract import PAGE_TOKENS, Candidate
from kvtrial.measure import allocations


def result(candidate: Candidate, outcomes: list[Outcome], crash: str = "") -> dict[str, Any]:
    """What is kept of a candidate: outcomes by test and page size, gaps, and whether it passed.

    A gap is not a failure: ``passed`` says that nothing failed, ``gaps`` what is missing;
    `Candidate.missing_capabilities` decides who can win.
    """
    by_test: dict[str, dict[str, dict[str, str]]] = {}
    for o in outcomes:
        by_test.setdefault(o.test, {})[str(o.page_tokens)] = {
            "status": o.status.value,
            "detail": o.detail,
        }
    return {
        "candidate": candidate.name,
        "title": candidate.title,
        "profile": candidate.profile.value,
        "capabilities": sorted(c.value for c in candidate.capabilities),
        "missing_capabilities": list(candidate.missing_capabilities),
        "build": build.facts(),
        "allocations_counted": allocations.available(),
        "outcomes": by_test,
        "gaps": sorted({o.detail for o in outcomes if o.status is Status.GAP}),
        "failed": sorted({o.test for o in outcomes if o.status is Status.FAILED}),
        "crash": crash,
        "passed": bool(outcomes)
        and not crash
        and all(o.status is not Status.FAILED for o in outcomes),
    }


def write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON beside ``path`` and rename it, so that half a file is never read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def run_isolated(
    name: str,
    out: Path,
    page_tokens: tuple[int, ...] = PAGE_TOKENS,
    tests: tuple[str, ...] = (),
    timeout_s: float = 1800,
) -> dict[str, Any]:
    """Run the suite on the registered candidate ``name`` in a fresh process.

    Parameters
    ----------
    name : str
        A registered candidate.
    out : Path
        Where its JSON goes.
    page_tokens : tuple of int
        Page sizes P in tokens.
    tests : tuple of str
        Names of tests; none for all.
    timeout_s : float
        Seconds after which the process is ended and the candidate has failed.

    Returns
    -------
    dict
        The document in ``out``; with ``crash`` set and ``passed`` false where the process ended by a
        signal, without a result, or not in time.
    """
    from kvtrial import candidates

    out = Path(out)
    out.unlink(missing_ok=True)
    pages = ",".join(str(p) for p in page_tokens)
    command = [sys.executable, "-m", "kvtrial.conformance", name, str(out), "--page-tokens", pages]
    command += ["--tests", *tests] if tests else []
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        crash = f"not finished after {timeout_s:g} s"
    else:
        if out.is_file():
            document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return document
        crash = _ending(done.returncode, done.stderr)
    document = result(candidates.get(name), [], crash)
    write(out, document)
    return document


def _ending(code: int, stderr: str) -> str:
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    last = stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
    return f"{how}: {last[0]}"
