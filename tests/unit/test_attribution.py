"""The hypotheses at each context and head shape, threads against threads, and the control."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from trial_events import REGISTERED, block_rows, flat, row, trial, with_rows

from kvtrial.decision.verdict import decide

BASE = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=20.0)


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


def test_compiler_and_language_are_told_apart() -> None:
    """K1 to K4 is another compiler, then another language: the parts multiply to the whole."""
    found = {
        h["id"]: h["ratio"]
        for h in decide(trial({**BASE, **flat(K1C=20.0, K4=16.0)}), REGISTERED).data["hypotheses"]
        if h["context"] == 4096
    }
    assert found["H6c"] == pytest.approx(22 / 20)
    assert found["H6l"] == pytest.approx(20 / 16)
    assert found["H6k"] == pytest.approx(found["H6c"] * found["H6l"])


def test_threads_are_compared_by_processes_that_share_none() -> None:
    rng = np.random.default_rng(3)
    one, both = (list(22.0 * np.exp(rng.normal(m, 0.05, 6))) for m in (0.0, -0.6))
    arms = {**BASE, "K1": {**BASE["K1"], 512: one}}
    table = with_rows(
        trial(arms),
        [
            *block_rows("m2", "m2/step_ms", {"K1": both}, context=512, threads=4),
            # A number of threads between one and all, of which no cell is registered.
            *block_rows("m2", "m2/step_ms", {"K1": [15.0] * 6}, context=512, threads=2),
            row("run", "run/profile", text="full"),
            row("run", "run/usable_cpus", text="4"),
        ],
    )
    found = decide(table, REGISTERED).data["hypotheses"]
    (h5,) = [h for h in found if h["id"] == "H5"]
    assert (h5["threads"], h5["from_threads"], h5["context"]) == ("all", 1, 512)
    theirs = scipy_stats.ttest_ind(-np.log(both), -np.log(one), equal_var=False)
    assert [math.log(b) for b in h5["ci95"]] == pytest.approx(
        tuple(theirs.confidence_interval(0.95)), rel=1e-9
    )


def test_a_direct_write_is_judged_by_its_valid_blocks() -> None:
    """Three blocks at 10 ms by append and 8 by slots; a fourth in which the machine slowed down."""
    at = {"context": 512}
    rows = [
        *block_rows("direct_write", "direct/step_ms", {"K1": [10.0] * 4}, text="append", **at),
        *block_rows(
            "direct_write", "direct/step_ms", {"K1": [8.0] * 3 + [80.0]}, text="direct", **at
        ),
        *(
            row("direct_write", "direct/identical", candidate="K1", block=b, value=1.0, **at)
            for b in range(4)
        ),
    ]
    for found in rows:
        if (found["metric"], found["block"], found["index"]) == ("probe/read_gb_per_s", 3, 1):
            found["value"] = 5.0
    verdict = decide(with_rows(trial(BASE), rows), REGISTERED).data
    written = verdict["direct_write"]["K1"]
    assert (written["speed"]["ratio"], written["speed"]["n_blocks"]) == (1.25, 3)
    assert written["identical"] and written["non_inferior"]
    assert verdict["gates"]["direct_write"] == {"512x1x1": {"valid": 3, "void": 1}}


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
