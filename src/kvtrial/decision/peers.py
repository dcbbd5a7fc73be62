"""Other people's engines and ours: the comparison that peers.json holds.

`compare` is a pure function of the raw rows. Of each profile of ours the best arm in a cell, the one with the
highest geometric mean over the blocks, stands beside every setting of a peer; the peer's best one is marked, and
is the one that "over llama.cpp" speaks of. Ratios are formed within the block, so what the machine did to
both drops out, and their interval is the t interval of `kvtrial.decision.stats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    ``apart``: each profile of ours has rows of its own, named ``metric/profile``. ``rate``: (values of one block,
    context) → a number in the metric's unit. ``larger_is_better`` fixes the ratio's direction: above 1 ours is
    better.
    """

    metric: str
    source: str
    programs: tuple[str, ...]
    apart: bool
    rate: Callable[[np.ndarray, int], float]
    larger_is_better: bool


def _decode_rate(step_ms: np.ndarray, context: int) -> float:
    return stats.tokens_per_s(step_ms)


def _prefill_rate(prompt_ms: np.ndarray, context: int) -> float:
    return stats.tokens_per_s(prompt_ms, context)


def _median(attention_ms: np.ndarray, context: int) -> float:
    return float(np.median(attention_ms))


_LLAMA = ("llama.cpp",)
COMPARISONS = (
    Comparison("m2/tokens_per_s", "m2/step_ms", _LLAMA, True, _decode_rate, True),
    Comparison("prefill/tokens_per_s", "prefill/ms", _LLAMA, False, _prefill_rate, True),
    Comparison(
        "m1/attention_ms",
        "m1/attention_ms",
        ("torch", "onnxruntime", "openvino"),
        True,
        _median,
        False,
    ),
)


def compare(
    events: pd.DataFrame,
    *,
    model: str,
    shape: Mapping[str, int],
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
    shape : mapping
        layers, kv_heads and head_dim of its stores.
    profiles : dict
        Our arm → the name of its numerical profile.
    confidence : float

    Returns
    -------
    list of dict
        ``ours`` and ``peer`` are geometric means over the blocks in the metric's unit, so ``ratio``
        is their quotient; it is above 1 where ours is better. ``best`` marks the peer's best setting. A row
        that has no two whole sides is left out. Of several attempts the one with the most blocks gives it, the
        first among equals: what came out has no say.
    """
    rows: list[dict[str, Any]] = []
    named = events[events["metric"] == "package"]
    packages = dict(zip(zip(named["candidate"], named["attempt"]), named["text"]))
    for comparison in COMPARISONS:
        own = events[events["metric"] == comparison.source]
        for metric, ours in _sides(comparison, profiles):
            for (context, threads), cell in own.groupby(["context", "threads"]):
                for program in comparison.programs:
                    tries = {}
                    for number, attempt in cell.groupby("attempt"):
                        sides = _by_block(attempt, comparison, int(context))
                        if found := _rows(sides, comparison, ours, arms_of(program), confidence):
                            tries[number] = found
                    if not tries:
                        continue
                    number = max(tries, key=lambda n: (tries[n][0]["n_blocks"], -n))
                    rows += [
                        {
                            "model": model,
                            "metric": metric,
                            "context": int(context),
                            "threads": int(threads),
                            **{key: value for key, value in found.items() if key != "peer_arm"},
                            "peer_setting": (
                                f"{packages[program, number]}, {PEERS[found['peer_arm']].setting}"
                            ),
                            "bytes_a_token": PEERS[found["peer_arm"]].bytes_a_token(shape),
                        }
                        for found in tries[number]
                    ]
    return rows


def _sides(comparison: Comparison, profiles: dict[str, str]) -> list[tuple[str, list[str]]]:
    """The comparison's metrics, each with our arms that compete in it."""
    if not comparison.apart:
        return [(comparison.metric, list(profiles))]
    return [
        (f"{comparison.metric}/{name}", [arm for arm, own in profiles.items() if own == name])
        for name in dict.fromkeys(profiles.values())
    ]


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


def _rows(
    sides: dict[str, dict[int, float]],
    comparison: Comparison,
    ours: list[str],
    theirs: list[str],
    confidence: float,
) -> list[dict[str, Any]]:
    """Our best arm beside each of theirs, their best one first; nothing where a side has nothing, or one block."""
    sign = 1 if comparison.larger_is_better else -1
    means = {arm: float(np.exp(np.mean(np.log([*own.values()])))) for arm, own in sides.items()}

    def ranked(arms: list[str]) -> list[str]:
        return sorted((a for a in arms if a in means), key=lambda a: sign * means[a], reverse=True)

    found: list[dict[str, Any]] = []
    for best in ranked(ours)[:1]:
        for peer in ranked(theirs):
            log_ratios = stats.paired_log_ratios(sides[best], sides[peer])
            try:
                interval = stats.t_interval(sign * log_ratios, confidence)
            except stats.InsufficientData:
                continue
            found.append(
                {
                    "ours": digits(means[best]),
                    "peer": digits(means[peer]),
                    "ratio": digits(interval.ratio),
                    "ci95": [digits(interval.low), digits(interval.high)],
                    "n_blocks": interval.n,
                    "our_arm": best,
                    "peer_arm": peer,
                    "best": not found,
                }
            )
    return found
