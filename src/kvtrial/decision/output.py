"""Whether the timed code did the work: judged from events, so that nobody wins by skipping it.

Three things are looked at. The compiled modules of every stage are those that passed conformance. An
arm gives the same tokens in every block of a cell. And what it gave while the clock ran is right: the
tokens are the baseline's up to a tie, attention alone is within the error bound of the float64 oracle at
iterations that a kernel can't know, and so is attention over what a decode has left behind.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvtrial.decision import gates


def binaries(events: pd.DataFrame) -> str | None:
    """Why the stages can't be one trial: their compiled modules differ. None where they are equal."""
    found = events.loc[events["binary_sha256"] != "", ["stage", "binary_sha256"]].drop_duplicates()
    if len(set(found["binary_sha256"])) <= 1:
        return None
    said = "; ".join(
        f"{stage} {binary[:12]}" for stage, binary in sorted(found.itertuples(index=False))
    )
    return f"the compiled modules are not the same in every stage: {said}"


def reasons(events: pd.DataFrame, protocol: dict[str, Any]) -> dict[str, list[str]]:
    """Candidate → what was wrong with its output in timed runs; only those where something was."""
    profiles = events[(events["stage"] == "run") & (events["metric"] == "candidate/profile")]
    profile_of = dict(zip(profiles["candidate"], profiles["text"]))
    found: dict[str, list[str]] = {}
    rows = events[events["stage"] == "m2"]
    keys = ["candidate", "context", "sessions", "threads"]
    hashes = rows[rows["metric"] == "output_sha256"]
    for (name, *cell), own in hashes.groupby(keys)["text"]:
        if len(set(own)) > 1:
            found.setdefault(str(name), []).append(
                f"m2: its output at {_where(cell)} is not the same in every block"
            )
    ties, baseline = protocol["m2"]["tie_margin"], protocol["parity"]["baseline"]
    differences = rows[rows["metric"] == "m2/margin_at_difference"]
    for (name, *cell), own in differences.groupby(keys)["value"]:
        limit = ties[profile_of[str(name)]]
        # `not <=` rather than `>`, and NaN kept: a NaN margin is no tie.
        largest = own.max(skipna=False)
        if not largest <= limit:
            found.setdefault(str(name), []).append(
                f"m2: another token than {baseline}'s at {_where(cell)} where "
                f"the margin is {largest:.4g}; a tie is at most {limit:g}"
            )
    compared = set(rows[rows["metric"] == "m2/agreed_steps"].groupby(keys).groups)
    for name, *cell in rows[rows["metric"] == "m2/step_ms"].groupby(keys).groups:
        if (name, *cell) not in compared:
            found.setdefault(str(name), []).append(
                f"m2: its tokens at {_where(cell)} were compared with nobody's: {baseline} gave none"
            )
    errors = events[events["metric"] == "m1/output_error"]
    for (name, shape, context), own in errors.groupby(["candidate", "shape", "context"])["value"]:
        worst = own.max(skipna=False)
        if not worst <= 1.0:
            found.setdefault(str(name), []).append(
                f"m1: a timed output of {shape} at {context} is {worst:.3g} times its error bound "
                "off the oracle"
            )
    kept = rows[rows["metric"] == "m2/output_error"]
    for (name, *cell), own in kept.groupby(keys)["value"]:
        worst = own.max(skipna=False)
        if not worst <= 1.0:
            found.setdefault(str(name), []).append(
                f"m2: attention after the last step at {_where(cell)} is {worst:.3g} times its error "
                "bound off the oracle"
            )
    return found


def _where(cell: list[Any]) -> str:
    return gates.cell_name(dict(zip(("context", "sessions", "threads"), cell)))
