"""Forest plot: each contrast with its interval, beside the registered thresholds."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvtrial import labels
from kvtrial.plots import style

TITLE = "Contrasts"
CAPTION = (
    "Ratio of decode tokens/s, challenger over incumbent, with its two-sided 95% t interval over blocks "
    "(n beside each; a block is one fresh process). Right of 1: the challenger is faster. The dashed "
    "line is what the lower bound has to reach in the primary cell. Where layouts differ, a ratio is of them "
    "too, not of languages alone."
)


def draw(verdict: dict[str, Any], events: pd.DataFrame) -> Figure | None:
    """One row a contrast, primary cell first."""
    rows = [c for c in verdict["hot"]["contrasts"] if c["ratio"] is not None]
    if not rows:
        return None
    order = {"primary": 0, "veto": 1, "extra": 2}
    rows.sort(key=lambda c: (order[c["role"]], c["context"], c["challenger"], c["incumbent"]))
    drawn, (axis,) = style.figure(height=1.2 + 0.24 * len(rows))
    for line, row in enumerate(reversed(rows)):
        look = style.look(row["challenger"])
        low, high = row["ci95"]
        axis.plot([low, high], [line, line], color=look["color"], linewidth=2)
        axis.plot(row["ratio"], line, linestyle="", markersize=6, **look)
    axis.axvline(1.0, color="#444444", linewidth=1)
    axis.axvline(1.1, color="#D55E00", linewidth=1, linestyle="--")
    axis.set_yticks(
        range(len(rows)),
        [
            f"{r['challenger']} / {r['incumbent']}{labels.of_contrast(r)}  "
            f"@{r['context']:,}  (n={r['n_blocks']})"
            for r in reversed(rows)
        ],
        fontsize=8,
    )
    style.plain_log(axis, "x")
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set_xlabel("ratio of tokens/s (log scale)")
    return drawn
