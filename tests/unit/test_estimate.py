"""The estimate: counting what the protocol asks for, at a speed that is known."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from trial_events import REGISTERED

from kvtrial.stages import estimate, m1, workload
from kvtrial.stages.estimate import STAGE_S, Curve, Speed

SHAPE = {"layers": 30, "q_heads": 9, "kv_heads": 3, "head_dim": 64}
ONCE = {"start_s": 1.5, "load_s": 0.5, "probe_s": 0.25, "prompts_s": 2.5, "position_s": 0.002}


def speed(names: tuple[str, ...] = ("K0", "K1", "C0")) -> Speed:
    """Arms that take 10 ms a step, 1 ms more for each 1,000 positions, and a second beside; a chunk
    of a prefill takes a second, and two more behind 4,096 positions."""
    rows: list[dict[str, Any]] = [
        {"metric": f"calibrate/{key}", "value": value} for key, value in ONCE.items()
    ]
    for filled, seconds in ((0, 1.0), (4096, 3.0)):
        rows.append({"metric": "calibrate/prefill_s", "index": filled, "value": seconds})
    for name in names:
        for context in (512, 4096):
            at = {"candidate": name, "index": context}
            seconds = {
                "arm_s": 1.0,
                "step_s": 0.010 + 1e-6 * context,
                "attention_s": 1e-6 * context,
            }
            rows += [{**at, "metric": f"calibrate/{k}", "value": v} for k, v in seconds.items()]
    rows.append({"candidate": "K3", "metric": "failed", "text": "no"})
    return Speed(rows)


@pytest.mark.parametrize(
    ("positions", "seconds"),
    [(512, 2.0), (2304, 5.5), (4096, 9.0), (16384, 57.0), (32768, 121.0), (0, 1.0)],
)
def test_a_curve_is_straight_between_its_points_and_beyond(positions: int, seconds: float) -> None:
    assert Curve({4096: 9.0, 512: 2.0, 16384: 57.0})(positions) == pytest.approx(seconds)


def test_one_point_is_level_and_nothing_takes_less_than_no_time() -> None:
    assert Curve({64: 2.0})(4096) == 2.0
    assert Curve({512: 1.0, 4096: 30.0})(0) == 0.0


@pytest.mark.parametrize(
    ("sessions", "threads", "step"),
    [
        (1, 1, 0.010 + 0.004096),
        (1, 2, (0.010 + 0.004096) / 2),
        (4, 1, 0.010 * 1.9 + 4 * 0.004096),  # weights are read once, caches four times
    ],
)
def test_a_step_is_all_sessions(sessions: int, threads: int, step: float) -> None:
    cell = {"context": 4096, "sessions": sessions, "threads": threads}
    assert speed().step_s("K1", cell) == pytest.approx(step)


def oracle_s(arms: int, context: int) -> float:
    """One checked call an arm: 5 microseconds a position of each of 9 query heads."""
    return arms * 5e-6 * context * 9


def test_the_stages_are_their_blocks() -> None:
    protocol = copy.deepcopy(REGISTERED)
    protocol["candidates"] = ["K0", "K1", "K3"]  # K3 did not run
    cells = [c for c in protocol["cells"] if c["profile"] == "default"]
    per_block = estimate.block_seconds(
        speed(), protocol, "default", cells, m1.shapes(protocol, SHAPE)
    )
    start = 1.5 + 0.5 + 0.25  # the process, the model, one reading of the probes
    # Two arms, both fast: 4 rounds of warm-up, and 64 or 24, which are whole cycles of two.
    for context, rounds in ((512, 64), (4096, 64), (16384, 24)):
        steps = 2 * (4 + rounds) * (0.010 + 1e-6 * context)
        block = start + 2 + steps + oracle_s(2, context)
        assert per_block["m2"][f"{context}x1x1"] == pytest.approx(block)
    # Three arms: a cycle has six rounds.
    three = start + 3 + 3 * (4 + 66) * 0.014096 + oracle_s(3, 4096)
    assert per_block["aa"] == {"4096x1x1": pytest.approx(three)}
    # Both ways of K0 and K1 are four arms, with 32 rounds of their own.
    four = start + 4 + 4 * (4 + 32) * 0.010512 + oracle_s(4, 512)
    assert per_block["direct_write"] == {"512x1x1": pytest.approx(four)}
    assert set(per_block["m1"]) == {
        f"{c}x1x1-{shape}" for c in (512, 4096, 16384) for shape in ("9q3kv", "14q2kv")
    }
    found = estimate.stage_seconds(
        speed(), protocol, "default", cells, per_block, trained=8192, jobs=2
    )
    m2 = sum(8 * per_block["m2"][f"{c}x1x1"] for c in (4096, 512, 16384))
    assert found["m2"] == pytest.approx(STAGE_S + m2)
    assert found["aa"] == pytest.approx(STAGE_S + 8 * three)
    assert found["direct_write"] == pytest.approx(STAGE_S + 8 * four)
    # K0 is compared over one chunk of 16 positions, K1 fed with four as the others would be.
    chunks = sum(2 + (16 + 64 / 2) * 1e-6 * c + 80 * 0.002 for c in (512, 4096, 16384))
    assert found["parity"] == pytest.approx(STAGE_S + 4 * 2.0 + 2 * 2.5 + chunks)
    # Four go through the suite: the control too, and K3 might run there.
    assert found["conformance"] == pytest.approx(STAGE_S + estimate.CONFORMANCE_S * 3 * 4 / 2)


def test_a_slow_arm_takes_part_in_every_eighth_round() -> None:
    protocol = copy.deepcopy(REGISTERED)
    rows = [{"metric": f"calibrate/{key}", "value": value} for key, value in ONCE.items()]
    for name, step in (("K0", 0.100), ("K1", 0.010)):
        at = {"candidate": name, "index": 4096}
        for metric, value in (("arm_s", 1.0), ("step_s", step), ("attention_s", 0.0)):
            rows.append({**at, "metric": f"calibrate/{metric}", "value": value})
    cell = {"context": 4096, "sessions": 1, "threads": 1}
    found = estimate._rotation_block_s(Speed(rows), protocol, cell, ["K0", "K1"], 9)
    # K1 alone is fast: 4 + 64 steps; K0 makes 64 / 8.
    steps = 68 * 0.010 + 8 * 0.100
    assert found == pytest.approx(2.25 + 2 + steps + oracle_s(2, 4096))


def test_a_narrow_format_has_more_regions_to_fill_and_to_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimate.machine, "last_level_cache_bytes", lambda threads: 32 << 20)
    protocol = copy.deepcopy(REGISTERED)
    protocol["candidates"] = ["K1", "K2"]
    cells = [c for c in protocol["cells"] if c["context"] == 4096 and c["profile"] == "default"]
    found = estimate.block_seconds(
        speed(("K1", "K2", "C0")), protocol, "full", cells, m1.shapes(protocol, SHAPE)
    )
    # 128 MiB are 21.3 regions of 6 MiB, and 42.7 of half of that; a layer takes 137 us, so that eight
    # calls make a millisecond.
    layer, calls = 0.004096 / 30, 20 * 8
    # K2's second session is a copy of the first.
    fills, timed = 22 / 30 + 1, (calls + 22 + calls + 43) * layer
    in_cache, oracle = 2 * (3 * layer + 10 * 0.001), 2 * 3 * 5e-6 * 4096 * 9
    assert found["m1"]["4096x1x1-9q3kv"] == pytest.approx(
        1.5 + fills + timed + in_cache + oracle + 2 * 0.25
    )


def test_only_what_the_run_profile_times_costs_blocks() -> None:
    cell = {"context": 512, "sessions": 1, "threads": 1, "role": "veto"}
    two, four = (
        estimate.block_seconds(
            speed(("K1", "K2", "K5T", "K7")),
            REGISTERED,
            profile,
            [cell],
            m1.shapes(REGISTERED, SHAPE),
        )["m2"]["512x1x1"]
        for profile in ("default", "full")
    )
    # Cycles of two and of four; K2 and K7 are timed in profile full.
    step = 0.010512
    assert two == pytest.approx(1.5 + 0.5 + 0.25 + 2 + 2 * 68 * step + oracle_s(2, 512))
    assert four == pytest.approx(1.5 + 0.5 + 0.25 + 4 + 4 * 68 * step + oracle_s(4, 512))


def test_both_head_shapes_are_measured_with_all_threads_too() -> None:
    cell = {"context": 512, "sessions": 1, "threads": 2, "role": "extra"}
    found = estimate.block_seconds(
        speed(), REGISTERED, "full", [cell], m1.shapes(REGISTERED, SHAPE)
    )
    assert set(found["m1"]) == {"512x1x2-9q3kv", "512x1x2-14q2kv"}


@pytest.mark.parametrize(
    ("missing", "seconds"),
    # 32 chunks of 512; each has 0.25 s more to look back on than the one before.
    [([0], 32 + 0.25 * 31 * 32 / 2), ([], 0.0), ([1], 8 + 0.25 * 7 * 8 / 2)],
)
def test_contexts_that_are_filled_already_cost_nothing(missing: list[int], seconds: float) -> None:
    plan = workload.Plan(SHAPE, {}, {512: 2, 4096: 2, 16384: 1}, [[], []], {}, "id", Path("base"))
    assert estimate.workload_seconds(speed(), plan, missing) == pytest.approx(seconds)
