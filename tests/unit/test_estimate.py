"""The estimate: counting what the protocol asks for, at a speed that is known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from trial_events import REGISTERED

from kvtrial.stages import estimate, m1
from kvtrial.stages.estimate import Line, Speed

SHAPE = {"layers": 30, "q_heads": 9, "kv_heads": 3, "head_dim": 64}


def speed(**more: float) -> Speed:
    """Two arms that take 10 ms a step, 1 ms more for each 1,000 positions, and fill in no time."""
    rows: list[dict[str, Any]] = [
        {"metric": "calibrate/load_s", "value": 0.5},
        {"metric": "calibrate/prefill_s", "index": 512, "value": 1.0},
    ]
    for name in ("K0", "K1"):
        for context in (512, 4096):
            at = {"candidate": name, "index": context}
            seconds = {
                "fill_s": 0.0,
                "step_s": 0.010 + 1e-6 * context,
                "attention_s": 1e-6 * context,
                "exact_step_s": 0.020 + 1e-6 * context,
            }
            if name != "K0":
                del seconds["exact_step_s"]
            rows += [{**at, "metric": f"calibrate/{k}", "value": v} for k, v in seconds.items()]
    return Speed(rows, wall_s=sum(r["value"] for r in rows) + 2.0)


def test_a_line_goes_through_both_points_and_beyond() -> None:
    line = Line.through({512: 2.0, 4096: 9.0})
    assert [line(n) for n in (512, 4096, 16384)] == pytest.approx([2.0, 9.0, 33.0])
    # One context, and a long one that was faster by noise: level.
    assert Line.through({64: 2.0})(4096) == 2.0
    assert Line.through({512: 2.0, 4096: 1.0})(16384) == 2.0


def test_a_process_takes_what_was_left_of_the_calibrations_time() -> None:
    assert speed().start_s == pytest.approx(2.0 + 0.5)


@pytest.mark.parametrize(
    ("sessions", "threads", "step"),
    [
        (1, 1, 0.010 + 0.004096),
        (1, 2, (0.010 + 0.004096) / 2),
        (4, 1, 0.010 * 1.9 + 4 * 0.004096),  # weights are read once, caches four times
    ],
)
def test_a_decode_is_its_steps(sessions: int, threads: int, step: float) -> None:
    cell = {"context": 4096, "sessions": sessions, "threads": threads}
    assert speed().decode_s("K1", cell, 68) == pytest.approx(68 * step)


def test_the_stages_are_their_blocks_and_the_void_ones() -> None:
    protocol = copy.deepcopy(REGISTERED)
    cells = [{**c} for c in protocol["cells"] if c["profile"] == "default"]
    per_block = estimate.block_seconds(speed(), protocol, cells, m1.shapes(protocol, SHAPE))
    start, probes = 2.5, 0.2
    for context in (512, 4096, 16384):
        block = start + 2 * (68 * (0.010 + 1e-6 * context) + probes)
        assert per_block["m2"][f"{context}x1x1"] == pytest.approx(block)
    both = start + 2 * (68 * 0.014096 + probes)
    assert per_block["aa"] == {"4096x1x1": pytest.approx(both)}
    assert per_block["direct_write"] == {
        "512x1x1": pytest.approx(start + 2 * (2 * 68 * 0.010512 + probes))
    }
    assert set(per_block["m1"]) == {
        f"{c}x1x1-{shape}" for c in (512, 4096, 16384) for shape in ("9q3kv", "14q2kv")
    }
    found = estimate.stage_seconds(
        speed(), protocol, cells, per_block, {512: 1, 4096: 1, 16384: 1}, prompts=24, jobs=2
    )
    m2 = sum(n * per_block["m2"][f"{c}x1x1"] for c, n in ((4096, 12), (512, 6), (16384, 6)))
    assert found["m2"] == pytest.approx(m2 / 0.9)
    assert found["aa"] == pytest.approx(12 * both / 0.9)
    assert found["fp16_parity"] == pytest.approx(24 * 64 * 2 * 0.020)
    assert found["conformance"] == pytest.approx(estimate.CONFORMANCE_S * 3 * 2 / 2)
    # 512 positions in 1 s; work grows as n (1 + n / 8192).
    assert found["workload"] == pytest.approx(16384 * 3 / (512 * 1.0625))
