"""Other people's engines and ours: the comparison that peers.json holds.

`compare` is a pure function of the raw rows. Both sides are taken at their best setting in a cell: the
one with the highest geometric mean over the blocks. Ratios are formed within the block, so what the
machine did to both drops out, and their interval is the t interval of `kvtrial.decision.stats`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvtrial.decision import stats
from kvtrial.decision.contrasts import digits
from kvtrial.measure.peers.programs import PEERS, arms_of


@dataclass(frozen=True)
class Comparison:
    """A metric of peers.json: whose values it is made of, and how.

    ``profiles``: those of ours that compete. ``rate``: (values of one block, context) → a number in
    the metric's unit. ``larger_is_better`` fixes the ratio's direction: above 1 ours is better.
    """

    metric: str
    source: str
    programs: tuple[str, ...]
    profiles: frozenset[str]
    rate: Callable[[np.ndarray, int], float]
    larger_is_better: bool


def _decode_rate(step_ms: np.ndarray, context: int) -> float:
    return stats.tokens_per_s(step_ms)


def _prefill_rate(prompt_ms: np.ndarray, context: int) -> float:
    return stats.tokens_per_s(prompt_ms, context)


def _median(attention_ms: np.ndarray, context: int) -> float:
    return float(np.median(attention_ms))


_FP32, _FP16 = frozenset({"fp32"}), frozenset({"fp16"})
_LLAMA = ("llama.cpp",)
COMPARISONS = (
    Comparison("m2/tokens_per_s/fp32", "m2/step_ms", _LLAMA, _FP32, _decode_rate, True),
    Comparison("m2/tokens_per_s/fp16", "m2/step_ms", _LLAMA, _FP16, _decode_rate, True),
    Comparison("prefill/tokens_per_s", "prefill/ms", _LLAMA, _FP32 | _FP16, _prefill_rate, True),
    Comparison(
        "m1/attention_ms", "m1/attention_ms", ("torch", "onnxruntime"), _FP32, _median, False
    ),
)


def compare(
    events: pd.DataFrame,
    *,
    model: str,
    profiles: dict[str, str],
    confidence: float = 0.95,
) -> list[dict[str, Any]]:
    """The rows of peers.json.

    Parameters
    ----------
    events : DataFrame
        Columns of `kvtrial.run.events.COLUMNS`. In ``prefill/ms`` rows ``context`` is the length of the
        prompt; ``package`` rows have a program as candidate, its package and version as text.
    model : str
    profiles : dict
        Our arm → the name of its numerical profile.
    confidence : float

    Returns
    -------
    list of dict
        ``ours`` and ``peer`` are geometric means over the blocks in the metric's unit, so ``ratio``
        is their quotient; it is above 1 where ours is better. A row that has no two whole sides is
        left out. Of several attempts the one with the most blocks gives it, the first among equals:
        what came out has no say.
    """
    rows: list[dict[str, Any]] = []
    named = events[events["metric"] == "package"]
    packages = dict(zip(zip(named["candidate"], named["attempt"]), named["text"]))
    for comparison in COMPARISONS:
        own = events[events["metric"] == comparison.source]
        ours = [arm for arm, profile in profiles.items() if profile in comparison.profiles]
        for (context, threads), cell in own.groupby(["context", "threads"]):
            for program in comparison.programs:
                tries = {}
                for number, attempt in cell.groupby("attempt"):
                    sides = _by_block(attempt, comparison, int(context))
                    found = _row(sides, comparison, ours, arms_of(program), confidence)
                    if found is not None:
                        tries[number] = found
                if not tries:
                    continue
                number = max(tries, key=lambda n: (tries[n]["n_blocks"], -n))
                found = tries[number]
                setting = PEERS[found.pop("peer_arm")].setting
                rows.append(
                    {
                        "model": model,
                        "metric": comparison.metric,
                        "context": int(context),
                        "threads": int(threads),
                        **found,
                        "peer_setting": f"{packages[program, number]}, {setting}",
                    }
                )
    return rows


def _by_block(
    rows: pd.DataFrame, comparison: Comparison, context: int
) -> dict[str, dict[int, float]]:
    """Arm → block → value, for the arms whose every block means something.

    An arm that failed in some block is out: pairs are never cut to the shorter side.
    """
    found: dict[str, dict[int, float]] = {}
    for (arm, block), own in rows.groupby(["candidate", "block"])["value"]:
        try:
            value = comparison.rate(own.to_numpy(np.float64), context)
        except stats.Unusable:
            continue
        if np.isfinite(value) and value > 0:
            found.setdefault(str(arm), {})[int(block)] = value
    blocks = set(rows["block"])
    return {arm: values for arm, values in found.items() if values.keys() == blocks}


def _row(
    sides: dict[str, dict[int, float]],
    comparison: Comparison,
    ours: list[str],
    theirs: list[str],
    confidence: float,
) -> dict[str, Any] | None:
    """Both sides' best and their ratio; None where a side has nothing, or one block only."""

    def best(arms: list[str]) -> tuple[str, float] | None:
        means = {
            a: float(np.exp(np.mean(np.log([*sides[a].values()])))) for a in arms if a in sides
        }
        if not means:
            return None
        choose = max if comparison.larger_is_better else min
        return choose(means.items(), key=lambda item: item[1])

    our_best, peer_best = best(ours), best(theirs)
    if our_best is None or peer_best is None:
        return None
    top, bottom = sides[our_best[0]], sides[peer_best[0]]
    if not comparison.larger_is_better:
        top, bottom = bottom, top
    try:
        interval = stats.t_interval(stats.paired_log_ratios(top, bottom), confidence)
    except stats.InsufficientData:
        return None
    return {
        "ours": digits(our_best[1]),
        "peer": digits(peer_best[1]),
        "ratio": digits(interval.ratio),
        "ci95": [digits(interval.low), digits(interval.high)],
        "n_blocks": interval.n,
        "our_arm": our_best[0],
        "peer_arm": peer_best[0],
    }
