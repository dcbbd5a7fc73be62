"""Waterfall of the hypotheses: what each single difference between two arms brings."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.plots import style

TITLE = "Where the difference comes from"
CAPTION = (
    "Each registered hypothesis is a contrast of two arms that differ in that one thing. Points: ratio "
    "of decode tokens/s; bars: two-sided 95% t interval over blocks (n = blocks of the cell)."
)


def draw(verdict: dict[str, Any], events: pd.DataFrame) -> Figure | None:
    """One row a hypothesis, one marker a context."""
    rows = [
        h
        for h in verdict["hypotheses"]
        if h["metric"] == "m2/tokens_per_s"
        and h["ratio"] is not None
        and h["sessions"] == 1
        and h["threads"] == 1
    ]
    if not rows:
        return None
    ids = list(dict.fromkeys(h["id"] for h in rows))
    contexts = sorted({h["context"] for h in rows})
    drawn, (axis,) = style.figure(height=1.4 + 0.6 * len(ids))
    shades = ("#56B4E9", "#0072B2", "#D55E00", "#000000")
    for place, context in enumerate(contexts):
        for row in (h for h in rows if h["context"] == context):
            y = len(ids) - 1 - ids.index(row["id"]) + 0.18 * (place - (len(contexts) - 1) / 2)
            color = shades[place % len(shades)]
            axis.plot(row["ci95"], [y, y], color=color, linewidth=2)
            axis.plot(row["ratio"], y, "o", color=color, markersize=5)
    for place, context in enumerate(contexts):
        axis.plot([], [], "o-", color=shades[place % len(shades)], label=f"{context:,}")
    labels = {h["id"]: f"{h['id']}  {h['from']} → {h['to']}\n{h['claim']}" for h in rows}
    axis.set_yticks(range(len(ids)), [labels[i] for i in reversed(ids)], fontsize=8)
    axis.axvline(1.0, color="#444444", linewidth=1)
    style.plain_log(axis, "x")
    axis.set_xlabel("ratio of tokens/s (log scale)")
    axis.legend(title="context", loc="best", fontsize=8)
    return drawn
