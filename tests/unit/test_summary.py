"""What MLflow shows of a trial, made from verdicts and events known by hand."""

from __future__ import annotations

import pytest
from shown_trial import ARMS, decided, steady

from kvtrial.run import events
from kvtrial.show import summary


@pytest.fixture(scope="module")
def verdict():
    return decided(missing={"K0": "pool"})


def test_the_three_answers_come_first_and_in_their_order(verdict):
    lines = summary.markdown(verdict, {"m2": "#/experiments/1/runs/abc"}).splitlines()
    assert lines[0] == "**Run K2T (FP16)** on `here` with `m`"
    assert lines[2].startswith("K2T (fp16) decodes 1.43x as fast as K1 at 4096 positions")
    assert lines[4].startswith("Language: **KEEP (ruled out): K1**. K3 runs at 1.000x the speed")
    assert lines[6] == ("Cold store: **undecided**. stage cold_tier has no complete attempt.")
    assert "Stages: [m2](#/experiments/1/runs/abc)" in lines


def test_each_arm_is_a_row_the_fastest_first_and_the_chosen_one_marked(verdict):
    text = summary.markdown(verdict, {})
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == (
        "| arm | 512 | 4,096 | 16,384* | over K1 at 4,096 | bytes a token | KLD under | why not |"
    )
    assert rows[2].startswith("| **K2T** | 71.3 | 71.3 | 71.3 | 1.429 [1.4")
    assert rows[2].endswith("| 23,040 | 4e-05 | run this |")
    assert [row.split()[1] for row in rows[2:10]] == [
        "**K2T**", "K5", "K1", "K3", "K1T", "A2", "A1", "K0",
    ]  # fmt: skip
    assert "\n\\* past the 8,192 positions that the model was trained for.\n" in text
    assert "- K0: lacks: pool" in text
    assert "- K5: quality: context 512: the mean KLD may be 0.0213" in text


def test_truths_stand_next_to_what_was_measured_of_them(verdict):
    text = summary.markdown(verdict, {})
    assert "- K1 as first over second is 1.00: measured 0.9995 [0.99" in text
    assert "- K1 as first over planted is 1.12: measured 1.1197 [1.11" in text
    assert "- Error rates were not simulated: 4 blocks in cell 4096x1x1; 6 are needed" in text


def test_an_undecided_verdict_says_why(verdict):
    open_ = decided(without=("m2",))
    lines = summary.markdown(open_, {}).splitlines()
    assert lines[0] == "**Run undecided** on `here` with `m`"
    assert lines[2] == "stage m2 has no complete attempt."
    assert lines[4] == "Language: **INCONCLUSIVE**. stage m2 has no complete attempt."


def test_synthetic_weights_are_said_wherever_the_model_is(verdict):
    assert (
        "(synthetic weights)"
        in summary.markdown({**verdict, "synthetic": True}, {}).splitlines()[0]
    )


def test_tables_have_a_column_for_each_bound(verdict):
    tables = summary.tables(verdict)
    assert set(tables) == {"profiles", "arms", "contrasts", "hypotheses", "eligibility"}
    contrasts = tables["contrasts"].set_index(["challenger", "incumbent", "context"])
    ratio, low, high = contrasts.loc[("K3", "A1", 4096), ["ratio", "ci95_low", "ci95_high"]]
    assert low < ratio < high and ratio == pytest.approx(4.0, rel=0.01)
    profiles = tables["profiles"].set_index("candidate")
    assert bool(profiles.loc["K2T", "chosen"])
    assert profiles.loc["K2T", "ratio_4096_ci_low"] == pytest.approx(1.4217, abs=5e-4)
    assert profiles.loc["K5", "why_not"].startswith("quality: ")
    assert profiles.loc["K5", "kld_upper"] == 0.0213
    eligibility = tables["eligibility"].set_index("candidate")
    assert eligibility.loc["K0", "reasons"] == "lacks: pool"
    assert bool(eligibility.loc["K1", "eligible"])


def test_the_step_of_what_is_measured_by_context_is_the_context(verdict):
    numbers = {(name, step): value for name, value, step in summary.verdict_metrics(verdict)}
    for context in (512, 4096, 16384):
        assert numbers["tokens_per_s/K1", context] == pytest.approx(1000 / 20, rel=0.01)
        assert numbers["chosen/tokens_per_s", context] == pytest.approx(1000 / 14, rel=0.01)
        assert numbers["ratio/K3_over_K1", context] == pytest.approx(1.0, rel=0.01)
    assert numbers["chosen/bytes_per_token", 0] == 23040
    assert numbers["chosen/ratio_to_fp32.low", 4096] == pytest.approx(1.4217, abs=5e-4)
    assert numbers["quality/kld_upper.K5", 512] == 0.0213
    assert numbers["known_answers/first_over_planted", 0] == pytest.approx(1.12, rel=0.01)
    assert numbers["known_answers/first_over_planted.truth", 0] == 1.12
    assert not any(events.METRIC_CHARACTERS.search(name) for name, _ in numbers)


def test_what_is_not_finite_is_no_number():
    arms = steady(**ARMS)
    arms["K3"][4096][1] = float("nan")
    names = {name for name, _, step in summary.verdict_metrics(decided(arms)) if step == 4096}
    assert "tokens_per_s/K1" in names
    assert "tokens_per_s/K3" not in names


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
