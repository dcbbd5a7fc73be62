"""How decode throughput falls with the context."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.decision.document import Document
from kvtrial.show.plots import style

TITLE = "Scaling with context"
CAPTION = (
    "Decode tokens/s (total tokens over total time) against filled positions; "
    "one session, one thread. n: blocks of each arm there. No interval: arms are compared in pairs, above."
)


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """One line an arm."""
    arms = [
        a
        for a in verdict["arms"]
        if a["sessions"] == 1 and a["threads"] == 1 and a["tokens_per_s"] is not None
    ]
    if not arms:
        return None
    drawn, (axis,) = style.figure()
    for name in dict.fromkeys(a["candidate"] for a in arms):
        own = sorted((a for a in arms if a["candidate"] == name), key=lambda a: a["context"])
        axis.plot(
            [a["context"] for a in own],
            [a["tokens_per_s"] for a in own],
            label=name,
            **style.look(name),
        )
    contexts = sorted({a["context"] for a in arms})
    axis.set_xscale("log")
    counts = {c: style.span_of(a["n_blocks"] for a in arms if a["context"] == c) for c in contexts}
    axis.set_xticks(contexts, [f"{c:,}\n(n = {n})" for c, n in counts.items()])
    axis.xaxis.minorticks_off()
    style.plain_log(axis, "y")
    axis.set_xlabel("filled positions")
    axis.set_ylabel("decode tokens/s")
    style.legend_below(drawn, [axis], 6)
    return drawn
