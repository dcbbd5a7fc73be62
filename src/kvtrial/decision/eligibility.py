"""Who may win, who is compared with, and why not: from events alone."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvtrial.decision import output
from kvtrial.run import protocol as registered

#: A candidate of this role is measured and reported; it never wins and is never compared with.
CONTROL = "control"


def judge(
    events: pd.DataFrame, protocol: dict[str, Any], parity_result: dict[str, Any]
) -> dict[str, list[str]]:
    """Candidate → reasons why it can't win; an empty list means eligible."""
    not_built = _texts(events, "candidate/not_built")
    missing = _texts(events, "candidate/missing")
    roles = _texts(events, "candidate/role")
    outcomes = events[events["metric"] == "conformance/outcome"]
    failed_rows = events[events["metric"].isin(["failed", "not_run"])]
    wrong_output = output.reasons(events, protocol)
    reasons: dict[str, list[str]] = {}
    for name in registered.entrants(protocol):
        mine: list[str] = []
        if not_built.get(name):
            reasons[name] = [f"not built: {not_built[name]}"]
            continue
        if roles.get(name) == CONTROL or name not in protocol["candidates"]:
            mine.append("a control: measured, never to win")
        own = outcomes[outcomes["candidate"] == name]
        if own.empty:
            mine.append("conformance: not run")
        for test in sorted(own.loc[own["value"] == 0, "text"]):
            mine.append(f"conformance: {test} failed")
        if missing.get(name):
            mine.append(f"lacks: {missing[name]}")
        mine.extend(parity_result["candidates"].get(name, {}).get("reasons", []))
        mine.extend(wrong_output.get(name, []))
        for _, row in failed_rows[failed_rows["candidate"] == name].iterrows():
            text = f"{row['stage']}: {row['text']}"
            if text not in mine:
                mine.append(text)
        reasons[name] = mine
    return reasons


def comparators(reasons: dict[str, list[str]], protocol: dict[str, Any]) -> list[str]:
    """The Cython FP32 arms that a challenger has to beat.

    Sound, if perhaps without a capability: fit to be compared with, not always to win.
    """
    return [
        name
        for name in protocol["decision"]["incumbents"]
        if all(reason.startswith("lacks: ") for reason in reasons[name])
    ]


def _texts(events: pd.DataFrame, metric: str) -> dict[str, str]:
    rows = events[(events["stage"] == "run") & (events["metric"] == metric)]
    return dict(zip(rows["candidate"], rows["text"]))
