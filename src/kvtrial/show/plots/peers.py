"""Other engines beside ours, where the optional target `peers` was run."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.show.plots import style

TITLE = "Compared with other engines"
CAPTION = (
    "Ratio of ours to the peer with its two-sided 95% t interval over n blocks. Right of 1 ours is "
    "better. Each side is at its best setting in the cell; the table has the peers' other settings."
)


def draw(verdict: dict[str, Any], events: pd.DataFrame) -> Figure | None:
    """One row a comparison with a program's best setting in peers.json, which ``verdict["peers"]`` holds."""
    rows = [row for row in verdict.get("peers") or () if row["best"]]
    if not rows:
        return None
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    drawn, (axis,) = style.figure(height=1.2 + 0.24 * len(rows))
    for line, row in enumerate(reversed(rows)):
        look = style.look(row["our_arm"])
        axis.plot(row["ci95"], [line, line], color=look["color"], linewidth=2)
        axis.plot(row["ratio"], line, linestyle="", markersize=6, **look)
    axis.axvline(1.0, color="#444444", linewidth=1)
    axis.set_yticks(range(len(rows)), [_label(row) for row in reversed(rows)], fontsize=8)
    for metric in metrics[1:]:  # a line between the metrics
        first = next(i for i, row in enumerate(rows) if row["metric"] == metric)
        axis.axhline(len(rows) - first - 0.5, color="#cccccc", linewidth=0.8)
    style.plain_log(axis, "x")
    axis.set_ylim(-0.7, len(rows) - 0.3)
    axis.set_xlabel("ours over peer (log scale)")
    return drawn


def _label(row: dict[str, Any]) -> str:
    package = row["peer_setting"].partition(" ")[0]
    threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
    return (
        f"{row['metric']}  {row['our_arm']} / {package}  @{row['context']:,}, {threads}  "
        f"(n={row['n_blocks']})"
    )
