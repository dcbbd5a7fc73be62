"""Attention alone against the machine's own ceilings."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtrial.decision.document import Document
from kvtrial.host import shapes
from kvtrial.show.plots import style

TITLE = "Attention against the machine's ceilings"
CAPTION = (
    "One attention region: operations a second against operations per byte of K and V, both log. "
    "The more query heads share a row, and the narrower it is stored, the further right. Dots: the "
    "median of each of n blocks, void ones too; hollow where the head shape (query and KV heads) is "
    "not the model's. Arms of one intensity stand side by side. Bands: what "
    "streaming reads and multiply-adds alone reached, from the lowest to the highest probe of the "
    "same blocks. Percent: the largest median share of the nearer ceiling among those dots. Inputs "
    "rotate through as many last-level caches as the protocol says, where they fit into memory."
)

_CEILINGS = (
    ("probe/read_gb_per_s", "streaming read", "#2F8DC4", "//"),
    ("probe/fma_gflop_per_s", "multiply-add", "#B07800", ".."),
)
#: Between arms of one intensity, as a factor.
_APART = 1.045


def draw(verdict: Document, events: pd.DataFrame) -> Figure | None:
    """One panel a context and number of threads; dots by arm and head shape."""
    events = events[events["stage"] == "m1"]
    dots = points(events)
    if dots.empty:
        return None
    cells = sorted(set(zip(dots["threads"], dots["context"])))
    drawn, axes = style.figure(len(cells), width=max(7.2, 3.2 * len(cells)), height=4.4)
    for axis, (threads, context) in zip(axes, cells):
        cell = dots[(dots["threads"] == threads) & (dots["context"] == context)]
        probes = events[(events["threads"] == threads) & (events["context"] == context)]
        _dots(axis, cell, verdict["shape"])
        _ceilings(axis, probes)
        style.plain_log(axis, "x")
        style.plain_log(axis, "y")
        lines = [f"{context:,} positions, {threads} thread{'s' if threads > 1 else ''}"]
        for shape, blocks in cell.groupby("shape")["block"].nunique().items():
            hollow = "" if shape == verdict["shape"] else ", hollow"
            lines.append(f"{shape}: n = {blocks}{hollow}")
        axis.set_title("\n".join(lines), fontsize=8)
        axis.set_xlabel("operations per byte of K and V")
    axes[0].set_ylabel("GFLOP/s")
    style.legend_below(drawn, axes, 6)
    return drawn


def points(events: pd.DataFrame) -> pd.DataFrame:
    """One row an arm, cell and block of m1's events; void blocks too.

    Returns
    -------
    DataFrame
        shape, threads, context, candidate, block; ``intensity`` operations per byte of K and V;
        ``gflop_per_s`` the block's median; ``share`` the median share of the nearer ceiling.
    """
    key = ["shape", "threads", "context", "candidate", "block"]
    columns = {
        "m1/attention_ms": "ms",
        "m1/unique_gb_per_s": "gb_per_s",
        "m1/ceiling_fraction": "share",
    }
    rows = events[events["metric"].isin(columns)]
    each = rows.pivot_table(
        index=[*key, "attempt", "trial", "index"], columns="metric", values="value"
    ).rename(columns=columns)
    if not {*columns.values()} <= {*each.columns}:
        return pd.DataFrame(columns=[*key, "intensity", "gflop_per_s", "share"])
    each = each.dropna().reset_index()
    bytes_a_row = each["gb_per_s"] * each["ms"] * 1e6 / each["context"]
    each["intensity"] = each["shape"].map(_operations_a_row) / bytes_a_row
    each["gflop_per_s"] = each["intensity"] * each["gb_per_s"]
    return each.groupby(key)[["intensity", "gflop_per_s", "share"]].median().reset_index()


def _operations_a_row(name: str) -> float:
    """NaN for what names no head shape."""
    shape = shapes.of_name(name)
    if shape is None:
        return float("nan")
    return float(shapes.operations_a_row(shape["q_heads"], shape["head_dim"]))


def _dots(axis: Axes, cell: pd.DataFrame, own_shape: str) -> None:
    for (shape, _), together in cell.groupby(["shape", cell["intensity"].round(3)]):
        names = sorted(set(together["candidate"]))
        for place, name in enumerate(names):
            own = together[together["candidate"] == name]
            axis.plot(
                own["intensity"] * _APART ** (place - (len(names) - 1) / 2),
                own["gflop_per_s"],
                linestyle="",
                markersize=5,
                markerfacecolor=None if shape == own_shape else "none",
                label=name if shape == own_shape else None,
                **style.look(name),
            )
        best = together.groupby("candidate")["share"].median().max()
        axis.annotate(
            f"{best:.0%}",
            (together["intensity"].median(), together["gflop_per_s"].max()),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )


def _ceilings(axis: Axes, probes: pd.DataFrame) -> None:
    """The slope of the read and the flat of the arithmetic, with room around the dots."""
    low, high = (float(edge) for edge in axis.dataLim.intervalx)
    x = np.geomspace(low / 1.6, high * 1.6, 2)
    for metric, label, colour, hatch in _CEILINGS:
        values = probes.loc[probes["metric"] == metric, "value"]
        if values.empty:
            continue
        rate = x if metric == "probe/read_gb_per_s" else np.ones(2)
        axis.fill_between(
            x,
            rate * values.min(),
            rate * values.max(),
            color=colour,
            hatch=hatch,
            alpha=0.4,
            linewidth=1,
            label=label,
        )
    axis.set_xlim(x[0], x[-1])
    axis.margins(y=0.15)
