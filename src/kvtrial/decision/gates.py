"""Which blocks are valid: judged by the registered limits, before anything is compared.

Probes of the machine decide, and a check that each arm had warmed up, which compares an arm with
itself only. How the arms compare with each other has no say, and nothing is trimmed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

_Columns = dict[str, npt.NDArray[Any]]
_LOOKED_AT = ("metric", "candidate", "place", "index", "value", "text")

#: Stages whose blocks are gated, and what their warm-up check looks at.
TIMES = {
    "m1": "m1/attention_ms",
    "m2": "m2/step_ms",
    "aa": "m2/step_ms",
    "control": "m2/step_ms",
    "direct_write": "direct/step_ms",
}


class Drift(NamedTuple):
    """A probe that may move so much across a block. ``better``: of two readings moments apart."""

    gate: str
    word: str
    better: Callable[[Any], float]
    required: bool


DRIFTS = {
    "probe/read_gb_per_s": Drift("bandwidth_drift", "read bandwidth", np.max, True),
    "probe/spin_ms": Drift("spin_drift", "spin time", np.min, True),
    # Not every machine says its clock.
    "probe/frequency_mhz": Drift("frequency_drift", "CPU clock", np.max, False),
}


class Ceiling(NamedTuple):
    """How large a metric may be in a block: ``over`` its arms. ``reason`` takes both numbers."""

    metric: str
    gate: str
    over: Callable[[Any], float]
    reason: str


CEILINGS = (
    # The mean, since the largest over the arms grows with their number; and one arm alone past a
    # wider limit, since the mean over many hides it.
    Ceiling(
        "probe/stolen_fraction",
        "stolen_fraction",
        np.mean,
        "{:.1%} of the arms' time was stolen; at most {:.0%} is allowed",
    ),
    Ceiling(
        "probe/stolen_fraction",
        "stolen_from_an_arm",
        np.max,
        "{:.1%} of one arm's time was stolen; at most {:.0%} is allowed",
    ),
    Ceiling(
        "probe/cpus_short",
        "cpus_short",
        np.max,
        "other processes took {:.2f} CPUs that the arm needed; at most {:g} is allowed",
    ),
    Ceiling(
        "probe/throttled",
        "throttled",
        np.max,
        "the CPU was throttled {:.0f} times; at most {:g} is allowed",
    ),
)


def cell_name(cell: Any) -> str:
    """``4096x1x1``: context, sessions, threads; ``4096x1x1-14q2kv`` where a head shape is named.

    Takes anything with those keys.
    """
    name = f"{cell['context']}x{cell['sessions']}x{cell['threads']}"
    shape = cell.get("shape", "")
    return f"{name}-{shape}" if shape else name


@dataclass(frozen=True)
class Judged:
    """``valid_rows``: rows of valid blocks. ``broken``: cell → reason. ``summary``: for the verdict."""

    valid_rows: pd.DataFrame
    broken: dict[str, str]
    summary: dict[str, Any]

    def void_rate(self, stage: str, cell: str) -> float:
        """Share of the blocks run in a cell that were void; 0 where none was run."""
        count = self.summary.get(stage, {}).get(cell, {"valid": 0, "void": 0})
        return count["void"] / max(1, count["valid"] + count["void"])


def readings(block_rows: Mapping[Any, Any], metric: str) -> list[float]:
    """What a probe of `DRIFTS` read before each arm and after the last.

    Between two arms the machine is probed twice, after the one and before the next, moments apart, and at
    the ends of a block of decodes too: the better of the two is the reading there, so that a probe which
    was itself interrupted does not void a block. ``block_rows``: a frame, or its columns.
    """
    own = np.asarray(block_rows["metric"]) == metric
    values = np.asarray(block_rows["value"])[own]
    moments = (np.asarray(block_rows["place"]) + np.asarray(block_rows["index"]))[own]
    better = DRIFTS[metric].better
    return [better(values[moments == moment]) for moment in np.unique(moments)]


def move(readings: Sequence[float]) -> float:
    """How far a probe moved across a block: from its first reading to its last, or between two arms.

    What an arm had is the mean of the readings before and after it. The largest of all readings over
    the smallest would not do: even without any drift it grows with their number, so a block of many
    arms would be void for having many arms.

    Parameters
    ----------
    readings : sequence of float, one before each arm and one after the last

    Returns
    -------
    float
        The larger over the smaller, less 1.
    """
    arms = np.convolve(readings, [0.5, 0.5], "valid")
    pairs = ((readings[0], readings[-1]), (arms.min(), arms.max()))
    return max(float(max(pair) / min(pair)) for pair in pairs) - 1.0


def void_reason(block_rows: pd.DataFrame, limits: dict[str, Any]) -> str | None:
    """Why a block is void, or None. ``block_rows``: the rows of one trial of one block."""
    # Plain arrays: a run has hundreds of trials, and each is asked a dozen questions.
    columns = {name: block_rows[name].to_numpy() for name in _LOOKED_AT}
    for metric, drift in DRIFTS.items():
        values = columns["value"][columns["metric"] == metric]
        if not len(values) and not drift.required:
            continue
        if not len(values) or not (values > 0).all():
            return f"no usable {drift.word} probe"
        moved = move(readings(columns, metric))
        if not moved <= limits[drift.gate]:
            return f"{drift.word} moved by {moved:.1%}; at most {limits[drift.gate]:.0%} is allowed"
    for ceiling in CEILINGS:
        values = columns["value"][columns["metric"] == ceiling.metric]
        found, limit = float(ceiling.over(values)) if len(values) else 0.0, limits[ceiling.gate]
        if not found <= limit:  # NaN is past it too
            return ceiling.reason.format(found, limit)
    return _unequal_surroundings(columns) or _not_warm(columns, limits["warmup_excess"])


def _unequal_surroundings(columns: _Columns) -> str | None:
    """Thread settings and CPU affinity have to be the same in every arm."""
    found: dict[str, set[str]] = {}
    for metric, text, value in zip(columns["metric"], columns["text"], columns["value"]):
        if metric.startswith("env/"):
            found.setdefault(metric, set()).add(text or str(value))
    for metric, values in found.items():
        if len(values) > 1:
            return f"{metric} differed between arms: {', '.join(sorted(values))}"
    return None


def _not_warm(columns: _Columns, limit: float) -> str | None:
    """An arm whose first counted steps are still slow was not warm: the warm-up is the same for all,
    so it is the block that goes, not the arm that gets a longer one."""
    timed = np.isin(columns["metric"], list(set(TIMES.values())))
    if not timed.any() or columns["index"][timed].max() < 3:  # no quarter to look at
        return None
    for name in np.unique(columns["candidate"][timed]):
        own = timed & (columns["candidate"] == name)
        steps = columns["value"][own][np.argsort(columns["index"][own])]
        quarter = len(steps) // 4
        excess = float(np.median(steps[:quarter]) / np.median(steps[quarter:])) - 1
        if excess > limit:
            return (
                f"{name} was not warm: its first {quarter} counted steps took {excess:.0%} longer "
                f"than the rest; at most {limit:.0%} is allowed"
            )
    return None


def judge(events: pd.DataFrame, protocol: dict[str, Any]) -> Judged:
    """Keep each block's first valid trial, and name the cells where the cap was reached."""
    limits = protocol["gates"]
    rows = events[events["stage"].isin(set(TIMES))]
    valid: list[Any] = []
    broken = {
        cell_name(row): str(row["text"])
        for _, row in rows[(rows["stage"] == "m2") & (rows["metric"] == "cell/skipped")].iterrows()
    }
    summary: dict[str, Any] = {}
    keys = ["stage", "context", "sessions", "threads", "shape", "block"]
    looked_at = rows[list(_LOOKED_AT)].astype(
        dict.fromkeys(("metric", "candidate", "text"), object)
    )
    for (stage, *cell, block), own in rows[rows["block"] >= 0].groupby(keys)["trial"]:
        name = cell_name(dict(zip(keys[1:], cell)))
        count = summary.setdefault(str(stage), {}).setdefault(name, {"valid": 0, "void": 0})
        reason = None
        for trial in sorted(set(own)):
            places = own.index[own == trial]
            reason = void_reason(looked_at.loc[places], limits)
            if reason is None:
                count["valid"] += 1
                valid.append(places)
                break
            count["void"] += 1
        if reason is not None and stage == "m2":
            broken[name] = f"block {block} is void: {reason}"
    kept: Any = np.concatenate(valid) if valid else []
    return Judged(rows.loc[kept].reset_index(drop=True), broken, summary)
