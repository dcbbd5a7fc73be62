"""A/A: one candidate, registered twice and measured as two. Its ratio is known to be 1.

It is the decision's error rate measured rather than simulated, if only once: what the rule would take for
an improvement here is one of places, orders or chance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvtrial.decision import error_rates, gates, rule
from kvtrial.decision.contrasts import contrast, paired_logs

#: The two arms of stage ``aa``.
ARMS = ("first", "second")


def of_run(trials: gates.Judged, protocol: dict[str, Any]) -> dict[str, Any]:
    """The ratio that was measured, with its interval, and the false adoptions that its noise implies.

    Returns
    -------
    dict
        What `kvtrial.decision.contrasts.contrast` gives, and ``candidate``. Where there is a ratio also:
        ``covers_1``, which one interval in twenty does not by chance; ``adopts``, whether the rule, asked
        about these blocks as those of the primary cell, takes either arm for an improvement; and
        ``false_adoption``, the chance of that at true improvements up to the one that adopts, simulated
        as in `kvtrial.decision.error_rates` with this noise in place of a challenger's. The three are None
        where nothing was measured.
    """
    seconds = _seconds(trials.valid_rows)
    ratio = contrast(seconds[ARMS[0]], seconds[ARMS[1]], protocol)
    found: dict[str, Any] = {
        "candidate": protocol["aa"]["candidate"],
        **ratio,
        **dict.fromkeys(("covers_1", "adopts", "false_adoption")),
    }
    if ratio["ratio"] is None:
        return found
    low, high = ratio["ci95"]
    logs = paired_logs(seconds[ARMS[0]], seconds[ARMS[1]])
    return {
        **found,
        "covers_1": low <= 1.0 <= high,
        "adopts": _adopts(logs, protocol),
        "false_adoption": _false_adoption(logs, trials, protocol),
    }


def _seconds(valid_rows: pd.DataFrame) -> dict[str, dict[int, float]]:
    """Arm → block → seconds of all steps: both arms decode equally many, so the ratio of tokens/s is that
    of the times the other way up."""
    rows = valid_rows[(valid_rows["stage"] == "aa") & (valid_rows["metric"] == "m2/step_ms")]
    seconds: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    for (arm, block), own in rows.groupby(["candidate", "block"])["value"]:
        seconds[str(arm)][int(block)] = float(own.sum()) / 1e3
    return seconds


def _cell(logs: npt.NDArray[np.float64], protocol: dict[str, Any]) -> dict[str, Any]:
    """The primary cell, with as many blocks as A/A has: their number is registered, not open."""
    return {**rule.judged_cells(protocol)[0], "blocks": logs.size}


def _adopts(logs: npt.NDArray[np.float64], protocol: dict[str, Any]) -> bool:
    decision = protocol["decision"]
    both = np.stack([logs, -logs])[:, None, :]  # (which arm is called the challenger, 1, blocks)
    bounds = rule.bounds(_cell(logs, protocol), both, decision)
    return bool(rule.adopts([bounds], decision).any())


def _false_adoption(
    logs: npt.NDArray[np.float64], trials: gates.Judged, protocol: dict[str, Any]
) -> dict[str, Any]:
    cell = _cell(logs, protocol)
    noise = error_rates.CellNoise(
        cell, logs[None, :], trials.void_rate("aa", gates.cell_name(cell))
    )
    found = error_rates.operating_characteristics([noise], protocol)
    if found["adopt_probability"] is None:
        return found
    errors = [x <= found["adopt_at"] for x in found["true_improvement"]]
    keys = ("true_improvement", "adopt_probability", "standard_error")
    return {
        **{key: [v for v, error in zip(found[key], errors) if error] for key in keys},
        "claim_holds": found["claim_holds"],
    }
