"""One style for every figure: colour-blind safe, the same colour for an arm everywhere."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import matplotlib

matplotlib.use("Agg")
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

#: Okabe and Ito's palette, which stays distinct under the common colour-vision deficiencies, with a grey,
#: a wine red, an olive, an indigo and a teal beside it; then darker and lighter ones of theirs.
_PALETTE = (
    "#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#8C8C8C",
    "#882255", "#999933", "#332288", "#44AA99", "#661100", "#6699CC", "#AA4466", "#117733",
)  # fmt: skip
_KNOWN = ("K0", "A1", "A2", "K1", "K2", "K3", "K4", "K5", "K1C", "K1T", "K3T", "K2T", "K5T", "K6", "K6N", "K7")
_MARKERS = "osD^vP*Xh<>pHd8."
_STRANGERS = "x+1234"
# The cold stores have figures of their own, the control is no pair's.
_PLACES = {name: place for place, name in enumerate(_KNOWN)} | {
    "Z1": 3,
    "Z2": 5,
    "plain": 7,
    "C0": 7,
}


def look(name: str) -> dict[str, Any]:
    """Colour and marker of an arm, equal in every figure.

    An arm of another package shares a colour with one of ours; its marker is of strokes.
    """
    if name in _PLACES:
        return {"color": _PALETTE[_PLACES[name]], "marker": _MARKERS[_PLACES[name]]}
    index = sum(name.encode())
    return {
        "color": _PALETTE[index % len(_PALETTE)],
        "marker": _STRANGERS[index % len(_STRANGERS)],
    }


def line(name: str) -> dict[str, Any]:
    """The same where there are lines alone: dashed for an arm of another package."""
    return {"color": look(name)["color"], "linestyle": "-" if name in _PLACES else "--"}


def figure(
    columns: int = 1, *, width: float = 7.2, height: float = 4.0
) -> tuple[Figure, list[Axes]]:
    """A figure with ``columns`` axes side by side, sizes in inches."""
    drawn, axes = plt.subplots(
        1, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    listed = list(axes[0])
    for axis in listed:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return drawn, listed


def legend_below(drawn: Figure, axes: Iterable[Axes], columns: int) -> None:
    """One legend below all panels, each label once."""
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=8
    )


def span_of(counts: Iterable[int]) -> str:
    """Numbers of blocks or steps as a title says them: ``6``, or ``6 to 18`` where they differ."""
    low, high = min(counts := list(counts)), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def plain_log(axis: Axes, which: str) -> None:
    """A log scale on ``which`` ("x" or "y") whose few ticks are written as plain numbers."""
    getattr(axis, f"set_{which}scale")("log")
    low, high = getattr(axis, f"get_{which}lim")()
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        (1, 1.1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 6, 8),
    ):
        ticks = [s * 10.0**d for d in decades for s in steps if low <= s * 10.0**d <= high]
        if len(ticks) >= 3:
            break
    getattr(axis, f"set_{which}ticks")(ticks, [f"{t:g}" for t in ticks])
    getattr(axis, f"{which}axis").minorticks_off()
