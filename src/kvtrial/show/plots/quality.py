"""What fewer bytes cost in quality and bring in speed: KLD against bytes a token, tokens/s with each arm."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from kvtrial.decision.document import Document
from kvtrial.show import answers
from kvtrial.show.plots import style

TITLE = "Quality, bytes and speed"
CAPTION = (
    "Mean KL divergence from the FP32 arm, the largest of the contexts within the trained length, against the "
    "bytes of K and V that a token takes. The line reaches to the upper bound of its 95% bootstrap interval over "
    "chunks (n behind the name). Tokens/s is of the primary cell."
)
#: Height of a label in points, and the ratio of KLD below which two would lie on each other.
_LABEL, _NEAR = 24, 4.0


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """One mark an arm of reduced precision; its label has what its colour says."""
    shown = []
    for row in verdict["run"]["profiles"]:
        if not row["bytes_per_token"]:  # not timed
            continue
        gated = [c for c in row["quality"] if c["gated"] and c.get("mean_kld") is not None]
        if gated:
            shown.append((row, max(gated, key=lambda c: c["kld_upper"])))
    if not shown:
        return None
    primary = str(answers.primary_context(verdict))
    drawn, (axis,) = style.figure()
    places: list[tuple[int, float]] = []
    for row, worst in shown:
        look = style.look(row["candidate"])
        at, mean = row["bytes_per_token"], worst["mean_kld"]
        axis.plot([at, at], [mean, worst["kld_upper"]], color=look["color"], linewidth=1.5)
        axis.plot(at, mean, linestyle="", markersize=8, **look)
        text = f"{row['candidate']} (n={worst['chunks']})"
        rate = row["tokens_per_s"].get(primary)
        if rate:
            text += f"\n{answers.significant(rate)} tokens/s"
        # Arms that hold the same rows share a place: their labels stand below each other.
        below = sum(at == x and max(mean, y) < _NEAR * min(mean, y) for x, y in places)
        places.append((at, mean))
        offset = (8, -_LABEL * below)
        axis.annotate(
            text, (at, mean), xytext=offset, textcoords="offset points", fontsize=8, va="center"
        )
    axis.margins(x=0.25, y=0.25)
    style.plain_log(axis, "x")
    axis.set_yscale("log")
    axis.set_xlabel("bytes of K and V a token, all layers (log scale)")
    axis.set_ylabel("mean KLD, nats (log scale)")
    return drawn
