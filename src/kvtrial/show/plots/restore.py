"""Restoring a prefix from the cold tier, beside a plain read of the same bytes."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.decision.document import Document
from kvtrial.show.plots import style

TITLE = "Cold restore"
CAPTION = (
    "Time to bring the registered prefix back into the pool, page cache warm and dropped (dots: blocks), "
    "compared with a plain read of the same bytes into the same prefaulted pages."
)

_KINDS = (
    ("restore_warm_ms", "plain_read_warm_ms", "page cache warm"),
    ("restore_cold_ms", "plain_read_cold_ms", "page cache dropped"),
)


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """Dots by store, one panel warm, one cold."""
    drawn_metrics = [f"cold/{metric}" for kind in _KINDS for metric in kind[:2]]
    rows = events[(events["stage"] == "cold_tier") & events["metric"].isin(drawn_metrics)]
    if rows.empty:
        return None
    # Shorter prefixes are measured too, for the comparison with recomputing.
    rows = rows[rows["context"] == rows["context"].max()]
    drawn, axes = style.figure(len(_KINDS), width=7.2, height=3.2)
    for axis, (store_metric, plain_metric, title) in zip(axes, _KINDS):
        shown = [("Z1", store_metric), ("Z2", store_metric), ("plain", plain_metric)]
        for place, (name, metric) in enumerate(shown):
            own = rows[(rows["candidate"] == name) & (rows["metric"] == f"cold/{metric}")]
            times = own.groupby("block")["value"].median()  # warm is read several times a block
            axis.plot([place] * len(times), times, linestyle="", markersize=5, **style.look(name))
        axis.set_xticks(range(len(shown)), [name for name, _ in shown])
        axis.set_title(title, fontsize=9)
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("ms")
    return drawn
