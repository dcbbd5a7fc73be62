"""Waterfall of the hypotheses: what each single difference between two arms brings."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.decision import labels
from kvtrial.decision.document import Document
from kvtrial.show.plots import style

TITLE = "Where the difference comes from"
CAPTION = (
    "Each registered hypothesis is a contrast of two arms that differ in that one thing. Points: ratio, "
    "in the first panel of decode tokens/s with the model, then of the speed of attention alone at each "
    "head shape (query and KV heads); bars: two-sided 95% interval over n blocks, each a fresh process."
)


#: Colour and marker of each context.
_SHADES = (("#2F8DC4", "o"), ("#D55E00", "s"), ("#332288", "^"), ("#000000", "D"))


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """One row a hypothesis, one marker a context, one panel for decode and for each head shape."""
    rows = [
        h
        for h in verdict["hypotheses"]
        if h["ratio"] is not None and h["sessions"] == 1 and h["from_threads"] == 1
    ]
    if not rows:
        return None
    ids = list(dict.fromkeys(h["id"] for h in rows))
    contexts = sorted({h["context"] for h in rows})
    panels = sorted({(h["metric"] != "m2/tokens_per_s", h["shape"]) for h in rows})
    drawn, axes = style.figure(
        len(panels), width=3.4 + 2.8 * len(panels), height=1.6 + 0.6 * len(ids)
    )
    for axis, (alone, shape) in zip(axes, panels):
        own = [h for h in rows if (h["metric"] != "m2/tokens_per_s", h["shape"]) == (alone, shape)]
        for row in own:
            place = contexts.index(row["context"])
            y = len(ids) - 1 - ids.index(row["id"]) + 0.18 * (place - (len(contexts) - 1) / 2)
            color, marker = _SHADES[place % len(_SHADES)]
            axis.plot(row["ci95"], [y, y], color=color, linewidth=2)
            axis.plot(row["ratio"], y, marker, color=color, markersize=5)
        n = style.span_of(h["n_blocks"] for h in own)
        what = "attention alone" if alone else "decode"
        axis.set_title(f"{what}, {shape} (n = {n})", fontsize=9)
        axis.set_ylim(-0.6, len(ids) - 0.4)
        axis.axvline(1.0, color="#444444", linewidth=1)
        style.plain_log(axis, "x")
        axis.set_xlabel("ratio (log scale)")
    named = {
        h["id"]: f"{h['id']}  {h['from']} → {h['to']}{labels.of_contrast(h)}\n{h['claim']}"
        for h in rows
    }
    style.name_rows(axes, [named[i] for i in reversed(ids)], fontsize=8)
    for place, context in enumerate(contexts):
        color, marker = _SHADES[place % len(_SHADES)]
        axes[-1].plot([], [], f"{marker}-", color=color, label=f"{context:,}")
    style.legend_below(drawn, axes, len(contexts), title="filled positions")
    return drawn
