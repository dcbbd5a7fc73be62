"""Stage ``conformance``: the suite on every candidate of the protocol and on its control,
each in its own process.

Writes ``conformance/<candidate>.json`` and ``events/conformance.parquet``. A candidate that fails,
crashes or was not built costs its own column, not the run.

``python -m kvtrial.stages.conformance --run-dir DIR [--jobs N]``
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from kvtrial import candidates
from kvtrial.conformance import TESTS, isolated
from kvtrial.host import build
from kvtrial.measure.exclusive import exclusive
from kvtrial.run import events, protocol
from kvtrial.run.journal import Row
from kvtrial.stages.common import exit_tracked
from kvtrial.stages.progress import Progress

_VALUES = {"passed": 1.0, "failed": 0.0, "gap": float("nan")}


def outcome_events(document: isolated.Result) -> list[Row]:
    """Rows ``conformance/outcome`` of one candidate: 1 passed, 0 failed, NaN a gap."""
    name = document["candidate"]
    rows = [
        events.event(
            "conformance/outcome",
            candidate=name,
            value=_VALUES[outcome["status"]],
            text=f"{test}@P{page_tokens}",
        )
        for test, by_page_tokens in document["outcomes"].items()
        for page_tokens, outcome in by_page_tokens.items()
    ]
    if document["crash"]:
        text = f"suite ({document['crash']})"
        rows.append(events.event("conformance/outcome", candidate=name, value=0.0, text=text))
    return rows


def _unit(name: str, page_tokens: int) -> str:
    return f"{name} at P={page_tokens}"


def units(names: Iterable[str], page_tokens: tuple[int, ...]) -> dict[str, float]:
    """The suite's units for `Progress`: a candidate at one page size."""
    return {_unit(name, p): 1.0 for name in names for p in page_tokens}


@contextmanager
def followed(
    progress: Progress, name: str, page_tokens: tuple[int, ...]
) -> Iterator[Callable[[str, int], None]]:
    """Tell ``progress`` how far a candidate is: the body hands what this gives to `run_isolated`."""
    ended: Counter[int] = Counter()

    def on_outcome(test: str, p: int) -> None:
        ended[p] += 1
        if ended[p] < len(TESTS):
            progress.within(_unit(name, p), ended[p] / len(TESTS))
        else:
            progress.done(_unit(name, p))

    yield on_outcome
    for p in page_tokens:
        if ended[p] < len(TESTS):
            progress.done(_unit(name, p), "not finished")


def try_candidate(
    name: str, out: Path, page_tokens: tuple[int, ...], progress: Progress
) -> isolated.Result:
    """Write one candidate's JSON and return it."""
    candidate = candidates.get(name)
    if candidate.not_built is not None:
        document = isolated.result(candidate, [], f"not built: {candidate.not_built}")
        isolated.write(out, document)
        progress.say(f"{name} is not built: {candidate.not_built}")
        return document
    with followed(progress, name, page_tokens) as on_outcome:
        document = isolated.run_isolated(name, out, page_tokens, on_outcome=on_outcome)
    why = ", ".join(filter(None, [*document["failed"], document["crash"]]))
    progress.say(f"{name} passed" if document["passed"] else f"{name} FAILED: {why}")
    return document


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="candidates at a time")
    args = parser.parse_args(argv)
    build.refuse_stale()
    registered = protocol.load(args.run_dir / "protocol.json")
    folder = args.run_dir / "conformance"
    page_tokens = tuple(registered["conformance"]["page_tokens"])
    entrants = protocol.entrants(registered)
    built = [name for name in entrants if candidates.get(name).not_built is None]
    rows = [events.event("attempt/complete", value=1.0)]
    # Threads only wait for processes here. Nothing is timed, so candidates may run side by side, but not
    # beside what another pipeline times.
    with (
        exclusive(f"conformance of {args.run_dir.name}"),
        Progress("conformance", units(built, page_tokens)) as progress,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        documents = pool.map(
            lambda name: try_candidate(name, folder / f"{name}.json", page_tokens, progress),
            entrants,
        )
        found = dict(zip(entrants, documents))
    for name, document in found.items():
        rows += outcome_events(document) if name in built else []
        # Another pipeline on this run removes what is there as its own job begins.
        if not (folder / f"{name}.json").is_file():
            isolated.write(folder / f"{name}.json", document)
    common = {
        "stage": "conformance",
        "protocol_sha256": protocol.sha256(registered),
        "build_id": build.facts()["build_id"],
        "binary_sha256": build.binary_sha256(),
    }
    table = events.to_frame({**row, **common} for row in rows)
    events.write(table, args.run_dir / "events" / "conformance.parquet")
    return 0


if __name__ == "__main__":
    exit_tracked("conformance", main)
