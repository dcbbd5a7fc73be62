"""The hypotheses at each context and head shape, threads against threads, and A/A."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from trial_events import REGISTERED, flat, row, trial, with_rows

from kvtrial.decide import decide

BASE = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=20.0)
PROBES = {"probe/read_gb_per_s": 10.0, "probe/spin_ms": 50.0}


def block_rows(stage: str, metric: str, values: dict[str, list[float]], **at: Any) -> list[Any]:
    """One value a block and arm, on a quiet machine."""
    blocks = len(next(iter(values.values())))
    rows = [
        row(stage, metric, candidate=name, block=b, value=v, **at)
        for name, own in values.items()
        for b, v in enumerate(own)
    ]
    rows += [
        row(stage, probe, block=b, index=index, value=value, **at)
        for probe, value in PROBES.items()
        for b in range(blocks)
        for index in (0, 1)
    ]
    return rows


def test_attention_is_attributed_at_every_head_shape() -> None:
    rows = []
    for shape, factor in (("9q3kv", 1.0), ("14q2kv", 2.0)):
        for context in (512, 4096, 16384):
            times = {"K0": [8.0] * 4, "A1": [8.0 / factor] * 4, "A2": [2.0] * 4, "K1": [1.0] * 4}
            rows += block_rows("m1", "m1/attention_ms", times, context=context, shape=shape)
    found = decide(with_rows(trial(BASE), rows), REGISTERED).data["hypotheses"]

    def ratio(number: str, metric: str, shape: str, context: int) -> float:
        (one,) = [
            h
            for h in found
            if (h["id"], h["metric"], h["shape"], h["context"]) == (number, metric, shape, context)
        ]
        assert one["ci95"] == pytest.approx([one["ratio"]] * 2)
        return float(one["ratio"])

    for context in (512, 4096, 16384):
        assert ratio("H1", "m1/attention_speed", "14q2kv", context) == pytest.approx(2.0)
        assert ratio("H1", "m1/attention_speed", "9q3kv", context) == pytest.approx(1.0)
        assert ratio("H3", "m1/attention_speed", "14q2kv", context) == pytest.approx(2.0)
        assert ratio("H1", "m2/tokens_per_s", "9q3kv", context) == pytest.approx(100 / 80)


def test_threads_are_compared_by_processes_that_share_none() -> None:
    rng = np.random.default_rng(3)
    one, both = (list(22.0 * np.exp(rng.normal(m, 0.05, 6))) for m in (0.0, -0.6))
    arms = {**BASE, "K1": {**BASE["K1"], 512: one}}
    table = with_rows(
        trial(arms),
        [
            *block_rows("m2", "m2/step_ms", {"K1": both}, context=512, threads=2),
            row("run", "run/profile", text="full"),
        ],
    )
    found = decide(table, REGISTERED).data["hypotheses"]
    (h5,) = [h for h in found if h["id"] == "H5"]
    assert (h5["threads"], h5["from_threads"], h5["context"]) == ("all", 1, 512)
    theirs = scipy_stats.ttest_ind(-np.log(both), -np.log(one), equal_var=False)
    assert [math.log(b) for b in h5["ci95"]] == pytest.approx(
        tuple(theirs.confidence_interval(0.95)), rel=1e-9
    )


def test_the_same_twice_is_judged_by_its_interval() -> None:
    def aa(second: float) -> dict[str, Any]:
        noise = [0.01, -0.01] * 3
        times = {"first": [20.0] * 6, "second": [20.0 * second * math.exp(x) for x in noise]}
        rows = block_rows("aa", "m2/step_ms", times, context=4096)
        return decide(with_rows(trial(BASE), rows), REGISTERED).data["aa"]

    fair = aa(1.0)
    assert fair["ratio"] == pytest.approx(1.0, rel=1e-9)
    assert fair["n_blocks"] == 6
    assert fair["covers_1"] is True
    assert fair["candidate"] == "K1"
    tilted = aa(1.05)  # a slot effect that did not cancel
    assert tilted["ratio"] == pytest.approx(1 / 1.05, rel=1e-9)
    assert tilted["covers_1"] is False


def test_an_aa_that_was_not_measured_says_so() -> None:
    found = decide(trial(BASE), REGISTERED).data["aa"]
    assert (found["covers_1"], found["ratio"]) == (None, None)
    assert found["problem"] == "no valid blocks"


def test_the_control_has_a_figure_and_no_say() -> None:
    """Two steps in 40 ms are 50 tokens/s; a void trial counts for nothing; the verdict stays."""
    at = {"context": 4096, "trial": 1}
    rows = block_rows("control", "m2/step_ms", {"C0": [10.0]}, **at)
    rows.append(row("control", "m2/step_ms", candidate="C0", block=0, index=1, value=30.0, **at))
    void = block_rows("control", "m2/step_ms", {"C0": [1.0]}, context=4096)
    rows += [r for r in void if r["metric"] != "probe/spin_ms"]
    verdict = decide(with_rows(trial(BASE), rows), REGISTERED).data
    without = decide(trial(BASE), REGISTERED).data
    assert verdict["control"] == {
        "candidate": "C0",
        "context": 4096,
        "tokens_per_s": 50.0,
        "attention_ms": None,
    }
    assert without["control"]["tokens_per_s"] is None
    assert verdict["hot"] == without["hot"]
    assert verdict["eligibility"]["C0"][0] == "a control: measured, never to win"
