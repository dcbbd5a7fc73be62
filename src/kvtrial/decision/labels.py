"""What stands beside a contrast wherever it is shown: at a terminal, in a figure, in MLflow, on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The arms lay out their rows differently: the contrast is of that too, whatever else it is of.
LAYOUTS_DIFFER = " (layouts differ)"


def of_contrast(row: Mapping[str, Any]) -> str:
    """What to write behind the names of a contrast's arms.

    Parameters
    ----------
    row : mapping
        A contrast or hypothesis of a verdict; one from before layouts were recorded gets no label.
    """
    return LAYOUTS_DIFFER if row.get("layouts_differ") else ""
