"""Which blocks are void: each ceiling on both sides, what voids nothing, and what is run again."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
from trial_events import (
    BLOCKS,
    REGISTERED,
    arm_rows,
    at_contexts,
    block_rows,
    flat,
    row,
    trial,
    with_rows,
    without,
)

from kvtrial.decision import validity
from kvtrial.decision.verdict import ADOPT, INCONCLUSIVE, KEEP, decide
from kvtrial.measure.void import CEILINGS, void_reason
from kvtrial.run import events

LIMITS = REGISTERED["void"]
BASE = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 24.0}


def reason(*rows: dict[str, Any]) -> str | None:
    quiet = [row for name in ("K0", "K1") for row in arm_rows(name, {0: 20.0}, block=0)]
    return void_reason(events.to_frame([*quiet, *rows]), LIMITS)


def said(metric: str, value: float = math.nan, arm: str = "K1", text: str = "") -> dict[str, Any]:
    return events.event(metric, candidate=arm, value=value, text=text)


def test_a_quiet_block_is_valid() -> None:
    assert reason() is None
    assert void_reason(events.to_frame([]), LIMITS) is None


@pytest.mark.parametrize(
    ("metric", "limit", "past", "text"),
    [
        ("rotation/stood_still_s", 0.5, 0.51, "a step of K1 stood still for 0.51 s"),
        ("rotation/stood_still_s", 0.5, 20.0, "a step of K1 stood still for 20.00 s"),
        ("rotation/disk_faults", 0.0, 1.0, "K1 waited for 1 pages from disk in timed steps"),
        ("probe/throttled", 0.0, 1.0, r"CPU or control group (K1) were throttled 1 times"),
    ],
)
def test_each_ceiling_on_both_sides(metric: str, limit: float, past: float, text: str) -> None:
    assert metric in {ceiling.metric for ceiling in CEILINGS}
    assert reason(said(metric, limit)) is None
    found = reason(said(metric, past))
    assert found is not None and found.startswith(text)
    assert "at most" in found
    # In any arm, and whatever else the block has of it.
    assert reason(said(metric, limit), said(metric, past, "K0"), said(metric, limit)) is not None


@pytest.mark.parametrize("metric", [ceiling.metric for ceiling in CEILINGS])
def test_a_reading_that_is_no_number_voids(metric: str) -> None:
    assert "nan" in str(reason(said(metric)))
    assert reason(said(metric, math.inf)) is not None


def test_a_system_that_keeps_no_accounts_voids_nothing_for_it() -> None:
    rows = arm_rows("K1", {0: 20.0}, block=0)
    kept = [own for own in rows if own["metric"] != "rotation/stood_still_s"]
    assert void_reason(events.to_frame(kept), LIMITS) is None


@pytest.mark.parametrize("metric", ["env/OMP_NUM_THREADS", "env/affinity"])
def test_arms_of_one_block_run_in_the_same_surroundings(metric: str) -> None:
    def found(second: str) -> str | None:
        return reason(said(metric, text="1"), said(metric, arm="K0", text=second))

    assert found("1") is None
    assert found("2") == f"{metric} differed within the block: 1, 2"
    numbers = [said("env/threads", value, arm) for arm, value in (("K0", 1.0), ("K1", 2.0))]
    assert reason(*numbers) == "env/threads differed within the block: 1.0, 2.0"


@pytest.mark.parametrize(
    "row",
    [
        said("probe/read_gb_per_s", 0.1),
        said("probe/read_gb_per_s"),
        said("probe/spin_ms", 5000.0),
        said("probe/stolen_fraction", 0.9),
        said("probe/cpus_short", 2.0),
        said("probe/frequency_mhz", 100.0),
        said("block/taken_s", 3600.0),
        said("m2/step_ms", 1e6),
    ],
)
def test_what_all_arms_share_voids_nothing(row: dict[str, Any]) -> None:
    """A neighbour, little bandwidth, a slow clock: pairing within a round cancels them."""
    assert reason(row) is None


# --------------------------------------------------------------------------------------------------
# Which runs of a block count


def runs(*still_s: float, stage: str = "m2", **at: Any) -> validity.Judged:
    """Runs of one block, whose step stood still for so long."""
    rows = []
    for number, seconds in enumerate(still_s):
        own = arm_rows("K1", {0: 20.0 + number}, stage=stage, block=0, trial=number, **at)
        for found in own:
            if found["metric"] == "rotation/stood_still_s":
                found["value"] = seconds
        rows += own
    return validity.judge(events.to_frame(rows), REGISTERED)


def test_the_first_run_that_is_not_void_counts() -> None:
    judged = runs(20.0, 0.1, 0.0, context=512)
    assert judged.summary["m2"]["512x1x1"] == {"valid": 1, "void": 1}
    assert judged.void_rate("m2", "512x1x1") == 0.5
    assert set(judged.valid_rows["trial"]) == {1}
    # A later one never replaces it.
    assert set(runs(0.0, 0.0, context=512).valid_rows["trial"]) == {0}


def test_a_block_whose_every_run_is_void_is_not_there() -> None:
    judged = runs(20.0, 20.0, context=512)
    assert judged.valid_rows.empty
    assert judged.summary["m2"]["512x1x1"] == {"valid": 0, "void": 2}
    assert judged.void_rate("m2", "512x1x1") == 1.0
    assert judged.void_rate("m2", "4096x1x1") == judged.void_rate("m1", "512x1x1") == 0.0


@pytest.mark.parametrize("stage", validity.STAGES)
def test_every_measuring_stage_is_judged_alike(stage: str) -> None:
    judged = runs(20.0, 0.0, stage=stage, context=512, shape="9q3kv")
    assert judged.summary[stage]["512x1x1-9q3kv"] == {"valid": 1, "void": 1}
    assert judged.broken == {}


def test_no_measurement_is_no_valid_row() -> None:
    judged = validity.judge(events.to_frame([row("m2", "x", context=512)]), REGISTERED)
    assert judged.valid_rows.empty and judged.summary == {} and judged.broken == {}


def test_cells_that_were_given_up_are_m2s_own() -> None:
    rows = [
        row("m2", "cell/lost", context=512, text="9 void"),
        row("m2", "cell/skipped", context=16384, text="too large"),
        row("aa", "cell/skipped", context=4096, text="too large"),
    ]
    broken = validity.judge(events.to_frame(rows), REGISTERED).broken
    assert broken == {"512x1x1": "9 void", "16384x1x1": "too large"}


# --------------------------------------------------------------------------------------------------
# F1: a stop of 20 s inside one step


#: K3 is 20% faster at 4,096 and truly 8% slower at 16,384.
ARMS = flat(**BASE, K3=at_contexts(20.0, 20.0, 26.0))
ROUNDS = range(64)


def stopped(arm: str, seconds: float, accounted: float | None, number: int = 0) -> list[Any]:
    """A run of block 3 at 16,384 in which one step of an arm took so much longer."""
    rows = []
    for name, contexts in ARMS.items():
        steps = dict.fromkeys(ROUNDS, contexts[16384][0])
        if name == arm:
            steps[40] += seconds * 1000
        own = arm_rows(name, steps, block=3, context=16384, trial=number)
        for found in own:
            if (
                name == arm
                and found["metric"] == "rotation/stood_still_s"
                and accounted is not None
            ):
                found["value"] = accounted
        rows += own
    return rows


def judged(*blocks: list[Any]) -> Any:
    table: pd.DataFrame = without(
        trial(ARMS, missing={"K0": "pool"}), stage="m2", context=16384, block=3
    )
    return decide(with_rows(table, [found for rows in blocks for found in rows]), REGISTERED)


def test_a_stop_in_one_step_is_void_and_enters_no_average() -> None:
    assert judged(stopped("K1", 0.0, None)).outcome == KEEP  # vetoed at 16,384
    # What would happen if nobody saw it: K1's block is 14 times as slow, and the veto is passed.
    assert judged(stopped("K1", 20.0, 0.0)).outcome == ADOPT
    # Seen, it voids the block; without another run of it there are seven.
    verdict = judged(stopped("K1", 20.0, 20.0))
    assert verdict.outcome == INCONCLUSIVE
    why = f"context 16384 can't be decided: {BLOCKS - 1} valid blocks; {BLOCKS} are registered"
    assert verdict.data["language"]["reason"] == why
    # With another run the answer is the true one, and the void run is counted.
    again = judged(stopped("K1", 20.0, 20.0), stopped("K1", 0.0, None, number=1))
    assert again.outcome == KEEP
    assert "at 16384 it is 0.923x K1" in again.data["language"]["reason"]
    assert again.data["validity"]["m2"]["16384x1x1"] == {"valid": BLOCKS, "void": 1}


def test_a_stop_in_the_challengers_step_does_not_veto_it() -> None:
    arms = flat(**BASE, K3=20.0)
    table = without(trial(arms, missing={"K0": "pool"}), stage="m2", context=16384, block=3)

    def block(still_s: float, number: int) -> list[Any]:
        rows = block_rows("m2", "m2/step_ms", {n: [c[512][0]] for n, c in arms.items()})
        for found in rows:
            found |= {"block": 3, "context": 16384, "trial": number}
            if found["candidate"] == "K3" and still_s:
                if found["metric"] == "m2/step_ms":
                    found["value"] += still_s * 1000
                if found["metric"] == "rotation/stood_still_s":
                    found["value"] = still_s
        return rows

    assert decide(with_rows(table, block(0.4, 0)), REGISTERED).outcome == KEEP  # under the ceiling
    both = [*block(20.0, 0), *block(0.0, 1)]
    assert decide(with_rows(table, both), REGISTERED).outcome == ADOPT


def test_a_busy_neighbour_voids_nothing_and_changes_nothing() -> None:
    """In one block every arm takes twice as long, and the machine's probes show why."""
    busy = {
        name: {
            context: [ms * (2 if block == 5 else 1) for block, ms in enumerate(own)]
            for context, own in contexts.items()
        }
        for name, contexts in flat(**BASE, K3=20.0).items()
    }
    probes = [
        row("m2", f"probe/{what}", block=5, context=context, index=index, value=value)
        for context in (512, 4096, 16384)
        for what, values in (("read_gb_per_s", (10.0, 4.0)), ("stolen_fraction", (0.0, 0.5)))
        for index, value in enumerate(values)
    ]
    quiet = decide(trial(flat(**BASE, K3=20.0)), REGISTERED)
    loud = decide(with_rows(trial(busy), probes), REGISTERED)
    assert loud.outcome == quiet.outcome == ADOPT
    assert loud.data["validity"] == quiet.data["validity"]
    assert loud.data["contrasts"] == quiet.data["contrasts"]
