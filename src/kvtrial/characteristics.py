"""Operating characteristics of the decision rule: how often it adopts, under the run's own noise.

The noise is the run's log ratios of the tested challenger to every comparator, centred. Blocks are drawn
from it with replacement, whole, so that what a block did to all arms alike stays shared; a factor
sqrt(n / (n - 1)) gives back the spread that centring takes. To it a true improvement is added in every
cell, and each simulated run goes through the whole procedure: void blocks at the rate that each cell
showed, up to the registered cap, past which the run is INCONCLUSIVE; then `kvtrial.rule.adopts`, which
also decides. The fixed sequence tests one challenger, so its chance is that of the family.

Each block drawn keeps its sign or changes it, at even odds. Arms that suffer the same kind of noise
differ symmetrically, whichever is called the challenger, while a dozen blocks always look skewed by
chance, and skew is what a t interval's one-sided error is most sensitive to. ``as_seen`` gives the same
figures without the change of sign: much above the claim, they say that one arm stalls where others don't,
or that chance made it look so.

Two arrangements of the comparators bound the truth from both sides:

``one_close``
    The improvement is over the comparator that the run showed fastest, and the rest are far slower.
    Nothing but that one stands in the way: least favourable for errors.
``all_equal``
    The improvement is over every comparator alike. Each may stop the challenger by its noise: least
    favourable for power.

``adopt_probability`` is ``one_close`` up to the improvement that the rule asks for, where adopting is an
error, and ``all_equal`` beyond it, where adopting is right. Blocks are drawn independently: a run that
drifted shows it in ``drift_p`` of its contrasts, not here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial import gates, rule, stats
from kvtrial.contrasts import Measured, digits

SIMULATIONS = 10_000
#: Fewer blocks, drawn with replacement, are too often one block over and over.
MIN_BLOCKS = 6


@dataclass(frozen=True)
class CellNoise:
    """What a run showed of one judged cell.

    ``logs``: log(challenger / comparator) by block, float64 (comparators, blocks). ``blocks``: how many
    the protocol registers. ``void_rate``: share of the blocks run that were void.
    """

    name: str
    logs: npt.NDArray[np.float64]
    blocks: int
    void_rate: float


def of_run(
    measured: Measured,
    trials: gates.Judged,
    challenger: str | None,
    comparators: Sequence[str],
    protocol: dict[str, Any],
) -> dict[str, Any]:
    """The characteristics of a run, or ``adopt_probability`` None and the ``reason``."""
    if challenger is None:
        return _none("no challenger is in the trial")
    if not comparators:
        return _none("no comparator is in the trial")
    try:
        cells = [
            CellNoise(
                gates.cell_name(cell),
                measured.log_ratios(cell, challenger, comparators),
                cell["blocks"],
                trials.void_rate("m2", gates.cell_name(cell)),
            )
            for cell in rule.judged_cells(protocol)
        ]
    except stats.Unusable as problem:
        return _none(str(problem))
    return {"challenger": challenger, **operating_characteristics(cells, protocol)}


def _none(reason: str) -> dict[str, Any]:
    return {"adopt_probability": None, "reason": reason}


def operating_characteristics(
    cells: Sequence[CellNoise], protocol: dict[str, Any]
) -> dict[str, Any]:
    """The chance of adopting at several true improvements, with its Monte Carlo standard error.

    Parameters
    ----------
    cells : sequence of CellNoise
        The primary cell first, then the veto cells.
    protocol : dict
        The registered protocol.

    Returns
    -------
    dict
        ``true_improvement``, ``adopt_probability`` and ``standard_error`` are lists of equal length.
        ``claim_familywise`` is what the chance may be at exactly the improvement that adopts;
        ``claim_holds`` allows three standard errors.
    """
    for cell in cells:
        if cell.logs.shape[1] < MIN_BLOCKS:
            return _none(
                f"{cell.logs.shape[1]} blocks in cell {cell.name}; {MIN_BLOCKS} are needed to draw from"
            )
    _, low, high = stats.t_bounds(cells[0].logs, protocol["decision"]["confidence"])
    if (low == high).any():
        return _none("the ratios are constant over blocks: there is no noise to draw from")
    decision = protocol["decision"]
    edge = decision["adopt_lower_bound"]
    improvements = [0.0, edge / 2, *(edge + step for step in (0.0, 0.025, 0.05, 0.075, 0.1, 0.15))]
    finished = _finished(cells, protocol)
    mirrored, as_seen = (
        _arrangements(
            [
                _noise(cell, signs, np.random.default_rng([decision["bootstrap_seed"], place]))
                for place, cell in enumerate(cells)
            ],
            int(cells[0].logs.mean(axis=1).argmin()),
            finished,
            improvements,
            decision,
        )
        for signs in ((-1.0, 1.0), (1.0,))
    )
    chances = [
        mirrored["one_close" if x <= edge else "all_equal"]["adopt_probability"][i]
        for i, x in enumerate(improvements)
    ]
    claim = (1 - decision["confidence"]) / 2
    allowed = claim + 3 * math.sqrt(claim * (1 - claim) / SIMULATIONS)
    return {
        "true_improvement": [digits(x) for x in improvements],
        "adopt_probability": chances,
        "standard_error": _standard_errors(chances),
        "simulations": SIMULATIONS,
        "adopt_at": digits(edge),
        "claim_familywise": digits(claim),
        "claim_holds": chances[improvements.index(edge)] <= allowed,
        **mirrored,
        "as_seen": as_seen,
        "void_rate": {cell.name: digits(cell.void_rate) for cell in cells},
    }


def _finished(cells: Sequence[CellNoise], protocol: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """(SIMULATIONS,): every block of every cell found a valid trial before the cap."""
    rng = np.random.default_rng([protocol["decision"]["bootstrap_seed"], len(cells)])
    finished = np.ones(SIMULATIONS, np.bool_)
    for cell in cells:
        void = rng.random((SIMULATIONS, cell.blocks, protocol["gates"]["max_trials"]))
        finished &= ~(void < cell.void_rate).all(axis=-1).any(axis=-1)
    return finished


def _noise(
    cell: CellNoise, signs: Sequence[float], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """(SIMULATIONS, comparators, blocks) log ratios whose true mean is 0."""
    residuals = cell.logs - cell.logs.mean(axis=1, keepdims=True)
    seen = residuals.shape[1]
    shape = (SIMULATIONS, cell.blocks)
    drawn = residuals[:, rng.integers(0, seen, shape)] * rng.choice(signs, shape)
    return np.ascontiguousarray(drawn.swapaxes(0, 1)) * math.sqrt(seen / (seen - 1))


def _arrangements(
    noise: list[npt.NDArray[np.float64]],
    closest: int,
    finished: npt.NDArray[np.bool_],
    improvements: Sequence[float],
    decision: dict[str, Any],
) -> dict[str, Any]:
    found = {}
    for name, kept in (("one_close", slice(closest, closest + 1)), ("all_equal", slice(None))):
        chances = []
        for improvement in improvements:
            primary, *vetoes = (logs[:, kept] + math.log1p(improvement) for logs in noise)
            chances.append(float((rule.adopts(primary, vetoes, decision) & finished).mean()))
        found[name] = {"adopt_probability": chances, "standard_error": _standard_errors(chances)}
    return found


def _standard_errors(chances: Sequence[float]) -> list[float | None]:
    return [digits(math.sqrt(p * (1 - p) / SIMULATIONS)) for p in chances]
