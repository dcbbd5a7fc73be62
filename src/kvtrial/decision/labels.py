"""What stands beside a contrast wherever it is shown: at a terminal, in a figure, in MLflow, on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


def of_context(context: int, trained: int | None) -> str:
    """Filled positions, with a star where the model was not trained for as many; see `past_trained`."""
    return f"{context:,}" + ("*" if trained is not None and context > trained else "")


def past_trained(contexts: Iterable[int], trained: int | None) -> str:
    """What the star says, where there is one."""
    if trained is None or max(contexts, default=0) <= trained:
        return ""
    return f"* past the {trained:,} positions that the model was trained for"
