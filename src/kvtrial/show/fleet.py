"""Many verdicts side by side, one row a verdict: ``kvtrial fleet results/*/verdict.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtrial.decision import labels
from kvtrial.run import schemas

SCHEMA_NAME = "verdict.schema.yaml"


class BadVerdict(ValueError):
    """A file is no verdict; the message names the file and what is wrong with it."""


def load(path: Path) -> dict[str, Any]:
    """A verdict from its file, or from its run's folder.

    Raises
    ------
    BadVerdict
        No such file, not JSON, or not what ``workflow/schemas/verdict.schema.yaml`` allows.
    """
    path = path / "verdict.json" if path.is_dir() else path
    try:
        verdict = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadVerdict(
            f"{path}: {error}; give the verdict.json of finished runs (make verdict)"
        ) from None
    problem = schemas.first_error(verdict, SCHEMA_NAME)
    if problem is not None:
        raise BadVerdict(
            f"{path}: {problem}; kvtrial decide RUN writes it again, where this kvtrial reads the "
            "run's protocol"
        )
    checked: dict[str, Any] = verdict
    return checked


def row(verdict: dict[str, Any]) -> dict[str, Any]:
    """What a fleet's table shows of one verdict; ``primary`` is None where no challenger was timed."""
    cold = verdict["cold"]
    return {
        "machine": verdict["machine"],
        "model": verdict["model"],
        "synthetic": verdict["synthetic"],
        "outcome": verdict["hot"]["outcome"],
        "adopted": verdict["hot"]["adopted"],
        "primary": _primary(verdict),
        "cold": {"adopted": cold["adopted"], "z1_over_z2": _ratio_of(cold.get("z1_over_z2"))},
        "protocol": verdict["protocol"],
        "protocol_sha256": verdict["protocol_sha256"],
        "run_id": verdict["run_id"],
    }


def _primary(verdict: dict[str, Any]) -> dict[str, Any] | None:
    """The contrast that decides: the challenger's against the incumbent that it beats by least."""
    measured = [
        contrast
        for contrast in verdict["hot"]["contrasts"]
        if contrast["role"] == "primary" and contrast["ratio"] is not None
    ]
    if not measured:
        return None
    # The rule's challengers come first, in their fixed sequence.
    tested = verdict["characteristics"].get("challenger") or measured[0]["challenger"]
    own = [contrast for contrast in measured if contrast["challenger"] == tested]
    if not own:
        return None
    tightest = min(own, key=lambda contrast: contrast["ci95"][0])
    names = {key: tightest[key] for key in ("challenger", "incumbent", "context")}
    names["layouts_differ"] = tightest.get("layouts_differ", False)
    return {**names, **(_ratio_of(tightest) or {})}


def _ratio_of(contrast: dict[str, Any] | None) -> dict[str, Any] | None:
    if contrast is None or contrast["ratio"] is None:
        return None
    return {key: contrast[key] for key in ("ratio", "ci95", "n_blocks")}


def table(files: Iterable[Path]) -> list[dict[str, Any]]:
    """One row a verdict, by machine class, model and run."""
    rows = [row(load(path)) for path in files]
    return sorted(rows, key=lambda r: (r["machine"], r["model"], r["run_id"]))


def render(rows: list[dict[str, Any]]) -> Any:
    """The rows as a rich table; says so where they were measured under different protocols."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "machine class",
        "model",
        "outcome",
        "adopted",
        "primary ratio",
        "cold",
        "protocol",
    ):
        shown.add_column(name, overflow="fold", no_wrap=name == "primary ratio")
    for r in rows:
        primary, cold = r["primary"], r["cold"]
        shown.add_row(
            r["machine"],
            r["model"] + (" (synthetic)" if r["synthetic"] else ""),
            r["outcome"],
            r["adopted"] or "-",
            _named(primary),
            f"{cold['adopted'] or '-'} {_shown(cold['z1_over_z2'])}".rstrip(" -") or "-",
            r["protocol_sha256"][:8],
        )
    last = (
        "primary ratio: tokens/s of the challenger over the incumbent that it beats by least; cold: "
        "Z1's restore time over Z2's; both with their 95% t interval over n blocks"
    )
    parts: list[Any] = [shown, Text(last, "dim")]
    if len({r["protocol_sha256"] for r in rows}) > 1:
        parts.append(Text("Different protocols: these rows do not compare.", "yellow"))
    return Group(*parts)


def _shown(contrast: dict[str, Any] | None) -> str:
    if contrast is None:
        return "-"
    low, high = contrast["ci95"]
    return f"{contrast['ratio']:.3f} [{low:.3f}, {high:.3f}] n={contrast['n_blocks']}"


def _named(primary: dict[str, Any] | None) -> str:
    if primary is None:
        return "-"
    arms = f"{primary['challenger']}/{primary['incumbent']}{labels.of_contrast(primary)}"
    return f"{arms} {_shown(primary)}"
