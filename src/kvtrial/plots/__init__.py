"""Figures: one module each, each with ``TITLE``, ``CAPTION`` and ``draw(verdict, events) -> Figure``.

``draw`` returns None where the run has nothing to show for it. Captions say what n is and what the
interval means.
"""

from __future__ import annotations

from kvtrial.plots import (
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

#: file stem -> module, in the order of the report.
FIGURES = {
    "forest": forest,
    "characteristics": characteristics,
    "waterfall": waterfall,
    "ecdf": ecdf,
    "scaling": scaling,
    "roofline": roofline,
    "restore": restore,
    "peers": peers,
    "recompute": recompute,
}

__all__ = ["FIGURES"]
