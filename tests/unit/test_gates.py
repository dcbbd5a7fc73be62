"""Which blocks are void: each gate on its edge, and what is run again."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from trial_events import REGISTERED, flat, row, trial, with_rows

from kvtrial.decision import gates
from kvtrial.decision.verdict import INCONCLUSIVE, decide
from kvtrial.run import events

LIMITS = REGISTERED["gates"]


def block(**changed: list[float]) -> list[dict[str, Any]]:
    """Rows of a block of two arms on a quiet machine; a probe's readings before and after each arm."""
    readings = {
        "read_gb_per_s": [10.0] * 4,
        "spin_ms": [50.0] * 4,
        "frequency_mhz": [3000.0] * 4,
        **changed,
    }
    return [
        events.event(f"probe/{name}", candidate=arm, place=place, index=index, value=value)
        for name, values in readings.items()
        for (arm, place, index), value in zip(
            (("K0", 0, 0), ("K0", 0, 1), ("K1", 1, 0), ("K1", 1, 1)), values
        )
    ]


def reason(rows: list[dict[str, Any]]) -> str | None:
    return gates.void_reason(events.to_frame(rows), LIMITS)


def test_a_quiet_block_is_valid() -> None:
    assert reason(block()) is None


@pytest.mark.parametrize(
    ("probe", "level", "limit"),
    [("read_gb_per_s", 10.0, 0.15), ("spin_ms", 50.0, 0.10), ("frequency_mhz", 3000.0, 0.15)],
)
def test_a_probe_may_move_by_its_limit_and_no_more(probe: str, level: float, limit: float) -> None:
    for share, valid in ((limit - 1e-6, True), (limit + 1e-3, False)):
        for steps in ([0, 0, 0, 1], [1, 0, 0, 0]):
            moved = [level * (1 + share * step) for step in steps]
            assert (reason(block(**{probe: moved})) is None) == valid


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0])
def test_a_probe_that_means_nothing_voids(value: float) -> None:
    assert "no usable spin time probe" in str(reason(block(spin_ms=[50.0, 50.0, 50.0, value])))


def test_a_machine_that_does_not_say_its_clock_is_no_reason() -> None:
    assert reason(block(frequency_mhz=[])) is None
    assert "no usable read bandwidth probe" in str(reason(block(read_gb_per_s=[])))


@pytest.mark.parametrize(
    ("probe", "limit", "said"),
    [
        ("stolen_fraction", 0.10, "11.0% of the arms' time was stolen; at most 10% is allowed"),
        ("cpus_short", 0.5, "other processes took 0.51 CPUs that the arm needed; at most 0.5"),
        ("throttled", 0.0, "the CPU was throttled 1 times; at most 0 is allowed"),
    ],
)
def test_what_others_took_from_an_arm_voids_past_its_limit(
    probe: str, limit: float, said: str
) -> None:
    above = {"stolen_fraction": 0.11, "cpus_short": 0.51, "throttled": 1.0}[probe]
    for arm in ("K0", "K1"):
        at = {"candidate": arm, "index": 1}
        assert reason([*block(), events.event(f"probe/{probe}", value=limit, **at)]) is None
        assert said in str(reason([*block(), events.event(f"probe/{probe}", value=above, **at)]))


def test_stolen_time_is_the_blocks_and_no_arm_may_have_lost_much() -> None:
    def stolen(*fractions: float) -> str | None:
        at = {"index": 1}
        return reason(
            [*block()]
            + [
                events.event("probe/stolen_fraction", value=f, candidate=f"K{i}", **at)
                for i, f in enumerate(fractions)
            ]
        )

    assert stolen(0.0, 0.2) is None  # 10% of the block and 20% of an arm, exactly
    assert stolen(0.08, 0.14) == "11.0% of the arms' time was stolen; at most 10% is allowed"
    # Twelve arms, one of which had the machine for three quarters of its time: 2% of the block.
    assert stolen(*[0.0] * 11, 0.25) == "25.0% of one arm's time was stolen; at most 20% is allowed"


@pytest.mark.parametrize("probe", ["stolen_fraction", "cpus_short", "throttled"])
def test_a_reading_that_is_no_number_voids(probe: str) -> None:
    nan = events.event(f"probe/{probe}", value=float("nan"), candidate="K1", index=1)
    assert reason([*block(), nan]) is not None


def test_an_interrupted_probe_between_two_arms_voids_nothing_but_a_slow_machine_does() -> None:
    def moved(after_first: float, before_second: float) -> str | None:
        rates = [10.0, after_first, before_second, 10.0]
        return reason(block(read_gb_per_s=rates, spin_ms=[500.0 / rate for rate in rates]))

    assert moved(5.0, 10.0) is None
    assert moved(10.0, 5.0) is None
    slow = [10.0, 10.0, 5.0, 5.0]
    assert "read bandwidth moved by 100.0%" in str(reason(block(read_gb_per_s=slow)))


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([10.0, 12.0], 0.2),  # one arm: from before it to after it
        ([12.0, 10.0], 0.2),
        ([10.0, 12.0, 10.0, 8.0, 10.0], 11 / 9 - 1),  # arms at 11, 11, 9, 9; the ends agree
        ([10.0, 11.0, 10.0, 11.0, 10.0, 11.0, 10.0], 0.0),  # wandering alike around each arm
        ([10.0, 10.0, 10.0, 13.0], 0.3),  # the ends, where the arms are at 10, 10, 11.5
    ],
)
def test_a_move_is_between_the_ends_or_between_two_arms(
    readings: list[float], expected: float
) -> None:
    assert gates.move(readings) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("metric", ["env/OMP_NUM_THREADS", "env/affinity"])
def test_arms_of_one_block_run_in_the_same_surroundings(metric: str) -> None:
    def rows(second: str) -> list[dict[str, Any]]:
        texts = (("K0", "1"), ("K1", second))
        return [*block(), *(events.event(metric, candidate=n, text=t) for n, t in texts)]

    assert reason(rows("1")) is None
    assert reason(rows("2")) == f"{metric} differed between arms: 1, 2"


def steps(times: list[float], name: str = "K1", metric: str = "m2/step_ms") -> list[dict[str, Any]]:
    return [events.event(metric, candidate=name, index=i, value=t) for i, t in enumerate(times)]


@pytest.mark.parametrize("metric", ["m2/step_ms", "m1/attention_ms"])
def test_an_arm_that_was_not_warm_fails_the_block(metric: str) -> None:
    cold = [1.6] * 4 + [1.0] * 12
    said = str(reason([*block(), *steps([1.0] * 16, "K0", metric), *steps(cold, "K1", metric)]))
    assert "K1 was not warm: its first 4 counted steps took 60% longer" in said
    # One slow step is noise, and a whole slow arm is its own speed.
    assert reason([*block(), *steps([9.0] + [1.0] * 15, metric=metric)]) is None
    assert reason([*block(), *steps([9.0] * 16, metric=metric)]) is None
    # Slower later on is no lack of warm-up.
    assert reason([*block(), *steps(cold[::-1], metric=metric)]) is None


def test_the_first_valid_trial_counts_and_the_cap_breaks_the_cell() -> None:
    void = {"read_gb_per_s": [10.0, 10.0, 10.0, 12.0]}
    at = {"context": 512, "block": 0}

    def trials(*valid: bool) -> gates.Judged:
        rows = [
            row("m2", r.pop("metric"), **{**r, **at, "trial": trial})
            for trial, fine in enumerate(valid)
            for r in block(**({} if fine else void))
            for r in [{k: r[k] for k in ("metric", "candidate", "place", "index", "value")}]
        ]
        return gates.judge(events.to_frame(rows), REGISTERED)

    judged = trials(False, True)
    assert judged.summary["m2"]["512x1x1"] == {"valid": 1, "void": 1}
    assert judged.void_rate("m2", "512x1x1") == 0.5
    assert set(judged.valid_rows["trial"]) == {1}
    assert judged.broken == {}
    judged = trials(*[False] * REGISTERED["gates"]["max_trials"])
    assert "block 0 is void: read bandwidth moved by 20.0%" in judged.broken["512x1x1"]
    assert judged.valid_rows.empty


def test_a_cell_that_the_machine_cannot_hold_is_said() -> None:
    arms = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K3=11.0)
    arms = {n: {c: b for c, b in cs.items() if c != 16384} for n, cs in arms.items()}
    why = "1 sessions of 16384 positions need 9.0 GiB of memory, 2.0 GiB are available"
    table: pd.DataFrame = with_rows(
        trial(arms), [row("m2", "cell/skipped", context=16384, text=why)]
    )
    verdict = decide(table, REGISTERED)
    assert verdict.outcome == INCONCLUSIVE
    assert why in verdict.data["hot"]["reason"]
    assert verdict.data["skipped"] == [{"stage": "m2", "cell": "16384x1x1", "reason": why}]
