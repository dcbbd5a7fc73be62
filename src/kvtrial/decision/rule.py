"""The two rules for arms that want to replace another, on arrays of log ratios.

`language` asks the first about what was measured, `error_rates` about thousands of simulated tables at a time;
`run` asks the second. Each gets its answer from the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial.measure.plan import Bounds
from kvtrial.registration import Cell, Protocol


def judged_cells(protocol: Protocol) -> list[Cell]:
    """The cells that decide: the primary one, then the veto cells."""
    cells = protocol["cells"]
    return [c for role in ("primary", "veto") for c in cells if c["role"] == role]


def worst_allowed(decision: Mapping[str, Any]) -> float:
    """The log ratio below which a context is worse than is allowed; exactly as registered is not."""
    return math.log1p(-decision["veto_regression"]) - float(decision["relative_slack"])


def passes(
    role: str, bounds: Bounds, decision: Mapping[str, Any], at_least: str = "adopt_lower_bound"
) -> npt.NDArray[np.bool_]:
    """Whether contrasts with these bounds pass in a cell of this role.

    ``at_least`` names the improvement that the lower bound has to reach in the primary cell. The relative slack
    lets exactly 10% adopt and exactly 3% pass.
    """
    if role == "primary":
        return np.asarray(bounds.low >= math.log1p(decision[at_least]) - decision["relative_slack"])
    return np.asarray(bounds.mean >= worst_allowed(decision))


def adopts(
    cells: Sequence[tuple[str, Bounds]],
    decision: Mapping[str, Any],
    at_least: str = "adopt_lower_bound",
) -> npt.NDArray[np.bool_]:
    """Whether a challenger is adopted: every contrast passes in every judged cell.

    Parameters
    ----------
    cells : sequence of (role, Bounds of shape (..., comparators))
        The primary cell and the veto cells.
    decision : mapping
        The protocol's ``decision``.

    Returns
    -------
    ndarray of bool, shape (...)
    """
    passed = [passes(role, own, decision, at_least).all(axis=-1) for role, own in cells]
    return np.logical_and.reduce(passed)
