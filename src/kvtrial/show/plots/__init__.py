"""Figures: one module each, with ``TITLE``, ``CAPTION`` and ``draw(verdict, events) -> Figure``.

``draw`` returns None where the run has nothing to show for it. Captions say what n is and what the
interval means. A module may name the ``SECTION`` of the report that it belongs to, ``"results"``
by default; the first figure is the picture of the answer and stands above all tables. A new figure is one
module and one line here; report and MLflow show whatever is drawn.
"""

from __future__ import annotations

from kvtrial.show.plots import (
    arms,
    ecdf,
    error_rates,
    forest,
    peers,
    quality,
    recompute,
    restore,
    roofline,
    scaling,
    waterfall,
)

RESULTS = "results"
#: Of the figure that stands above all others.
FIRST = "first"

#: file stem -> module, in the order of the report.
FIGURES = {
    "arms": arms,
    "scaling": scaling,
    "quality": quality,
    "forest": forest,
    "waterfall": waterfall,
    "ecdf": ecdf,
    "roofline": roofline,
    "restore": restore,
    "recompute": recompute,
    "peers": peers,
    "error_rates": error_rates,
}

__all__ = ["FIGURES", "FIRST", "RESULTS"]
