"""Operating characteristics of the decision rule: how often it adopts, under the run's own noise.

The noise is the run's log ratios of the tested challenger to every comparator, centred. Blocks are drawn
from it with replacement, whole, so that what a block did to all arms alike stays shared; a factor
sqrt(n / (n - 1)) gives back the spread that centring takes. To it a true improvement is added in every
cell, and each simulated run goes through the whole procedure: void blocks at the rate that each cell
showed, up to the registered cap, past which the run is INCONCLUSIVE; then `rule.adopts`, which
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

from kvtrial.decision import gates, rule, stats
from kvtrial.decision.contrasts import Measured, digits

SIMULATIONS = 10_000
#: Fewer blocks, drawn with replacement, are too often one block over and over.
MIN_BLOCKS = 6


@dataclass(frozen=True)
class CellNoise:
    """What a run showed of one judged cell.

    Attributes
    ----------
    cell : dict
        The cell as registered.
    logs : ndarray of float64, shape (comparators, blocks)
        log(challenger / comparator) by block.
    void_rate : float
        Share of the blocks run that were void.
    sizing : int, optional
        The comparator whose contrast fixes the number of blocks; None where none does.
    """

    cell: dict[str, Any]
    logs: npt.NDArray[np.float64]
    void_rate: float = 0.0
    sizing: int | None = None

    @property
    def name(self) -> str:
        """Such as ``4096x1x1``."""
        return gates.cell_name(self.cell)

    @property
    def max_blocks(self) -> int:
        """The most blocks that a simulated run of the cell can have."""
        return int(self.cell["blocks"] if self.sizing is None else self.cell["max_blocks"])


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
    precision = protocol["decision"]["precision"]
    sizing = None
    if challenger == precision["to"] and precision["from"] in comparators:
        sizing = comparators.index(precision["from"])
    try:
        cells = [
            CellNoise(
                cell,
                measured.log_ratios(cell, challenger, comparators),
                trials.void_rate("m2", gates.cell_name(cell)),
                sizing if "max_blocks" in cell else None,
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
    closest = int(cells[0].logs.mean(axis=1).argmin())
    mirrored, as_seen = (
        _arrangements(_simulated(cells, signs, protocol), closest, improvements, decision)
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
        **{key: mirrored[key] for key in ("one_close", "all_equal")},
        "as_seen": {key: as_seen[key] for key in ("one_close", "all_equal")},
        "mean_blocks": {
            cell.name: digits(mean) for cell, mean in zip(cells, mirrored["mean_blocks"])
        },
        "void_rate": {cell.name: digits(cell.void_rate) for cell in cells},
    }


@dataclass(frozen=True)
class _Runs:
    """Simulated runs whose true improvement is 0.

    ``cells``: what the rule looks at. ``finished``: bool (SIMULATIONS,), every block of every cell
    found a valid trial before the cap. ``blocks``: mean number of blocks of each cell.
    """

    cells: list[rule.Bounds]
    finished: npt.NDArray[np.bool_]
    blocks: list[float]


def _simulated(
    cells: Sequence[CellNoise], signs: Sequence[float], protocol: dict[str, Any]
) -> _Runs:
    decision = protocol["decision"]
    seed = decision["bootstrap_seed"]
    voids = np.random.default_rng([seed, len(cells)])
    finished = np.ones(SIMULATIONS, np.bool_)
    found, mean_blocks = [], []
    for place, cell in enumerate(cells):
        logs = _noise(cell, signs, np.random.default_rng([seed, place]))
        blocks = np.full(SIMULATIONS, cell.cell["blocks"])
        if cell.sizing is not None:
            blocks = rule.blocks_wanted(logs[:, cell.sizing], cell.cell, decision)
        mean, low = (np.empty(logs.shape[:2]) for _ in range(2))
        for n in np.unique(blocks):
            own = blocks == n
            _, mean[own], low[own] = rule.bounds(cell.cell, logs[own, :, :n], decision)
        found.append(rule.Bounds(cell.cell["role"], mean, low))
        mean_blocks.append(float(blocks.mean()))
        trials = (SIMULATIONS, cell.max_blocks, protocol["gates"]["max_trials"])
        lost = (voids.random(trials) < cell.void_rate).all(axis=-1)
        finished &= ~(lost & (np.arange(cell.max_blocks) < blocks[:, None])).any(axis=-1)
    return _Runs(found, finished, mean_blocks)


def _noise(
    cell: CellNoise, signs: Sequence[float], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """(SIMULATIONS, comparators, blocks) log ratios whose true mean is 0."""
    residuals = cell.logs - cell.logs.mean(axis=1, keepdims=True)
    seen = residuals.shape[1]
    shape = (SIMULATIONS, cell.max_blocks)
    drawn = residuals[:, rng.integers(0, seen, shape)] * rng.choice(signs, shape)
    return np.ascontiguousarray(drawn.swapaxes(0, 1)) * math.sqrt(seen / (seen - 1))


def _arrangements(
    runs: _Runs,
    closest: int,
    improvements: Sequence[float],
    decision: dict[str, Any],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kept in (("one_close", slice(closest, closest + 1)), ("all_equal", slice(None))):
        chances = []
        for improvement in improvements:
            # A true improvement moves every log ratio, and so mean and bound, by as much.
            gain = math.log1p(improvement)
            moved = [
                rule.Bounds(c.role, c.mean[:, kept] + gain, c.low[:, kept] + gain)
                for c in runs.cells
            ]
            chances.append(float((rule.adopts(moved, decision) & runs.finished).mean()))
        found[name] = {"adopt_probability": chances, "standard_error": _standard_errors(chances)}
    return {**found, "mean_blocks": runs.blocks}


def _standard_errors(chances: Sequence[float]) -> list[float | None]:
    return [digits(math.sqrt(p * (1 - p) / SIMULATIONS)) for p in chances]
