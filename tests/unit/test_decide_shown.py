"""What a verdict shows of arms, contrasts and hypotheses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from decided import BASE, run, t
from scipy import stats as scipy_stats
from trial_events import (
    BLOCKS,
    at_contexts,
    flat,
)

from kvtrial.decision.verdict import (
    ADOPT,
    Verdict,
)

# --------------------------------------------------------------------------------------------------
# What is shown of arms and contrasts


def test_hypotheses_are_ratios_of_the_registered_arms() -> None:
    found = {h["id"]: h for h in run(flat(**BASE)).data["hypotheses"] if h["context"] == 4096}
    assert found["H1"]["ratio"] == pytest.approx(100 / 80, rel=1e-9)
    assert found["H4"]["ratio"] == pytest.approx(22 / 15, rel=1e-9)


def test_arms_carry_their_latencies_with_intervals_over_blocks() -> None:
    logs = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3, 0.2, 0.2]
    steps = {4096: [math.exp(x) for x in logs], 512: [1.0] * 8, 16384: [1.0]}
    arms = {(a["candidate"], a["context"]): a for a in run(flat(K1=steps, K3=steps)).data["arms"]}
    half = t(7) * np.std(logs, ddof=1) / math.sqrt(8)
    for quantile in ("p50", "p95"):  # one step a block
        assert arms["K1", 4096][f"step_ms_{quantile}"] == pytest.approx(math.exp(0.2), rel=1e-9)
        assert arms["K1", 4096][f"step_ms_{quantile}_ci95"] == pytest.approx(
            [math.exp(0.2 - half), math.exp(0.2 + half)], rel=1e-9
        )
        assert arms["K1", 512][f"step_ms_{quantile}_ci95"] == [1.0, 1.0]
        assert arms["K1", 16384][f"step_ms_{quantile}_ci95"] is None  # one block
    assert arms["K1", 512]["attention_share"] == pytest.approx(0.5)
    assert arms["K1", 512]["row_bytes"] == 46080.0


def test_tokens_per_second_are_total_over_total_and_an_extended_cell_has_its_wider_interval() -> (
    None
):
    # 24 blocks, eight of which asked for the others; all the spread is in the first.
    steps = {4096: [10.0, 20.0] * 4 + [15.0] * 16, 512: [1.0] * 8, 16384: [1.0] * 8}
    arms = {(a["candidate"], a["context"]): a for a in run(flat(K1=steps)).data["arms"]}
    assert arms["K1", 4096]["tokens_per_s"] == pytest.approx(24 / (24 * 0.015), rel=1e-9)
    logs = -np.log(np.array(steps[4096]) / 1e3)
    half = t(7) * logs[:8].std(ddof=1) / math.sqrt(24)
    assert half > t(23) * logs.std(ddof=1) / math.sqrt(24)
    assert arms["K1", 4096]["tokens_per_s_ci95"] == pytest.approx(
        [math.exp(logs.mean() - half), math.exp(logs.mean() + half)], rel=1e-9
    )


def contrast_of(verdict: Verdict, challenger: str, incumbent: str, context: int = 4096) -> Any:
    (found,) = [
        c
        for c in verdict.data["contrasts"]
        if (c["challenger"], c["incumbent"], c["context"]) == (challenger, incumbent, context)
    ]
    return found


def test_a_drift_of_one_arm_is_reported_and_voids_nothing() -> None:
    k3 = [11.0 * math.exp(0.004 * b + 0.0004 * (-1) ** b) for b in range(BLOCKS)]
    verdict = run(flat(**BASE, K3=at_contexts(k3, 11.0, 11.0)))
    assert verdict.outcome == ADOPT
    slope = scipy_stats.linregress(range(BLOCKS), np.log(k3)).pvalue
    assert contrast_of(verdict, "K3", "K1")["drift_p"] == pytest.approx(slope, rel=1e-6)
    assert slope < 1e-6
    # Constant ratios have no slope to test.
    assert contrast_of(verdict, "K3", "K1", 512)["drift_p"] is None


def test_a_contrast_of_arms_with_different_layouts_says_so() -> None:
    verdict = run(flat(**{**BASE, "K0": 20.5}, K3=20.0))
    differ = {
        (c["challenger"], c["incumbent"]): c["layouts_differ"] for c in verdict.data["contrasts"]
    }
    assert differ["K3", "K1"] is differ["K3", "A2"] is differ["K2", "K1"] is False
    assert differ["K3", "K0"] is differ["K3", "A1"] is differ["K2", "K0"] is True
    hypotheses = {h["id"]: h["layouts_differ"] for h in verdict.data["hypotheses"]}
    assert (hypotheses["H1"], hypotheses["H2"], hypotheses["H6"]) == (False, True, False)
    assert "the speed of K0 (layouts differ) at 4096" in verdict.data["language"]["reason"]
