"""Which cold store is adopted: rule 6, on restore times and crash rounds made by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from decided import BASE
from trial_events import (
    REGISTERED,
    flat,
    row,
    trial,
    with_rows,
)

from kvtrial.decision.verdict import (
    decide,
)

# --------------------------------------------------------------------------------------------------
# Rule 6: which cold store


def cold_rows(
    z1: list[float], z2: list[float], recovered: float = 1.0, fsyncs: tuple[float, ...] = (1.0, 1.0)
) -> list[Any]:
    """Restore times by block, one crash round of each store, and its fsyncs a batch."""
    at = {"context": REGISTERED["cold"]["prefix_tokens"]}
    rows = [
        row("cold_tier", "cold/restore_cold_ms", candidate=name, block=block, value=ms, **at)
        for name, times in (("Z1", z1), ("Z2", z2))
        for block, ms in enumerate(times)
    ]
    for name, value in (("Z1", 1.0), ("Z2", recovered)):
        rows.append(
            row("cold_tier", "cold/crash_recovered", candidate=name, value=value, text="killed")
        )
    for name, value in zip(("Z1", "Z2"), fsyncs):
        rows.append(row("cold_tier", "cold/fsyncs_per_batch", candidate=name, value=value))
    return [*rows, row("cold_tier", "attempt/complete", value=1.0)]


def cold(rows: list[Any]) -> Any:
    return decide(with_rows(trial(flat(**BASE)), rows), REGISTERED).data["cold"]


@pytest.mark.parametrize(
    ("z1", "z2", "adopted", "tie"),
    [
        ([200.0] * 6, [100.0] * 6, "Z2", False),
        ([100.0] * 6, [200.0] * 6, "Z1", False),
        ([100.0] * 6, [100.0] * 6, "Z2", True),
        ([101.0, 120.0] * 3, [100.0] * 6, "Z2", True),
    ],
)
def test_the_cold_store_that_restores_faster_is_adopted(
    z1: list[float], z2: list[float], adopted: str, tie: bool
) -> None:
    found = cold(cold_rows(z1, z2))
    assert (found["adopted"], found["index"]) == (adopted, "RocksDB")
    assert ("close to a tie" in found["reason"]) == tie
    ratio = math.exp(np.mean(np.log(z1)) - np.mean(np.log(z2)))
    assert found["z1_over_z2"]["ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recovered": 0.0}, "Z2 broke a promise after: killed"),
        ({"recovered": math.nan}, "Z2 broke a promise after: killed"),
        ({"fsyncs": (1.0, 2.0)}, "fsyncs per batch differ"),
        ({"fsyncs": ()}, "fsyncs per batch were not counted"),
        ({"fsyncs": (1.0,)}, "fsyncs per batch were not counted"),
    ],
)
def test_no_cold_store_is_adopted_unless_durability_is_shown_to_be_equal(
    changed: dict[str, Any], said: str
) -> None:
    found = cold(cold_rows([200.0] * 6, [100.0] * 6, **changed))
    assert found["adopted"] is None
    assert said in found["reason"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "stage cold_tier has no complete attempt"),
        (cold_rows([200.0] * 6, [100.0] * 6)[:-1], "stage cold_tier has no complete attempt"),
        (cold_rows([200.0] * 5, [100.0] * 5), "5 blocks; 6 are registered"),
        (cold_rows([200.0] * 6, [100.0] * 5), "blocks [5] have one arm only"),
        (cold_rows([200.0] * 5 + [0.0], [100.0] * 6), "block 5 has 0.0"),
        (
            [r for r in cold_rows([2.0] * 6, [1.0] * 6) if r["metric"] != "cold/crash_recovered"],
            "Z1: no crash evidence",
        ),
    ],
)
def test_what_was_not_measured_as_registered_decides_no_cold_store(
    rows: list[Any], said: str
) -> None:
    found = cold(rows)
    assert found["adopted"] is None
    assert said in found["reason"]
