"""Attention alone against the machine's own ceilings."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.plots import style

TITLE = "Attention against the machine's ceilings"
CAPTION = (
    "One attention region of each head shape (query and KV heads): unique KV bytes per second (dots: the "
    "median of each of n blocks) beside the streaming read that a probe measured in the same blocks "
    "(band: its range). Below each arm: its median share of the nearer of the two ceilings, read and "
    "multiply-add. Inputs rotate through at least four times the last-level cache."
)


def draw(verdict: dict[str, Any], events: pd.DataFrame) -> Figure | None:
    """Dots by arm and context."""
    rows = events[events["metric"] == "m1/unique_gb_per_s"]
    if rows.empty:
        return None
    panels = sorted(set(zip(rows["shape"], rows["context"])))
    names = sorted(set(rows["candidate"]))
    drawn, axes = style.figure(len(panels), width=2.6 * len(panels), height=3.4)
    probes = events[(events["stage"] == "m1") & (events["metric"] == "probe/read_gb_per_s")][
        "value"
    ]
    shares = events[events["metric"] == "m1/ceiling_fraction"]
    for axis, (shape, context) in zip(axes, panels):
        at, labels = rows[(rows["shape"] == shape) & (rows["context"] == context)], []
        of_panel = shares[(shares["shape"] == shape) & (shares["context"] == context)]
        blocks = at["block"].nunique()
        for place, name in enumerate(names):
            medians = at[at["candidate"] == name].groupby("block")["value"].median()
            share = of_panel.loc[of_panel["candidate"] == name, "value"]
            labels.append(f"{name}\n{share.median():.0%}" if len(share) else name)
            look = style.look(name)
            axis.plot([place] * len(medians), medians, linestyle="", markersize=5, **look)
        if len(probes):
            axis.axhspan(probes.min(), probes.max(), color="#56B4E9", alpha=0.3, linewidth=0)
        axis.set_xticks(range(len(names)), labels, fontsize=7)
        axis.set_title(f"{shape}, {context:,} positions, n = {blocks}", fontsize=8)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("unique KV bytes, GB/s")
    return drawn
