"""The hypotheses at each context and head shape, threads against threads, direct write, the control."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from trial_events import BLOCKS, REGISTERED, arm_rows, block_rows, flat, row, trial, with_rows

from kvtrial.decision.verdict import decide

BASE = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=20.0)


def verdict(rows: list[Any], arms: Any = None) -> dict[str, Any]:
    return decide(with_rows(trial(arms or BASE), rows), REGISTERED).data


def t(freedom: int) -> float:
    return float(scipy_stats.t.ppf(0.975, freedom))


def test_attention_is_attributed_at_every_head_shape() -> None:
    rows = []
    for shape, factor in (("9q3kv", 1.0), ("14q2kv", 2.0)):
        for context in (512, 4096, 16384):
            times = {"K0": [8.0] * 4, "A1": [8.0 / factor] * 4, "A2": [2.0] * 4, "K1": [1.0] * 4}
            rows += block_rows("m1", "m1/attention_ms", times, context=context, shape=shape)
    found = verdict(rows)["hypotheses"]

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


def test_an_attention_figure_is_the_median_of_a_block_and_its_interval_is_over_blocks() -> None:
    times = {"K0": [], "A1": []}
    logs = [0.1, 0.2, 0.3, 0.2]  # as many blocks as are registered
    rows = []
    for block, log in enumerate(logs):
        for name, ms in (("K0", 4.0 * math.exp(log)), ("A1", 4.0)):
            times[name].append(ms)
            # One slow iteration of three moves no median.
            for index, value in enumerate((ms, ms * 0.9, 500.0)):
                at = {"candidate": name, "block": block, "index": index, "context": 4096}
                rows.append(row("m1", "m1/attention_ms", value=value, shape="9q3kv", **at))
    (h1,) = [
        h
        for h in verdict(rows)["hypotheses"]
        if (h["id"], h["metric"]) == ("H1", "m1/attention_speed")
    ]
    half = t(3) * np.std(logs, ddof=1) / math.sqrt(4)
    assert math.log(h1["ratio"]) == pytest.approx(0.2, rel=1e-9)
    assert [math.log(b) for b in h1["ci95"]] == pytest.approx([0.2 - half, 0.2 + half], rel=1e-9)


def test_compiler_and_language_are_told_apart() -> None:
    """K1 to K4 is another compiler, then another language: the parts multiply to the whole."""
    found = {
        h["id"]: h["ratio"]
        for h in verdict([], {**BASE, **flat(K1C=20.0, K4=16.0)})["hypotheses"]
        if h["context"] == 4096
    }
    assert found["H6c"] == pytest.approx(22 / 20)
    assert found["H6l"] == pytest.approx(20 / 16)
    assert found["H6k"] == pytest.approx(found["H6c"] * found["H6l"])


def test_a_hypothesis_of_an_arm_that_is_not_there_is_not_shown() -> None:
    told = {h["id"] for h in verdict([])["hypotheses"]}
    assert told == {"H1", "H2", "H3", "H4", "H6"}


def test_threads_are_compared_by_processes_that_share_none() -> None:
    rng = np.random.default_rng(3)
    one, both = (list(22.0 * np.exp(rng.normal(m, 0.05, BLOCKS))) for m in (0.0, -0.6))
    rows = [
        *block_rows("m2", "m2/step_ms", {"K1": both}, context=512, threads=4),
        # A number of threads between one and all, of which no cell is registered.
        *block_rows("m2", "m2/step_ms", {"K1": [15.0] * 6}, context=512, threads=2),
        row("run", "run/profile", text="full"),
        row("run", "run/usable_cpus", text="4"),
    ]
    found = verdict(rows, {**BASE, "K1": {**BASE["K1"], 512: one}})["hypotheses"]
    (h5,) = [h for h in found if h["id"] == "H5"]
    assert (h5["threads"], h5["from_threads"], h5["context"]) == ("all", 1, 512)
    theirs = scipy_stats.ttest_ind(-np.log(both), -np.log(one), equal_var=False)
    assert [math.log(b) for b in h5["ci95"]] == pytest.approx(
        tuple(theirs.confidence_interval(0.95)), rel=1e-9
    )
    # On a machine of one CPU, all threads are one thread: no cell of their own.
    rows[-1]["text"] = "1"
    assert not [h for h in verdict(rows)["hypotheses"] if h["id"] == "H5"]


def test_threads_whose_times_mean_nothing_have_a_reason_for_a_ratio() -> None:
    rows = [
        *block_rows("m2", "m2/step_ms", {"K1": [11.0] * 7 + [math.nan]}, context=512, threads=4),
        row("run", "run/profile", text="full"),
        row("run", "run/usable_cpus", text="4"),
    ]
    (h5,) = [h for h in verdict(rows)["hypotheses"] if h["id"] == "H5"]
    assert h5["ratio"] is None and "no positive number" in h5["problem"]


# --------------------------------------------------------------------------------------------------
# Direct write


def written(
    direct: list[float], append: list[float], name: str = "K1", **changed: str
) -> list[dict[str, Any]]:
    """Both ways of one candidate, one step a block; ``changed``: metric → text of the direct side."""
    rows = []
    for way, times in (("direct", direct), ("append", append)):
        for block, ms in enumerate(times):
            own = arm_rows(f"{name}.{way}", {0: ms}, stage="direct_write", block=block, context=512)
            for found in own:
                if way == "direct" and found["metric"] in changed and block == 2:
                    found["text"] = changed[found["metric"]]
            rows += own
    return rows


def of_k1(rows: list[dict[str, Any]]) -> Any:
    return verdict(rows)["direct_write"]["K1"]


@pytest.mark.parametrize(
    ("direct", "non_inferior"),
    [(8.0, True), (10.0, True), (10.0 / 0.97, True), (10.0 / 0.96999, False), (12.0, False)],
)
def test_a_direct_write_is_not_inferior_down_to_3_percent(
    direct: float, non_inferior: bool
) -> None:
    found = of_k1(written([direct] * BLOCKS, [10.0] * BLOCKS))
    assert found["speed"]["ratio"] == pytest.approx(10.0 / direct)
    assert (found["non_inferior"], found["identical"]) == (non_inferior, True)


@pytest.mark.parametrize(("by", "non_inferior"), [(0.02, True), (0.04, False)])
def test_it_is_the_lower_bound_that_is_not_inferior(by: float, non_inferior: bool) -> None:
    # A mean of 1; the bound is t by / sqrt(7) under it: 1.8% and 3.6%.
    direct = [10.0 * math.exp(by * (-1) ** block) for block in range(BLOCKS)]
    found = of_k1(written(direct, [10.0] * BLOCKS))
    half = t(7) * by / math.sqrt(7)
    assert math.log(found["speed"]["ci95"][0]) == pytest.approx(-half, rel=1e-9)
    assert (half < -math.log(0.97)) == non_inferior == found["non_inferior"]


@pytest.mark.parametrize("metric", ["output_xxh3", "rows_xxh3"])
def test_other_bytes_by_the_other_way_are_seen(metric: str) -> None:
    found = of_k1(written([8.0] * BLOCKS, [10.0] * BLOCKS, **{metric: "b" * 32}))
    assert not found["identical"]


def test_one_way_alone_shows_nothing() -> None:
    found = of_k1(written([8.0] * BLOCKS, []))
    assert not found["identical"] and not found["non_inferior"]
    assert found["speed"]["ratio"] is None


@pytest.mark.parametrize("bad", [math.nan, 0.0])
def test_a_time_that_means_nothing_shows_nothing(bad: float) -> None:
    found = of_k1(written([8.0] * (BLOCKS - 1) + [bad], [10.0] * BLOCKS))
    assert not found["non_inferior"] and "problem" in found["speed"]


def test_a_direct_write_is_judged_by_its_valid_blocks_all_that_are_registered() -> None:
    """A block in which the direct arm stood still is left out, and run again."""
    still = written([8.0] * (BLOCKS - 1) + [8000.0], [10.0] * BLOCKS)
    for found in still:
        last = found["block"] == BLOCKS - 1 and found["candidate"] == "K1.direct"
        if last and found["metric"] == "rotation/stood_still_s":
            found["value"] = 8.0
    short = of_k1(still)
    assert (short["speed"]["ratio"], short["speed"]["n_blocks"]) == (1.25, BLOCKS - 1)
    assert short["identical"] and not short["non_inferior"]
    again = [
        {**found, "trial": 1}
        for found in written([8.0] * BLOCKS, [10.0] * BLOCKS)
        if found["block"] == BLOCKS - 1
    ]
    data = verdict([*still, *again])
    whole = data["direct_write"]["K1"]
    assert (whole["speed"]["ratio"], whole["speed"]["n_blocks"]) == (1.25, BLOCKS)
    assert whole["identical"] and whole["non_inferior"]
    assert data["validity"]["direct_write"] == {"512x1x1": {"valid": BLOCKS, "void": 1}}


def test_bytes_that_were_not_copied_follow_from_the_slots_that_were_used() -> None:
    rows = written([8.0] * BLOCKS, [10.0] * BLOCKS)
    slots = [found for found in rows if found["metric"] == "m2/by_slot"]
    for found in slots:
        if found["block"] % 2:
            found["value"] = 0.0
    found = of_k1(rows)
    assert (found["reserved_share"], found["bytes_not_copied_per_token"]) == (0.5, 23040.0)


def test_without_the_stage_there_is_no_answer() -> None:
    assert verdict([])["direct_write"] is None


# --------------------------------------------------------------------------------------------------
# The control


def test_the_control_has_a_figure_and_no_say() -> None:
    """Two steps in 40 ms are 50 tokens/s; a void run counts for nothing; the verdict stays."""
    at = {"stage": "control", "block": 0, "context": 4096}
    void = arm_rows("C0", {0: 1.0}, **at)
    for found in void:
        if found["metric"] == "rotation/stood_still_s":
            found["value"] = 9.0
    rows = [
        *void,
        *arm_rows("C0", {0: 10.0, 1: 30.0}, trial=1, **at),
        *arm_rows("K1", {0: 10.0, 1: 10.0}, trial=1, **at),
    ]
    found, without = verdict(rows), verdict([])
    assert found["control"] == {
        "candidate": "C0",
        "context": 4096,
        "tokens_per_s": 50.0,
        "over_reference": 0.5,
        "attention_ms": None,
    }
    assert without["control"]["tokens_per_s"] is without["control"]["over_reference"] is None
    assert found["language"] == without["language"]
    assert found["eligibility"]["C0"][0]["why"] == "a control"


def test_a_protocol_without_a_control_has_none() -> None:
    bare = copy.deepcopy(REGISTERED)
    bare.pop("control")
    data = decide(trial(BASE, registration=bare), bare).data
    assert data["control"] is None and "C0" not in data["eligibility"]
