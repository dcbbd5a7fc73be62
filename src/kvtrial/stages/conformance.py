"""Stage ``conformance``: the suite on every candidate of the protocol and on its control,
each in its own process.

Writes ``conformance/<candidate>.json`` and ``events/conformance.parquet``. A candidate that fails,
crashes or was not built costs its own column, not the run.

``python -m kvtrial.stages.conformance --run-dir DIR [--jobs N]``
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtrial import build, candidates, events, protocol
from kvtrial.conformance import isolated
from kvtrial.stages.common import exit_tracked

_VALUES = {"passed": 1.0, "failed": 0.0, "gap": float("nan")}


def outcome_events(document: dict[str, Any]) -> list[dict[str, Any]]:
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


def try_candidate(name: str, out: Path, page_tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """Write one candidate's JSON and return its rows; none for one that was not built."""
    candidate = candidates.get(name)
    if candidate.not_built is not None:
        document = isolated.result(candidate, [], f"not built: {candidate.not_built}")
        isolated.write(out, document)
        print(f"conformance: {name} is not built: {candidate.not_built}", file=sys.stderr)
        return []
    document = isolated.run_isolated(name, out, page_tokens)
    said = "passed" if document["passed"] else "FAILED " + ", ".join(document["failed"])
    print(f"conformance: {name} {said} {document['crash']}", file=sys.stderr)
    return outcome_events(document)


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="candidates at a time")
    args = parser.parse_args(argv)
    build.refuse_stale()
    registered = protocol.load(args.run_dir / "protocol.json")
    folder = args.run_dir / "conformance"
    rows = [events.event("attempt/complete", value=1.0)]
    # Threads only wait for processes here. Nothing is timed, so candidates may run side by side.
    with ThreadPoolExecutor(args.jobs) as pool:
        page_tokens = tuple(registered["conformance"]["page_tokens"])
        for found in pool.map(
            lambda name: try_candidate(name, folder / f"{name}.json", page_tokens),
            protocol.entrants(registered),
        ):
            rows += found
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
