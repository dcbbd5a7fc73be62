"""One style for every figure: colour-blind safe, the same colour and marker for an arm everywhere.

A figure is drawn twice: with its panels side by side, and for a phone with one panel below the other.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import matplotlib

matplotlib.use("Agg")
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

#: Okabe and Ito's palette, which stays distinct under the common colour-vision deficiencies, with a grey,
#: a wine red, an olive, an indigo and a teal; then darker and lighter ones of theirs. Light ones are darkened
#: to a contrast of 3 on white.
PALETTE = (
    "#000000", "#B07800", "#2F8DC4", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#8C8C8C",
    "#882255", "#87871F", "#332288", "#2F8F80", "#661100", "#5B8DC0", "#AA4466", "#117733",
)  # fmt: skip
_KNOWN = (
    "K0", "A1", "A2", "K1", "K2", "K3", "K4", "K5", "K1C", "K1T", "K3T", "K2T", "K5T", "K6", "K6N", "K7",
)  # fmt: skip
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
        return {"color": PALETTE[_PLACES[name]], "marker": _MARKERS[_PLACES[name]]}
    index = sum(name.encode())
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": _STRANGERS[index % len(_STRANGERS)],
    }


def line(name: str) -> dict[str, Any]:
    """The same where there are lines alone: dashed for an arm of another package."""
    return {"color": look(name)["color"], "linestyle": "-" if name in _PLACES else "--"}


#: Width of a figure for a phone, inches: its words keep a size at which they can be read.
_NARROW = 4.3
_stacked: ContextVar[bool] = ContextVar("stacked", default=False)


def is_stacked() -> bool:
    """Whether panels lie below each other."""
    return _stacked.get()


@contextlib.contextmanager
def stacked() -> Iterator[None]:
    """Figures that are made in the body have one panel below the other."""
    token = _stacked.set(True)
    try:
        yield
    finally:
        _stacked.reset(token)


def figure(
    panels: int = 1, *, width: float = 7.2, height: float = 4.0
) -> tuple[Figure, list[Axes]]:
    """A figure with ``panels`` axes side by side, or within `stacked` below each other; sizes in inches."""
    grid, size = (1, panels), (width, height)
    if is_stacked():
        grid, size = (panels, 1), (_NARROW, panels * height)
    drawn, axes = plt.subplots(*grid, figsize=size, squeeze=False, layout="constrained")
    listed = list(axes.flat)
    for axis in listed:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return drawn, listed


def name_rows(axes: Sequence[Axes], names: Sequence[str], **text: Any) -> None:
    """Names of the rows that all panels share: on the first of those side by side, on each of those stacked."""
    for number, axis in enumerate(axes):
        said = names if number == 0 or is_stacked() else [""] * len(names)
        axis.set_yticks(range(len(names)), said, **text)


def legend_below(drawn: Figure, axes: Iterable[Axes], columns: int, title: str = "") -> None:
    """One legend below all panels, each label once: it covers no line."""
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    drawn.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(columns, 4) if is_stacked() else columns,
        fontsize=8,
        title=title or None,
        title_fontsize=8,
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
