"""A candidate's result as JSON, made in a process of its own so that a crash is a result too."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, TypedDict

from kvtrial.conformance.suite import TESTS, Outcome, Status
from kvtrial.contract import PAGE_TOKENS, Candidate
from kvtrial.host import build
from kvtrial.host.files import write_text
from kvtrial.host.records import read
from kvtrial.measure import allocations, exclusive

#: What `kvtrial.conformance.__main__` says of a test.
_OUTCOME = re.compile(r"(?:passed|failed|gap) +P=(?P<page_tokens>\d+) (?P<test>\w+)")


class Said(TypedDict):
    """A test's end at a page size: passed, failed or gap, and in what words."""

    status: str
    detail: str


class Result(TypedDict):
    """A candidate's JSON: `result`."""

    candidate: str
    title: str
    profile: str
    capabilities: list[str]
    missing_capabilities: list[str]
    build: dict[str, Any]
    allocations_counted: bool
    outcomes: dict[str, dict[str, Said]]  #: by test and page size
    gaps: list[str]
    failed: list[str]
    crash: str
    passed: bool


def result(candidate: Candidate, outcomes: list[Outcome], crash: str = "") -> Result:
    """What is kept of a candidate: outcomes by test and page size, gaps, and whether it passed.

    A gap is not a failure: ``passed`` says that nothing failed, ``gaps`` what is missing;
    `Candidate.missing_capabilities` decides who can win.
    """
    by_test: dict[str, dict[str, Said]] = {}
    for o in outcomes:
        by_test.setdefault(o.test, {})[str(o.page_tokens)] = {
            "status": o.status.value,
            "detail": o.detail,
        }
    return {
        "candidate": candidate.name,
        "title": candidate.title,
        "profile": candidate.profile.name,
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


def write(path: Path, document: Result) -> None:
    """Write a document as JSON."""
    write_text(path, json.dumps(document, indent=1) + "\n")


def run_isolated(
    name: str,
    out: Path,
    page_tokens: tuple[int, ...] = PAGE_TOKENS,
    tests: tuple[str, ...] = (),
    timeout_s: float = 1800,
    on_outcome: Callable[[str, int], None] | None = None,
    echo: Callable[[str], None] = lambda line: None,
) -> Result:
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
    on_outcome : callable, optional
        Told the name and the page size of each test as it ends, from a thread of its own.
    echo : callable
        Told each line that the suite says, likewise.

    Returns
    -------
    Result
        The document in ``out``; with ``crash`` set and ``passed`` false where the process ended by a
        signal, without a result, or not in time. ``crash`` names the test that it was in.
    """
    from kvtrial import candidates

    out = Path(out)
    out.unlink(missing_ok=True)
    pages = ",".join(str(p) for p in page_tokens)
    command = [sys.executable, "-m", "kvtrial.conformance", name, str(out), "--page-tokens", pages]
    command += ["--tests", *tests] if tests else []
    ended: list[tuple[str, int]] = []

    def listen(line: str) -> None:
        echo(line)
        if outcome := _OUTCOME.match(line):
            ended.append((outcome["test"], int(outcome["page_tokens"])))
            if on_outcome is not None:
                on_outcome(*ended[-1])

    code, stderr = _run(command, timeout_s, listen)
    asked = [test.name for test in TESTS if not tests or test.name in tests]
    inside = next(
        (f"in {t} at P={p}" for p in page_tokens for t in asked if (t, p) not in ended),
        "at its end",
    )
    if code is None:
        crash = f"not finished after {timeout_s:g} s, {inside}"
    elif out.is_file():
        return read(Result, json.loads(out.read_bytes()), out.name)
    else:
        crash = f"crashed {inside}: {_ending(code, stderr)}"
    document = result(candidates.get(name), [], crash)
    write(out, document)
    return document


def _run(
    command: list[str], timeout_s: float, listen: Callable[[str], None]
) -> tuple[int | None, str]:
    """A process's status, None where it did not end in time, and what it wrote to stderr."""
    # It would start itself once more to count allocations, if it did not come to count them.
    environment = {**os.environ, **(allocations.preload_environment() or {})}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=exclusive.held(),  # the machine stays held until the suite ends, whoever started it
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        # Beside, so that a process that says nothing any more is ended in time too.
        listener = threading.Thread(target=_listen, args=(process.stdout, listen))
        listener.start()
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout_s)
        finally:
            process.kill()  # nothing where it has ended
            process.wait()
            listener.join()
            process.stdout.close()
        errors.seek(0)
        return code, errors.read()


def _listen(said: IO[str], listen: Callable[[str], None]) -> None:
    for line in said:
        listen(line.rstrip("\n"))


def _ending(code: int, stderr: str) -> str:
    """How it ended, with what it was at: of a dump of its stack, the frame that was called last."""
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    lines = stderr.strip().splitlines()
    frame = next((line.strip() for line in lines if line.lstrip().startswith("File ")), None)
    return f"{how}: {frame or (lines or ['nothing on stderr'])[-1]}"
