"""Many verdicts side by side, one row a verdict: ``kvtrial fleet results/*/verdict.json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtrial.decision import labels
from kvtrial.decision.document import Document
from kvtrial.host import printed
from kvtrial.host.files import is_dir, parsed_json
from kvtrial.run import schemas
from kvtrial.show import answers

SCHEMA_NAME = "verdict.schema.yaml"


class BadVerdict(ValueError):
    """A file is no verdict; the message names the file and what is wrong with it."""


def load(path: Path) -> Document:
    """A verdict from its file, or from its run's folder.

    Raises
    ------
    BadVerdict
        No such file, not JSON, or not what ``workflow/schemas/verdict.schema.yaml`` allows.
    """
    path = path / "verdict.json" if is_dir(path) else path
    try:
        verdict = parsed_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadVerdict(
            f"{path}: {error}; give the verdict.json of finished runs (make verdict)"
        ) from None
    problem = schemas.first_error(verdict, SCHEMA_NAME)
    if problem is not None and isinstance(verdict, dict) and "hot" in verdict:
        raise BadVerdict(
            f"{path}: written by an earlier release, with other keys; `kvtrial decide RUN` says which release "
            "decides that run"
        )
    if problem is not None:
        raise BadVerdict(
            f"{path}: {problem}; `kvtrial decide RUN` writes it again, or says which release decides "
            "that run"
        )
    checked: Document = verdict
    return checked


def load_all(paths: Iterable[Path]) -> tuple[list[Document], list[str]]:
    """Verdicts, and a sentence for each file that is none: one that is damaged costs its own row alone.

    Raises
    ------
    BadVerdict
        None of them is a verdict.
    """
    found, problems = [], []
    for path in paths:
        try:
            found.append(load(path))
        except BadVerdict as error:
            problems.append(str(error))
    if problems and not found:
        raise BadVerdict("; ".join(problems))
    return found, problems


def row(verdict: Document) -> dict[str, Any]:
    """What a fleet's table shows of one verdict: the three answers in their order, with their figures.

    ``run.over_fp32`` is None where the FP32 arm is what to run, ``language.decided_by`` where no challenger was
    timed.
    """
    run, language, cold = verdict["run"], verdict["language"], verdict["cold"]
    return {
        "machine": verdict["machine"],
        "measured": verdict["measured"],
        "model": verdict["model"],
        "synthetic": verdict["synthetic"],
        "run": {
            "store": run["store"],
            "profile": run["profile"],
            "fp32_store": run["fp32_store"],
            "over_fp32": _over_fp32(verdict),
        },
        "language": {
            "outcome": language["outcome"],
            "kind": language["kind"],
            "adopted": language["adopted"],
            "decided_by": _decided_by(verdict),
        },
        "cold": {"adopted": cold["adopted"], "z1_over_z2": _ratio_of(cold.get("z1_over_z2"))},
        "protocol": verdict["protocol"],
        "protocol_sha256": verdict["protocol_sha256"],
        "run_id": verdict["run_id"],
    }


def _over_fp32(verdict: Document) -> dict[str, Any] | None:
    """How much faster than the FP32 arm what to run is, in the primary cell."""
    if (store := verdict["run"]["store"]) is None:
        return None
    return _ratio_of(answers.over_fp32(verdict, store, answers.primary_context(verdict)))


def _decided_by(verdict: Document) -> dict[str, Any] | None:
    """The contrast that the language's reason speaks of: the challenger's with the lowest lower bound."""
    language = verdict["language"]
    if not language["against"]:
        return None
    worst = min(language["against"], key=lambda contrast: contrast["ci95"][0])
    return {
        "challenger": language["challenger"],
        "incumbent": worst["incumbent"],
        "layouts_differ": worst["layouts_differ"],
        **(_ratio_of(worst) or {}),
    }


def _ratio_of(contrast: dict[str, Any] | None) -> dict[str, Any] | None:
    if contrast is None or contrast["ratio"] is None:
        return None
    return {key: contrast[key] for key in ("ratio", "ci95", "n_blocks") if key in contrast}


def table(verdicts: Iterable[Document]) -> list[dict[str, Any]]:
    """One row a verdict, by machine class, model, time and run."""
    rows = map(row, verdicts)
    return sorted(
        rows, key=lambda r: (r["machine"], r["model"], r["measured"]["begun"], r["run_id"])
    )


#: Columns that are said once, above the table, where they are the same in every row.
_COMMON = ("machine", "model", "protocol", "begun")


def render(rows: list[dict[str, Any]]) -> Any:
    """The rows as a rich table for 80 columns; says so where they were measured under different protocols."""
    from rich import box
    from rich.console import Group
    from rich.text import Text

    lines = [_shown(r) for r in rows]
    same = {key: lines[0][key] for key in _COMMON if len({line[key] for line in lines}) == 1}
    shown = printed.table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, show_lines=False
    )
    for name in lines[0]:
        if name not in same:
            shown.add_column(name, overflow="fold")
    for line in lines:
        shown.add_row(*(text for key, text in line.items() if key not in same))
    parts: list[Any] = [Text(f"{key}: {text}".replace("\n", ", ")) for key, text in same.items()]
    parts.append(shown)
    parts.append(
        Text(
            "machine: its class and host. run: what to run, and its tokens/s over the FP32 arm's. language: the "
            "challenger's tokens/s over those of the incumbent with the smallest lead. cold: Z1's restore time "
            "over Z2's. All with their interval. begun: the day and the commit.",
            "dim",
        )
    )
    if len({r["protocol_sha256"] for r in rows}) > 1:
        parts.append(Text("Different protocols: these rows do not compare.", "yellow"))
    return Group(*parts)


def _shown(r: dict[str, Any]) -> dict[str, str]:
    """A row as text, by column; each answer is two lines: what, and the figure."""
    run, language, cold = r["run"], r["language"], r["cold"]
    return {
        "machine": _two_lines(r["machine"], r["measured"]["host"]),
        "model": r["model"] + (" (synthetic)" if r["synthetic"] else ""),
        "run": _two_lines(answers.store(r), _over(run["over_fp32"], f"x {run['fp32_store']} ")),
        "language": _two_lines(answers.outcome(r), _named(language["decided_by"])),
        "cold": _two_lines(cold["adopted"] or "undecided", _over(cold["z1_over_z2"])),
        "protocol": r["protocol_sha256"][:8],
        "begun": _two_lines(r["measured"]["begun"][:10], r["measured"]["commit"][:8]),
    }


def _two_lines(first: str, second: str) -> str:
    return f"{first}\n{second}" if second else first


def _over(contrast: dict[str, Any] | None, before: str = "") -> str:
    return f"{before}{answers.interval(contrast)}" if contrast else ""


def _named(contrast: dict[str, Any] | None) -> str:
    if contrast is None:
        return ""
    pair = f"{contrast['challenger']}/{contrast['incumbent']}{labels.of_contrast(contrast)} "
    return _over(contrast, pair)
