"""How often the language's rule errs, by simulation through the whole procedure under the run's own noise.

The noise is the run's log ratios by block, centred: of the tested challenger to every incumbent, and of the
registered pairs that extend the primary cell. Blocks are drawn with replacement and whole, so that what a block
did to all arms alike stays shared; a factor sqrt(n / (n - 1)) gives back the spread that centring takes. Each
block drawn keeps its sign or changes it, at even odds: two arms under the same kind of noise differ
symmetrically, while eight blocks always look skewed by chance, and skew is what a one-sided error is most
sensitive to.

To that a true improvement is added, and each simulated run goes through what a real one goes through: its
`SamplingPlan` says how many blocks it has, which void runs end it, and which interval is valid; `rule.adopts`
decides.

Two arrangements:

``as_measured``
    The improvement is over the incumbent that the run showed fastest, and the others are as far behind it as
    they were measured.
``all_equal``
    The improvement is over every incumbent alike: each may stop the challenger by its noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial.decision import rule, stats
from kvtrial.decision.contrasts import Measured, digits
from kvtrial.decision.validity import Judged
from kvtrial.measure.plan import Bounds, SamplingPlan, cell_name
from kvtrial.registration import Decision, Protocol

SIMULATIONS = 10_000
#: Fewer blocks, drawn with replacement, are too often one block over and over.
MIN_BLOCKS = 6
#: True improvements beyond what adopts, on top of it.
_BEYOND = (0.0, 0.02, 0.03, 0.05, 0.10)

Logs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CellNoise:
    """What a run showed of one judged cell.

    Attributes
    ----------
    name, role : str
    plan : SamplingPlan
    logs : ndarray of float64, shape (incumbents, blocks)
        log(challenger / incumbent) by block.
    pairs : ndarray of float64, shape (pairs, blocks)
        Those of the plan's pairs, in the same blocks.
    void_rate : float
        Share of the runs of its blocks that were void.
    """

    name: str
    role: str
    plan: SamplingPlan
    logs: Logs
    pairs: Logs
    void_rate: float = 0.0


def of_run(
    measured: Measured,
    trials: Judged,
    challenger: str | None,
    incumbents: Sequence[str],
    protocol: Protocol,
) -> dict[str, Any]:
    """The error rates of a run, or ``arrangements`` None and the ``reason``."""
    if challenger is None:
        return _none("no challenger is in the trial")
    if not incumbents:
        return _none("no incumbent is in the trial")
    try:
        cells = []
        for cell in rule.judged_cells(protocol):
            plan = measured.plan(cell)
            logs = np.stack([measured.logs(cell, challenger, name) for name in incumbents])
            pairs = list(measured.pair_logs(cell).values())
            stacked = np.stack(pairs) if pairs else np.empty((0, logs.shape[1]))
            void = trials.void_rate("m2", cell_name(cell))
            cells.append(CellNoise(cell_name(cell), cell["role"], plan, logs, stacked, void))
    except stats.Unusable as problem:
        return _none(str(problem))
    return {"challenger": challenger, **simulate(cells, protocol)}


def _none(reason: str) -> dict[str, Any]:
    return {"arrangements": None, "reason": reason}


def simulate(cells: Sequence[CellNoise], protocol: Protocol) -> dict[str, Any]:
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
        ``true_improvement``, and under ``arrangements`` for each of the two ``adopt_probability`` and
        ``standard_error``, lists of equal length. ``claim`` is what the chance may be at exactly the improvement
        that adopts; ``claim_holds`` allows three standard errors.
    """
    for cell in cells:
        if cell.logs.shape[1] < MIN_BLOCKS:
            return _none(
                f"{cell.logs.shape[1]} blocks in cell {cell.name}; {MIN_BLOCKS} are needed to draw from"
            )
    primary = cells[0]
    bounds = primary.plan.bounds(primary.logs)
    if (bounds.low == bounds.high).any():
        return _none("the ratios are constant over blocks: there is no noise to draw from")
    decision = protocol["decision"]
    edge = decision["adopt_lower_bound"]
    improvements = [0.0, edge / 2, *(edge + step for step in _BEYOND)]
    runs = _simulated(cells, decision)
    found: dict[str, Any] = {}
    for name in ("as_measured", "all_equal"):
        behind = [
            cell.logs.mean(axis=1) - cell.logs.mean(axis=1).min()
            if name == "as_measured"
            else np.zeros(len(cell.logs))
            for cell in cells
        ]
        chances = []
        for improvement in improvements:
            moved = [
                (cell.role, Bounds(*(x + math.log1p(improvement) + ahead for x in own)))
                for cell, own, ahead in zip(cells, runs.bounds, behind)
            ]
            chances.append(float((rule.adopts(moved, decision) & runs.finished).mean()))
        found[name] = {
            "adopt_probability": chances,
            "standard_error": [digits(math.sqrt(p * (1 - p) / SIMULATIONS)) for p in chances],
        }
    claim = (1 - decision["confidence"]) / 2
    allowed = claim + 3 * math.sqrt(claim * (1 - claim) / SIMULATIONS)
    at_edge = improvements.index(edge)
    return {
        "true_improvement": [digits(x) for x in improvements],
        "arrangements": found,
        "simulations": SIMULATIONS,
        "adopt_at": digits(edge),
        "claim": digits(claim),
        "claim_holds": all(own["adopt_probability"][at_edge] <= allowed for own in found.values()),
        "mean_blocks": dict(zip((cell.name for cell in cells), map(digits, runs.mean_blocks))),
        "not_finished": digits(1 - float(runs.finished.mean())),
        "void_rate": {cell.name: digits(cell.void_rate) for cell in cells},
    }


@dataclass(frozen=True)
class _Runs:
    """Simulated runs whose true improvement is 0.

    ``bounds``: of each cell, shape (SIMULATIONS, incumbents). ``finished``: bool (SIMULATIONS,), no cell was
    given up. ``mean_blocks``: of each cell.
    """

    bounds: list[Bounds]
    finished: npt.NDArray[np.bool_]
    mean_blocks: list[float]


def _simulated(cells: Sequence[CellNoise], decision: Decision) -> _Runs:
    finished = np.ones(SIMULATIONS, np.bool_)
    bounds, mean_blocks = [], []
    for place, cell in enumerate(cells):
        rng = np.random.default_rng([decision["seed"], place])
        logs, pairs = _noise(cell, rng)
        blocks = cell.plan.wanted(pairs)
        mean, low, high = (np.empty(logs.shape[:2]) for _ in range(3))
        for n in np.unique(blocks):
            own = blocks == n
            mean[own], low[own], high[own] = cell.plan.bounds(logs[own, :, :n])
        bounds.append(Bounds(mean, low, high))
        mean_blocks.append(float(blocks.mean()))
        void = rng.negative_binomial(blocks, 1 - min(cell.void_rate, 0.999))
        finished &= ~cell.plan.lost(void)
    return _Runs(bounds, finished, mean_blocks)


def _noise(cell: CellNoise, rng: np.random.Generator) -> tuple[Logs, Logs]:
    """(SIMULATIONS, incumbents, most) and (SIMULATIONS, pairs, most) log ratios whose true mean is 0."""
    both = np.concatenate([cell.logs, cell.pairs])
    residuals = both - both.mean(axis=1, keepdims=True)
    seen = residuals.shape[1]
    shape = (SIMULATIONS, cell.plan.most)
    drawn = residuals[:, rng.integers(0, seen, shape)] * rng.choice((-1.0, 1.0), shape)
    drawn = np.ascontiguousarray(drawn.swapaxes(0, 1)) * math.sqrt(seen / (seen - 1))
    return drawn[:, : len(cell.logs)], drawn[:, len(cell.logs) :]
