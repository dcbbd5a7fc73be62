"""Distribution of the step latency of each arm in the primary cell."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvtrial.decision.document import Document
from kvtrial.show.plots import style

TITLE = "Step latency"
CAPTION = (
    "Share of decode steps that finished within the time on the x axis, one session, one thread; n: steps "
    "of each arm, all blocks of the cell together, void ones too. Nothing is trimmed, and no interval is "
    "drawn: steps of one block are not independent."
)


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """One curve an arm, one panel a context."""
    # The stages `aa` and `control` measure such steps too, of arms that are no pair of these.
    rows = events[
        (events["stage"] == "m2")
        & (events["metric"] == "m2/step_ms")
        & (events["sessions"] == 1)
        & (events["threads"] == 1)
    ]
    if rows.empty:
        return None
    contexts = sorted(set(rows["context"]))
    drawn, axes = style.figure(len(contexts), width=max(9.0, 3.0 * len(contexts)), height=4.2)
    for axis, context in zip(axes, contexts):
        counts = []
        for name, own in rows[rows["context"] == context].groupby("candidate"):
            values = np.sort(own["value"].dropna().to_numpy())
            if values.size:
                counts.append(values.size)
                share = np.arange(1, values.size + 1) / values.size
                look = style.look(str(name)) | style.line(str(name))
                # A few markers on each curve, so that hue alone tells no two apart.
                few = max(1, values.size // 5)
                axis.step(
                    values,
                    share,
                    where="post",
                    label=str(name),
                    markersize=4,
                    markevery=few,
                    **look,
                )
        style.plain_log(axis, "x")
        axis.set_title(f"{context:,} positions (n = {style.span_of(counts)})", fontsize=9)
        axis.set_xlabel("step latency, ms (log scale)")
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("share of steps")
    style.legend_below(drawn, axes, 6)
    return drawn
