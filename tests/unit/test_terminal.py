"""The verdict in 80 columns: one table, and the box with the three answers last."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from shown_trial import ARMS, decided, steady

from kvtrial.show import answers, terminal


def printed(verdict, **options) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=80).print(terminal.render(verdict, **options))
    return [line.rstrip() for line in text.getvalue().splitlines()]


@pytest.fixture(scope="module")
def verdict():
    return decided(missing={"K0": "pool"})


def test_one_table_and_the_box_last(verdict):
    lines = printed(verdict)
    assert max(map(len, lines)) <= 80 and len(lines) < 30
    assert lines[0] == "tokens/s by filled positions, one session, one thread"
    assert lines[1].split() == [
        "arm", "512", "4,096", "16,384*", "x", "K1", "at", "4,096", "B/token", "KLD", "<",
        "why", "not",
    ]  # fmt: skip
    # tokens/s by context, the ratio with its interval, bytes, KLD, why not.
    assert lines[3].split() == [
        "K2T", "71.3", "71.3", "71.3", "1.43", "[1.42,", "1.44]", "23,040", "4e-05", "run",
        "this",
    ]  # fmt: skip
    assert lines[4].split()[-3:] == ["12,240", "0.021", "quality"]
    assert any(
        line.startswith("Not in the table: K1C (not built), K2 (not built)") for line in lines
    )
    assert "* past the 8,192 positions that the model was trained for." in lines
    assert lines[-1].startswith("╰")
    box = lines[next(i for i, line in enumerate(lines) if line.startswith("╭")) :]
    answered = [line.strip("│ ") for line in box if "What to" in line or "Which " in line]
    assert answered == [
        "What to run: K2T (FP16)",
        "Which language: KEEP (ruled out): K1",
        "Which cold store: undecided",
    ]


def test_a_profiles_interval_is_at_the_confidence_that_decides(verdict):
    assert "Intervals: 95%; of K5, K2T 99.3%, as there are several profiles." in printed(verdict)


def test_full_has_known_answers_error_rates_and_quality_and_ends_the_same(verdict):
    short, full = printed(verdict), printed(verdict, full=True)
    assert full[-len(short) :] == short
    text = "\n".join(" ".join(line.split()) for line in full)
    assert "first / second 1.00 0.9995 [0.99" in text
    assert "first / planted 1.12 1.1197 [1.11" in text
    assert "Error rates were not simulated: 4 blocks in cell 4096x1x1; 6 are needed" in text
    assert "K5 4,096 0.0106 0.0213 99.10% 64 yes" in text
    assert "K5 16,384 0.0106 0.0213 99.10% 64 no: beyond" in text
    assert "K0 lacks: pool" in text
    assert "K3 / K0 4,096 1s 1t 10.0" in text


def test_both_arrangements_of_the_error_rates_are_in_full(verdict):
    own = {"adopt_probability": [0.012], "standard_error": [0.001]}
    rates = {
        "challenger": "K3", "true_improvement": [0.1], "claim": 0.025, "claim_holds": False,
        "arrangements": {"as_measured": own, "all_equal": {**own, "adopt_probability": [0.03]}},
        "adopt_at": 0.1, "simulations": 10_000,
    }  # fmt: skip
    lines = [
        " ".join(line.split()) for line in printed({**verdict, "error_rates": rates}, full=True)
    ]
    assert "10.0% 1.20% ± 0.10% 3.00% ± 0.10%" in lines
    assert "The claim DOES NOT hold in both." in lines


def test_a_missed_known_answer_and_a_tail_are_said():
    missed = decided(planted=1.3)
    text = " ".join(" ".join(printed(missed, full=True)).split())
    assert "NO, and at 99.9% neither" in text
    assert (
        "The method is in doubt: a known answer was missed: K1 first over planted is 1.12" in text
    )
    steps = steady(**ARMS)
    contrasts = decided(steps)["contrasts"]
    slow = [
        {**c, "tail": "K3", "median_ratio": 1.0421}
        if (c["challenger"], c["incumbent"]) == ("K3", "K1")
        else {**c, "tail": None}
        for c in contrasts
    ]
    text = " ".join(" ".join(printed({**missed, "contrasts": slow})).split())
    assert text.count("Tail: ") == 1
    assert "Tail: K3 has slow steps: the median of the rounds is 1.042, outside of the" in text


def test_an_unfinished_run_is_marked_wherever_one_looks(verdict):
    lines = printed(verdict, provisional=["stage aa is not finished", "3 of 8 blocks at 512"])
    assert lines[0].startswith("PROVISIONAL: tokens/s")
    (title,) = [line for line in lines if line.startswith("╭")]
    assert "PROVISIONAL: m on here" in title
    said = " ".join(line.strip("│ ") for line in lines)
    assert "PROVISIONAL: this is not a verdict, and may still change. Missing: stage aa" in said


@pytest.mark.parametrize(
    ("value", "said"),
    [(12345.6, "12,346"), (45.454, "45.5"), (9.999, "10.00"), (0.04123, "0.0412"), (None, "-")],
)
def test_three_digits_that_mean_something(value, said):
    assert answers.significant(value) == said


def test_a_ratio_that_was_measured_the_other_way_round_is_turned():
    """K3 is the FP32 arm after ADOPT: what stands over it is one over its contrasts."""
    verdict = decided(steady(**{**ARMS, "K3": 10.0}))
    assert verdict["run"]["fp32_store"] == "K3"
    over = answers.over_fp32(verdict, "K1", 4096)
    (own,) = [
        c
        for c in verdict["contrasts"]
        if (c["challenger"], c["incumbent"], c["context"]) == ("K3", "K1", 4096)
    ]
    assert over["ratio"] == pytest.approx(1 / own["ratio"])
    assert over["ci95"] == pytest.approx([1 / own["ci95"][1], 1 / own["ci95"][0]])
