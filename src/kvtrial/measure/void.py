"""When a block is void: only for what pairing within a round can't cancel.

A neighbour, a slow clock or little bandwidth meets all arms of a round alike and voids nothing. What hits
one step alone does: a process that died (it leaves no rows at all), a step that stood still, throttling, a
page that came from disk, surroundings that were not the same for all arms. How the arms compare has no say.

The stage asks to know whether a block has to be run again, the decision asks to know which rows count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from kvtrial.registration import Void


class Ceiling(NamedTuple):
    """How large a metric may be in any arm of a block; ``text`` takes the arm, the value and the limit."""

    metric: str
    limit: Literal["stood_still_s", "disk_faults", "throttled"]
    text: str


CEILINGS = (
    Ceiling(
        "rotation/stood_still_s",
        "stood_still_s",
        "a step of {} stood still for {:.2f} s (stopped, frozen or paused); at most {:g} s is allowed",
    ),
    Ceiling(
        "rotation/disk_faults",
        "disk_faults",
        "{} waited for {:.0f} pages from disk in timed steps; at most {:g} are allowed",
    ),
    Ceiling(
        "probe/throttled",
        "throttled",
        "CPU or control group ({}) were throttled {:.0f} times; at most {:g} are allowed",
    ),
)


def void_reason(rows: pd.DataFrame, limits: Void) -> str | None:
    """Why a run of a block is void, or None.

    Parameters
    ----------
    rows : DataFrame
        Its rows: columns metric, candidate, value, text.
    limits : Void
        The protocol's ``void``.
    """
    metric, value = rows["metric"].to_numpy(object), rows["value"].to_numpy(np.float64)
    for ceiling in CEILINGS:
        own = metric == ceiling.metric
        past = own & ~(value <= limits[ceiling.limit])  # NaN is past it too
        if past.any():
            worst = int(np.flatnonzero(past)[0])
            arm = rows["candidate"].iloc[worst]
            return ceiling.text.format(arm, value[worst], limits[ceiling.limit])
    return _unequal(rows)


def _unequal(rows: pd.DataFrame) -> str | None:
    """Thread settings and CPU affinity have to be the same in every process of a block."""
    own = rows[[str(metric).startswith("env/") for metric in rows["metric"]]]
    if own.empty:
        return None
    said: Callable[[Any], str] = lambda row: row["text"] or str(row["value"])  # noqa: E731
    for name, settings in own.assign(said=own.apply(said, axis=1)).groupby("metric")["said"]:
        if len(different := sorted(set(settings))) > 1:
            return f"{name} differed within the block: {', '.join(different)}"
    return None
