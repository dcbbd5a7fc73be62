"""A prefix restored, beside the same prefix computed, over its length."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.decision.document import Document
from kvtrial.show.plots import style

TITLE = "Restore against recompute"
CAPTION = (
    "Medians over blocks of the time to restore a prefix, page cache warm and dropped, and the time of a "
    "prefill of the same tokens. Hollow: in proportion to the longest prefill that was measured, so at least "
    "that much."
)

_CACHES = {"warm": ("page cache warm", "-"), "cold": ("page cache dropped", "--")}


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """One line for the prefill, one for each store and page cache."""
    table = verdict["cold"].get("recompute")
    if not table:
        return None
    drawn, (axis,) = style.figure()
    contexts = [row["context"] for row in table]
    axis.plot(contexts, [row["recompute_ms"] for row in table], color="black", label="computed")
    for row in table:
        fill = "white" if row["estimated"] else "black"
        axis.plot(
            row["context"], row["recompute_ms"], "o", color="black", markerfacecolor=fill, zorder=3
        )
    for store in ("Z1", "Z2"):
        for cache, (said, line) in _CACHES.items():
            points = [
                (row["context"], ms)
                for row in table
                if (ms := row["restore_ms"][store][cache]) is not None
            ]
            if points:
                axis.plot(
                    *zip(*points), linestyle=line, label=f"{store}, {said}", **style.look(store)
                )
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [f"{n:,}" for n in contexts])
    axis.xaxis.minorticks_off()
    style.plain_log(axis, "y")
    axis.set_xlabel("tokens of the prefix")
    axis.set_ylabel("ms")
    style.legend_below(drawn, [axis], 3)
    return drawn
