"""Forest plot: each contrast with its interval, beside the registered thresholds."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtrial.decision import labels
from kvtrial.show.plots import style

TITLE = "Contrasts"
CAPTION = (
    "Ratio of decode tokens/s, challenger over incumbent, in the cells that decide, with its two-sided 95% "
    "t interval over blocks (n; a block is one fresh process). Right of 1: the challenger is faster. The "
    "dashed line is what the lower bound has to reach in the primary cell. A number with an arrow is a "
    "ratio outside the panel. Where layouts differ, a ratio is of them too, not of languages alone."
)

#: The panels' ends: what decides lies between them, and what the scalar arms give far outside.
_LEFT, _RIGHT = 0.7, 1.6
_TICKS = (0.8, 1.0, 1.25, 1.5)
_ROLES = ("primary", "veto")


def draw(verdict: dict[str, Any], events: pd.DataFrame) -> Figure | None:
    """One row a pair, one panel a deciding cell, the primary one first."""
    rows = [
        c for c in verdict["hot"]["contrasts"] if c["ratio"] is not None and c["role"] in _ROLES
    ]
    if not rows:
        return None
    rows.sort(key=lambda c: (_ROLES.index(c["role"]), c["context"]))
    cells = list(dict.fromkeys((c["role"], c["context"]) for c in rows))
    named = {(c["challenger"], c["incumbent"]): labels.of_contrast(c) for c in rows}
    pairs = sorted(named, reverse=True)
    adopt_at = verdict["characteristics"].get("adopt_at")
    drawn, axes = style.figure(
        len(cells), width=2.4 + 2.3 * len(cells), height=1.3 + 0.2 * len(pairs)
    )
    for axis, (role, context) in zip(axes, cells):
        own = [c for c in rows if (c["role"], c["context"]) == (role, context)]
        for row in own:
            _draw_row(axis, pairs.index((row["challenger"], row["incumbent"])), row)
        n = style.span_of(c["n_blocks"] for c in own)
        axis.set_title(f"{context:,} positions, {role} (n = {n})", fontsize=9)
        axis.axvline(1.0, color="#444444", linewidth=1)
        if role == "primary" and adopt_at is not None:
            axis.axvline(1 + adopt_at, color="#D55E00", linewidth=1, linestyle="--")
        axis.set_xscale("log")
        axis.set_xlim(_LEFT, _RIGHT)
        axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axis.set_xticks([], minor=True)
        axis.set_ylim(-0.7, len(pairs) - 0.3)
        axis.set_yticks(range(len(pairs)), [""] * len(pairs))
        axis.set_xlabel("ratio of tokens/s (log scale)")
    axes[0].set_yticks(range(len(pairs)), [f"{a} / {b}{named[a, b]}" for a, b in pairs], fontsize=8)
    return drawn


def _draw_row(axis: Axes, line: int, row: dict[str, Any]) -> None:
    look = style.look(row["challenger"])
    low, high = row["ci95"]
    at = {"va": "center", "fontsize": 8, "color": look["color"]}
    if row["ratio"] > _RIGHT:
        axis.text(_RIGHT, line, f"{row['ratio']:.1f} \N{RIGHTWARDS ARROW}", ha="right", **at)
        return
    if row["ratio"] < _LEFT:
        axis.text(_LEFT, line, f"\N{LEFTWARDS ARROW} {row['ratio']:.2f}", ha="left", **at)
        return
    axis.plot([low, high], [line, line], color=look["color"], linewidth=2)
    axis.plot(row["ratio"], line, linestyle="", markersize=6, **look)
