"""Forest plot: the pairs that decide, each with its interval and what its lower bound has to reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtrial.decision import labels
from kvtrial.decision.document import Document, Shown
from kvtrial.show.plots import style

TITLE = "The pairs that decide"
CAPTION = (
    "Ratio of decode tokens/s in the cells that decide, with its two-sided interval over n blocks; a block is one "
    "fresh process. Right of 1 the first arm is faster. Upper rows: each reduced profile over the FP32 arm, at the "
    "confidence that allows for their number. Lower rows: the challenger over each incumbent, at "
    "95%. Dashes: what the lower bound has to reach in the primary cell. Arms many times slower are left to the "
    "table. Where layouts differ, the ratio reflects them as well as the language."
)

#: The panels' ends, as far as the pairs don't need more.
_LEFT, _RIGHT = 0.9, 1.25
#: A ratio past it is no close call: the table has it.
_FAR = 2.5
_ROLES = ("primary", "veto")
#: What the language's rule and the profiles' ask of a lower bound.
_EDGES = {"language": ("adopt_lower_bound", "#D55E00"), "run": ("run_lower_bound", "#0072B2")}


def pairs(verdict: Document) -> list[dict[str, Any]]:
    """The rows: ``top``, ``bottom``, the ``rule`` that asks, and by context the ratio with its interval."""
    run, language = verdict["run"], verdict["language"]
    asked = [
        {
            "rule": "run",
            "top": row["candidate"],
            "bottom": run["fp32_store"],
            "layouts_differ": row["layouts_differ"],
            "by_context": {int(context): one for context, one in row["against_fp32"].items()},
        }
        for row in run["profiles"]
        if row["against_fp32"]
    ]
    for against in language["against"]:
        by_context = {
            row["context"]: row
            for row in verdict["contrasts"]
            if (row["challenger"], row["incumbent"])
            == (language["challenger"], against["incumbent"])
            and row["role"] in _ROLES
            and row["ratio"] is not None
        }
        asked.append(
            {
                "rule": "language",
                "top": language["challenger"],
                "bottom": against["incumbent"],
                "layouts_differ": against["layouts_differ"],
                "by_context": by_context,
            }
        )
    return [row for row in asked if row["by_context"] and not _is_far(row)]


def _is_far(row: dict[str, Any]) -> bool:
    ratios = [one["ratio"] for one in row["by_context"].values()]
    return max(ratios) > _FAR or min(ratios) < 1 / _FAR


def draw(verdict: Shown, events: pd.DataFrame) -> Figure | None:
    """One row a pair, one panel a deciding cell, the primary one first.

    ``verdict["decision"]``: the protocol's rules, for what a lower bound has to reach.
    """
    rows = pairs(verdict)
    if not rows:
        return None
    rows.reverse()  # the first one on top
    roles = {arm["context"]: arm["role"] for arm in verdict["arms"] if arm["role"] in _ROLES}
    cells = sorted(roles, key=lambda context: (_ROLES.index(roles[context]), context))
    bounds = [
        bound
        for row in rows
        for one in row["by_context"].values()
        for bound in one["ci95"] or [one["ratio"]]
    ]
    left, right = min([_LEFT, *bounds]) * 0.98, max([_RIGHT, *bounds]) * 1.02
    drawn, axes = style.figure(
        len(cells), width=2.2 + 2.2 * len(cells), height=1.4 + 0.3 * len(rows)
    )
    for axis, context in zip(axes, cells):
        own = [(line, row) for line, row in enumerate(rows) if context in row["by_context"]]
        for line, row in own:
            _draw_row(axis, line, row, context)
        counts = [row["by_context"][context]["n_blocks"] for _, row in own]
        n = f" (n = {style.span_of(counts)})" if counts else ""
        axis.set_title(f"{context:,} positions, {roles[context]}{n}", fontsize=9)
        axis.axvline(1.0, color="#444444", linewidth=1)
        axis.set_xlim(left, right)
        style.plain_log(axis, "x")
        axis.set_ylim(-0.7, len(rows) - 0.3)
        axis.set_xlabel("ratio of tokens/s (log scale)")
        if roles[context] == "primary":
            _edges(axis, rows, verdict.get("decision", {}))
    names = [f"{r['top']} / {r['bottom']}{labels.of_contrast(r)}" for r in rows]
    style.name_rows(axes, names, fontsize=8)
    return drawn


def _draw_row(axis: Axes, line: int, row: dict[str, Any], context: int) -> None:
    look, one = style.look(row["top"]), row["by_context"][context]
    if one["ci95"]:
        axis.plot(one["ci95"], [line, line], color=look["color"], linewidth=2)
    axis.plot(one["ratio"], line, linestyle="", markersize=6, **look)


def _edges(axis: Axes, rows: list[dict[str, Any]], decision: Mapping[str, Any]) -> None:
    """Dashes over the rows of each rule, where a lower bound has to lie."""
    for rule, (key, color) in _EDGES.items():
        lines = [line for line, row in enumerate(rows) if row["rule"] == rule]
        if lines and key in decision:
            edge = 1 + decision[key]
            span = [min(lines) - 0.45, max(lines) + 0.45]
            axis.plot([edge, edge], span, color=color, linewidth=1.2, linestyle="--")
