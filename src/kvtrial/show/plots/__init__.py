"""Figures: one module each, with ``TITLE``, ``CAPTION`` and ``draw(verdict, events) -> Figure``.

``draw`` returns None where the run has nothing to show for it. Captions say what n is and what the
interval means. A module may name the ``SECTION`` of the report that it belongs to, ``"results"``
by default. A new figure is one module and one line here; report and MLflow show whatever is drawn.
"""

from __future__ import annotations

from kvtrial.show.plots import (
    characteristics,
    ecdf,
    forest,
    peers,
    recompute,
    restore,
    roofline,
    scaling,
    waterfall,
)

RESULTS = "results"

#: file stem -> module, in the order of the report.
FIGURES = {
    "forest": forest,
    "waterfall": waterfall,
    "ecdf": ecdf,
    "roofline": roofline,
    "scaling": scaling,
    "restore": restore,
    "recompute": recompute,
    "peers": peers,
    "characteristics": characteristics,
}

__all__ = ["FIGURES", "RESULTS"]
