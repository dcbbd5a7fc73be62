"""The rule for one challenger, on arrays of log ratios.

`kvtrial.decide` asks it once about what was measured; `kvtrial.characteristics` asks it about thousands
of simulated tables at a time. Both get their answer from the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial import stats

Logs = npt.NDArray[np.float64]


def tested(challengers: Sequence[str], eligibility: dict[str, list[str]]) -> str | None:
    """The challenger that the fixed sequence tests: the first in the trial, or None.

    The next is tested only where this one was not in the trial, so that the familywise error stays
    at one test's.
    """
    return next((name for name in challengers if not eligibility[name]), None)


def judged_cells(protocol: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that decide: the primary one, then the veto cells."""
    cells = protocol["cells"]
    return [c for role in ("primary", "veto") for c in cells if c["role"] == role]


def passes(role: str, mean: Logs, low: Logs, decision: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """Whether contrasts with these log means and lower bounds pass in a cell of this role.

    The relative slack lets exactly 10% adopt and exactly 3% pass.
    """
    slack = decision["relative_slack"]
    if role == "primary":
        return low >= math.log1p(decision["adopt_lower_bound"]) - slack
    return mean >= math.log1p(-decision["veto_regression"]) - slack


def adopts(
    primary: Logs, vetoes: Sequence[Logs], decision: dict[str, Any]
) -> npt.NDArray[np.bool_]:
    """Whether the challenger is adopted.

    Parameters
    ----------
    primary : ndarray of float64, shape (..., comparators, blocks)
        log(challenger / comparator) of tokens/s by block, in the primary cell.
    vetoes : sequence of ndarray of float64, shape (..., comparators, blocks of that cell)
        The same for each veto cell.
    decision : dict
        The protocol's ``decision``.

    Returns
    -------
    ndarray of bool, shape (...)
        True where every contrast passes in every cell.
    """
    adopted = np.ones(primary.shape[:-2], np.bool_)
    for role, logs in [("primary", primary), *(("veto", veto) for veto in vetoes)]:
        mean, low, _ = stats.t_bounds(logs, decision["confidence"])
        adopted &= passes(role, mean, low, decision).all(axis=-1)
    return adopted
