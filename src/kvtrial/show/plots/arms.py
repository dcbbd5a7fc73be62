"""The first picture: how fast each arm decodes at each context, and what a token takes of memory."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtrial.decision.document import Document
from kvtrial.show import answers
from kvtrial.show.plots import style

SECTION = "first"
TITLE = "How fast each arm decodes"
CAPTION = (
    "Decode tokens/s by filled positions, one session, one thread: the geometric mean over n blocks with its "
    "two-sided 95% interval. Filled and shaded: what to run, where that is decided. On the right: bytes that "
    "the cache takes for a token. Intervals of one arm say nothing about a difference of two: that is measured "
    "in pairs, and far narrower. An arm many times slower is named below the panels; the table has it."
)

#: An arm that many times slower than the fastest would squeeze the others into a corner.
_SLOW = 2.5


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """One row an arm, the fastest on top; one panel a context."""
    primary = answers.primary_context(verdict)
    measured = [arm for arm in answers.arms(verdict) if _rate(arm, primary)]
    if not measured:
        return None
    fastest = max(_rate(arm, primary) for arm in measured)
    shown = [arm for arm in measured if _rate(arm, primary) * _SLOW >= fastest]
    slow = [arm for arm in measured if arm not in shown]
    contexts = answers.contexts(verdict)
    if style.is_stacked():  # what decides comes first
        contexts.sort(key=lambda context: context != primary)
    drawn, axes = style.figure(
        len(contexts),
        width=1.9 + 2.4 * len(contexts),
        height=1.5 + 0.3 * len(shown) + (0.25 if slow else 0),
    )
    for axis, context in zip(axes, contexts):
        counts = []
        for line, arm in enumerate(reversed(shown)):
            if (row := arm.rates.get(context)) and row["tokens_per_s"]:
                counts.append(row["n_blocks"])
                _draw_row(axis, line, arm, row)
        deciding = ", decides" if context == primary else ""
        n = f" (n = {style.span_of(counts)})" if counts else ""
        axis.set_title(f"{context:,} positions{deciding}{n}", fontsize=9)
        axis.set_ylim(-0.7, len(shown) - 0.3)
        axis.margins(x=0.12)
        axis.set_xlabel("tokens/s")
        for line, arm in enumerate(reversed(shown)):
            if arm.chosen:
                axis.axhspan(line - 0.45, line + 0.45, color="#0072B2", alpha=0.12, linewidth=0)
    names = [f"{arm.name}, {arm.state}" if arm.chosen else arm.name for arm in reversed(shown)]
    style.name_rows(axes, names, fontsize=9)
    for axis in axes:
        for label, arm in zip(axis.get_yticklabels(), reversed(shown)):
            label.set_fontweight("bold" if arm.chosen else "normal")
    _sizes(axes[0 if style.is_stacked() else -1], shown)
    if slow:
        named = ", ".join(f"{arm.name} {answers.significant(_rate(arm, primary))}" for arm in slow)
        drawn.supxlabel(f"not drawn, in tokens/s at {primary:,}: {named}", fontsize=8)
    return drawn


def _rate(arm: answers.Arm, context: int | None) -> float:
    return (arm.rates.get(context or 0) or {}).get("tokens_per_s") or 0.0


def _draw_row(axis: Axes, line: int, arm: answers.Arm, row: dict[str, Any]) -> None:
    look = style.look(arm.name)
    bounds = row.get("tokens_per_s_ci95")
    if bounds and None not in bounds:
        axis.plot(bounds, [line, line], color=look["color"], linewidth=2)
    fill = {} if arm.chosen else {"markerfacecolor": "white"}
    axis.plot(
        row["tokens_per_s"], line, linestyle="", markersize=8 if arm.chosen else 6, **(look | fill)
    )


def _sizes(axis: Axes, shown: list[answers.Arm]) -> None:
    """Bytes a token, a number behind each row of the last panel."""
    across = axis.get_yaxis_transform()
    for line, arm in enumerate(reversed(shown)):
        if arm.bytes_per_token:
            axis.text(
                1.04,
                line,
                f"{arm.bytes_per_token:,.0f}",
                transform=across,
                va="center",
                fontsize=9,
                fontweight="bold" if arm.chosen else "normal",
            )
    axis.text(1.04, len(shown) - 0.35, "bytes a token", transform=across, va="bottom", fontsize=8)
