"""What MLflow shows of a trial, made from verdicts and events known by hand."""

from __future__ import annotations

import pytest
from trial_events import REGISTERED, flat, trial

from kvtrial.decision.verdict import decide
from kvtrial.run import events
from kvtrial.show import summary

ARMS = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 22.0, "K2": 15.0, "K3": 11.0}


@pytest.fixture(scope="module")
def verdict():
    return decide(trial(flat(**ARMS), missing={"K0": "pool"}), REGISTERED).data


def test_the_verdict_is_the_first_line(verdict):
    text = summary.markdown(verdict, {"m2": "#/experiments/1/runs/abc"})
    lines = text.splitlines()
    assert lines[0] == "**ADOPT: K3** on `here` with `m`"
    assert "| K1 | 4,096 | 1 | 1 | 45.45 | 22.00 | 22.00 | 12 |" in lines
    assert "| K3 | K1 | 2.000 | 2.000 to 2.000 | 12 |" in lines
    assert "- K0: lacks: pool" in lines
    assert "Stages: [m2](#/experiments/1/runs/abc)" in lines


def test_synthetic_weights_are_said_wherever_the_model_is(verdict):
    assert (
        "(synthetic weights)"
        in summary.markdown({**verdict, "synthetic": True}, {}).splitlines()[0]
    )


def test_tables_have_a_column_for_each_bound(verdict):
    tables = summary.tables(verdict)
    assert set(tables) == {"arms", "contrasts", "hypotheses", "eligibility"}
    contrasts = tables["contrasts"].set_index(["challenger", "incumbent", "context"])
    assert contrasts.loc[("K3", "K1", 4096), ["ratio", "ci95_low", "ci95_high"]].tolist() == [
        2,
        2,
        2,
    ]
    eligibility = tables["eligibility"].set_index("candidate")
    assert eligibility.loc["K0", "reasons"] == "lacks: pool"
    assert bool(eligibility.loc["K1", "eligible"])


def test_numbers_carry_cell_and_unit(verdict):
    numbers = summary.verdict_metrics(verdict)
    assert numbers["contrast/K3_over_K1.4096_1s_1t"] == 2.0
    assert numbers["m2/tokens_per_s.K1.4096_1s_1t"] == pytest.approx(1000 / 22, rel=1e-11)
    assert not any(events.METRIC_CHARACTERS.search(name) for name in numbers)


def rows(*values):
    return events.to_frame(
        events.event(metric, candidate="K1", value=value, **columns)
        for metric, value, columns in values
    )


def test_step_latencies_are_a_series_and_rates_total_over_total():
    table = rows(
        ("m2/step_ms", 1000.0, {"block": 0, "index": 0}),
        ("m2/step_ms", 100.0, {"block": 0, "index": 1}),
        ("m2/append_us", 3.0, {"block": 0, "index": 0}),
        ("m2/append_us", 5.0, {"block": 0, "index": 1}),
    )
    found = summary.arm_metrics(table, sessions=1)
    assert [row for row in found if row[0] == "m2/step_ms"] == [
        ("m2/step_ms", 1000.0, 0),
        ("m2/step_ms", 100.0, 1),
    ]
    single = {name: value for name, value, _ in found}
    # Two tokens in 1.1 s; the mean of the two rates would be 5.5.
    assert single["m2/tokens_per_s"] == pytest.approx(2 / 1.1)
    assert single["m2/append_us"] == 4.0
    assert single["m2/step_ms.p50"] == 550.0


def test_a_void_block_counts_by_its_last_run():
    table = rows(
        ("m2/step_ms", 90.0, {"block": 0, "trial": 0}),
        ("m2/step_ms", 20.0, {"block": 0, "trial": 1}),
        ("m2/step_ms", 30.0, {"block": 1, "trial": 0}),
    )
    found = summary.arm_metrics(table, sessions=2)
    assert [value for name, value, _ in found if name == "m2/step_ms"] == [20.0, 30.0]
    assert ("m2/tokens_per_s", 80.0, 0) in found  # 2 steps of 2 sessions in 50 ms


def test_conformance_is_counted_and_worst_differences_stay_worst():
    table = rows(
        ("conformance/outcome", 1.0, {"text": "A@P16"}),
        ("conformance/outcome", 1.0, {"text": "A@P32"}),
        ("conformance/outcome", 0.0, {"text": "B@P16"}),
        ("conformance/outcome", float("nan"), {"text": "C@P16"}),
        ("parity/max_abs_logit_difference", 0.1, {"index": 0}),
        ("parity/max_abs_logit_difference", 0.4, {"index": 1}),
        ("parity/max_abs_logit_difference", 0.2, {"index": 2}),
    )
    found = {name: value for name, value, _ in summary.arm_metrics(table, sessions=1)}
    assert found == {
        "conformance/passed": 2.0,
        "conformance/failed": 1.0,
        "conformance/gaps": 1.0,
        "parity/max_abs_logit_difference": 0.4,
    }
