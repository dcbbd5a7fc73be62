"""The rule for one challenger, on arrays of log ratios.

`verdict` asks it once about what was measured; `error_rates` asks it about thousands of simulated tables
at a time. Both get their answer from the same lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtrial.decision import stats

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


def blocks_wanted(
    logs: Logs, cell: dict[str, Any], decision: dict[str, Any]
) -> npt.NDArray[np.int64]:
    """How many blocks a cell is to have, from the spread of its first ones; never from their mean.

    So many that the interval of the registered contrast would be as narrow as registered, were the
    spread that of the first ``blocks``; at most ``max_blocks``, and in steps of two, since blocks come
    in mirrored pairs.

    Parameters
    ----------
    logs : ndarray of float64, shape (..., at least cell["blocks"])
        Log ratios of the registered contrast by block; only the first ``blocks`` are looked at.
    cell : dict
        A cell of the protocol.
    decision : dict
        The protocol's ``decision``; ``precision.half_width`` is of the log ratio.

    Returns
    -------
    ndarray of int64, shape (...)
    """
    first = cell["blocks"]
    most = cell.get("max_blocks", first)
    if most == first:
        return np.full(logs.shape[:-1], first, np.int64)
    spread = logs[..., :first].std(axis=-1, ddof=1)
    quantile = stats.t_quantile(first - 1, decision["confidence"])
    wanted = np.ceil((quantile * spread / decision["precision"]["half_width"]) ** 2)
    wanted += (wanted - first) % 2
    return np.clip(wanted, first, most).astype(np.int64)


class Bounds(NamedTuple):
    """What the rule looks at in one cell: log means and lower bounds, float64 (..., comparators)."""

    role: str
    mean: Logs
    low: Logs


def bounds(cell: dict[str, Any], logs: Logs, decision: dict[str, Any]) -> Bounds:
    """Bounds of a cell's log ratios challenger / comparator, shape (..., comparators, blocks).

    A cell with more blocks than ``blocks`` got them by `blocks_wanted`; its interval allows for it.
    """
    mean, low, _ = stats.t_bounds(logs, decision["confidence"], cell["blocks"])
    return Bounds(cell["role"], mean, low)


def adopts(cells: Sequence[Bounds], decision: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """Whether the challenger is adopted: every contrast passes in every judged cell.

    Parameters
    ----------
    cells : sequence of Bounds
        The primary cell and the veto cells.
    decision : dict
        The protocol's ``decision``.

    Returns
    -------
    ndarray of bool, shape (...)
    """
    passed = [passes(c.role, c.mean, c.low, decision).all(axis=-1) for c in cells]
    return np.logical_and.reduce(passed)
