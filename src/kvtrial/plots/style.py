"""One style for every figure: colour-blind safe, the same colour for an arm everywhere."""

from __future__ import annotations

import logging
from typing import Any

import matplotlib

matplotlib.use("Agg")
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

#: Okabe and Ito's palette, which stays distinct under the common colour-vision deficiencies.
_PALETTE = (
    "#000000", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#8C8C8C",
)  # fmt: skip
_KNOWN = ("K0", "A1", "A2", "K1", "K2", "K3", "K4", "K5")
_MARKERS = "osD^vP*X"


def look(name: str) -> dict[str, Any]:
    """Colour and marker of an arm, equal in every figure."""
    index = _KNOWN.index(name) if name in _KNOWN else sum(name.encode())
    return {"color": _PALETTE[index % len(_PALETTE)], "marker": _MARKERS[index % len(_MARKERS)]}


def figure(columns: int = 1, *, width: float = 7.2, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """A figure with ``columns`` axes side by side, sizes in inches."""
    drawn, axes = plt.subplots(1, columns, figsize=(width, height), squeeze=False, layout="constrained")
    listed = list(axes[0])
    for axis in listed:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.set_axisbelow(True)
    return drawn, listed
