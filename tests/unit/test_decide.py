"""The rule of the specification, branch by branch, on tables made by hand: languages, doubts, attempts, cold."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from trial_events import (
    BLOCKS,
    CONTEXTS,
    REGISTERED,
    arm_rows,
    at_contexts,
    flat,
    row,
    trial,
    with_rows,
    without,
)

from kvtrial.decision import language
from kvtrial.decision.eligibility import Reason, Reasons, Why
from kvtrial.decision.language import NOT_SHOWN, RULED_OUT
from kvtrial.decision.verdict import (
    ADOPT,
    INCONCLUSIVE,
    KEEP,
    NEEDED,
    MixedProtocol,
    Verdict,
    decide,
)
from kvtrial.measure.plan import SamplingPlan
from kvtrial.run import protocol

LACKS = {"K0": "branch, holes, pool"}
BASE = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 22.0, "K2": 15.0}
AT = {"context": 4096}


def run(step_ms: dict, **kw) -> Verdict:  # type: ignore[no-untyped-def,type-arg]
    return decide(trial(step_ms, missing=LACKS, **kw), REGISTERED)


def answer(verdict: Verdict) -> tuple[Any, ...]:
    found = verdict.data["language"]
    return found["outcome"], found["kind"], found["adopted"]


def longer(arms: dict[str, dict[int, list[float]]], blocks: int) -> Any:
    """The same, but so many blocks in the primary cell."""
    return {n: {**own, 4096: (own[4096] * blocks)[:blocks]} for n, own in arms.items()}


def up_and_down(ms: float, by: float, blocks: int = BLOCKS) -> list[float]:
    """Step times whose logs lie above and below by turns; their mean log is that of ``ms``."""
    return [ms * math.exp(by * (-1) ** block) for block in range(blocks)]


def spread(by: float, n: int) -> float:
    """The standard deviation of n values that lie ``by`` above and below their mean."""
    return by * math.sqrt(n / (n - 1))


def t(freedom: int, confidence: float = 0.95) -> float:
    return float(scipy_stats.t.ppf(0.5 + confidence / 2, freedom))


# --------------------------------------------------------------------------------------------------
# Rule 1: adoption and vetoes, at their edges


@pytest.mark.parametrize(
    ("k3_ms", "expected"),
    [
        (22.0 / 1.10, (ADOPT, None, "K3")),  # exactly 10% adopts
        pytest.param(22.0 / 1.10 * (1 + 5e-10), (ADOPT, None, "K3"), id="within-the-slack"),
        (22.0 / 1.10 * (1 + 5e-9), (KEEP, RULED_OUT, "K1")),
        (22.0 / 1.0999999, (KEEP, RULED_OUT, "K1")),
        (22.0 / 1.30, (ADOPT, None, "K3")),
        (22.0, (KEEP, RULED_OUT, "K1")),  # equal arms keep the incumbent
        (30.0, (KEEP, RULED_OUT, "K1")),
    ],
)
def test_the_edge_of_adoption(k3_ms: float, expected: tuple[Any, ...]) -> None:
    assert answer(run(flat(**BASE, K3=k3_ms, K4=25.0))) == expected


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [(0.97, ADOPT), (0.97 * (1 - 5e-10), ADOPT), (0.969999, KEEP), (0.99, ADOPT)],
)
@pytest.mark.parametrize("veto_context", [512, 16384])
def test_the_edge_of_the_veto(ratio: float, outcome: str, veto_context: int) -> None:
    k3 = {**at_contexts(11.0, 11.0, 11.0), veto_context: [22.0 / ratio] * BLOCKS}
    verdict = run(flat(**BASE, K3=k3))
    assert verdict.outcome == outcome
    said = verdict.data["language"]["reason"]
    assert (f"worse by more than 3% elsewhere: at {veto_context}" in said) == (outcome == KEEP)


def test_a_veto_against_any_incumbent_counts() -> None:
    # Fast everywhere but for A2 at 512.
    arms = flat(**{**BASE, "A2": at_contexts(70.0, 10.0, 70.0)}, K3=11.0)
    verdict = run(arms)
    assert verdict.outcome == KEEP
    assert "at 512 it is 0.909x A2" in verdict.data["language"]["reason"]


def test_a_veto_passed_without_its_interval_clearing_is_said() -> None:
    # Mean log ratio 0 at 512 with a wide interval: the point estimate passes, the interval does not.
    verdict = run(flat(**BASE, K3=at_contexts(11.0, up_and_down(22.0, 0.1), 11.0)))
    assert verdict.outcome == ADOPT
    low = math.exp(-t(7) * spread(0.1, 8) / math.sqrt(8))
    said = f"at 512 the interval over K1 begins at {low:.3f}"
    assert said in verdict.data["language"]["reason"]


def test_contradicting_contexts_keep() -> None:
    assert run(flat(**BASE, K3=at_contexts(11.0, 60.0, 11.0))).outcome == KEEP


def test_every_incumbent_counts_not_only_k1() -> None:
    verdict = run(flat(**{**BASE, "A2": 20.5}, K3=20.0))
    assert verdict.outcome == KEEP
    assert "1.025x the speed of A2 at 4096" in verdict.data["language"]["reason"]


def test_a_challenger_has_to_beat_k1t_too() -> None:
    verdict = run(flat(**BASE, K1T=20.5, K3=20.0))
    assert answer(verdict) == (KEEP, RULED_OUT, "K1T")
    assert "the speed of K1T (layouts differ) at 4096" in verdict.data["language"]["reason"]


# --------------------------------------------------------------------------------------------------
# Kinds of KEEP


def test_not_shown_says_how_many_more_blocks_would_tell() -> None:
    # log 1.12 is 0.018 above the edge, and the half-width is 0.031.
    by, n = 0.06, 24
    half = max(t(n - 1) * spread(by, n), t(7) * spread(by, 8)) / math.sqrt(n)
    assert half > math.log(1.12 / 1.10)
    arms = longer(flat(**BASE, K3=22.0 / 1.12), n)
    arms["K3"][4096] = up_and_down(22.0 / 1.12, by, n)
    verdict = run(arms)
    found = verdict.data["language"]
    assert answer(verdict) == (KEEP, NOT_SHOWN, "K1")
    (against_k1,) = [one for one in found["against"] if one["incumbent"] == "K1"]
    assert against_k1["ratio"] == pytest.approx(1.12, rel=1e-9)
    assert [math.log(b) for b in against_k1["ci95"]] == pytest.approx(
        [math.log(1.12) - half, math.log(1.12) + half], rel=1e-9
    )
    # As many that their interval, by this spread, is as wide as the mean is away.
    more = math.ceil((t(n - 1) * spread(by, n) / math.log(1.12 / 1.10)) ** 2) - n
    assert more == found["more_blocks"] == 26
    assert "about 26 more blocks would tell" in found["reason"]
    assert not found["equal"]


def test_on_the_edge_no_number_of_blocks_tells() -> None:
    arms = longer(flat(**BASE, K3=20.0), 24)
    arms["K3"][4096] = up_and_down(20.0, 0.06, 24)
    found = run(arms).data["language"]
    assert (found["kind"], found["more_blocks"]) == (NOT_SHOWN, None)
    assert "it lies on the edge" in found["reason"]


def test_an_upper_bound_under_the_edge_rules_out() -> None:
    # 1.05 with an interval that is 0.016 wide on either side: 10% is out of it.
    arms = longer(flat(**BASE, K3=22.0 / 1.05), 24)
    arms["K3"][4096] = up_and_down(22.0 / 1.05, 0.031, 24)
    found = run(arms).data["language"]
    assert (found["kind"], found["more_blocks"]) == (RULED_OUT, None)
    assert "a gain of 10% is ruled out" in found["reason"]


def test_a_gain_that_is_ruled_out_over_another_arm_names_it() -> None:
    """Over K1, whose interval is wide, it is not; over K1T, which is faster, it is."""
    arms = flat(**BASE, K1T=21.0, K3=21.0)
    wide = [22.0 * (1 + 0.12 * (-1) ** i) for i in range(BLOCKS)]
    arms["K1"] = {**arms["K1"], 4096: wide}
    found = run(longer(arms, 24)).data["language"]
    assert found["kind"] == RULED_OUT
    for said in ("K1 at 4096 positions (95% interval 0.977 to 1.107", "10% over K1T is ruled out"):
        assert said in found["reason"]


def test_exactly_10_percent_over_one_is_not_what_rules_out_another() -> None:
    """K3 passes against K1 exactly; what is not shown is its gain over K1T."""
    arms = longer(flat(**BASE, K3=20.0, K1T=22.4), 24)
    arms["K1T"][4096] = up_and_down(22.4, 0.06, 24)
    found = run(arms).data["language"]
    assert (found["kind"], found["more_blocks"] is not None) == (NOT_SHOWN, True)


@pytest.mark.parametrize(
    ("ratio", "equal"),
    [(1.0, True), (1.03, True), (1.0300001, False), (0.97, True), (0.9699999, False)],
)
def test_equal_languages_are_said_to_be(ratio: float, equal: bool) -> None:
    found = run(flat(**BASE, K3=22.0 / ratio)).data["language"]
    assert (found["outcome"], found["equal"]) == (KEEP, equal)
    assert ("K3 and K1 are equal within 3%" in found["reason"]) == equal


def test_equal_needs_the_whole_interval() -> None:
    arms = longer(flat(**BASE, K3=22.0), 24)
    arms["K3"][4096] = up_and_down(22.0, 0.07, 24)  # half-width 0.036
    assert not run(arms).data["language"]["equal"]


# --------------------------------------------------------------------------------------------------
# Rule 2: which Cython arm stays


def test_an_arm_that_lacks_something_is_compared_with_and_does_not_stay() -> None:
    verdict = run(flat(K0=10.0, A1=80.0, A2=21.0, K1=22.0, K3=11.0))
    assert answer(verdict) == (KEEP, RULED_OUT, "A2")  # 11 ms would have beaten all others
    assert verdict.data["eligibility"]["K0"] == [{"why": "lacks", "text": "branch, holes, pool"}]


@pytest.mark.parametrize(
    ("k1t", "stays"),
    [
        (at_contexts(22.0, 22.0, 22.0), "K1"),  # equal: the interval is [1, 1]
        (at_contexts(22.0 * (1 - 1e-12), 22.0, 22.0), "K1"),  # the rounding of a logarithm
        (at_contexts(21.9, 22.0, 22.0), "K1T"),  # better by an interval of no width
        (at_contexts(up_and_down(21.8, 0.015), 22.0, 22.0), "K1"),  # 0.9% better, give or take 1.3%
        (
            at_contexts(up_and_down(21.5, 0.015), 22.0, 22.0),
            "K1T",
        ),  # 2.3% better, give or take 1.3%
        (at_contexts(21.9, 22.0 / 0.96, 22.0), "K1"),  # better at 4,096, vetoed at 512
        (at_contexts(21.9, 22.0 / 0.97, 22.0), "K1T"),  # exactly 3% worse passes
        (at_contexts(30.0, 11.0, 11.0), "K1"),  # better where it does not count
    ],
)
def test_k1_stays_unless_another_is_better_by_an_interval_that_excludes_1(
    k1t: dict[int, list[float]], stays: str
) -> None:
    assert run(flat(**BASE, K1T=k1t, K3=30.0)).data["language"]["reference"] == stays


class Table:
    """Log speeds (blocks,) of arms at every judged cell, in place of events."""

    def __init__(self, speeds: dict[str, np.ndarray]) -> None:
        self.speeds = speeds

    def plan(self, cell: Any) -> SamplingPlan:
        return SamplingPlan.of_cell(REGISTERED, cell)

    def logs(self, cell: Any, top: str, bottom: str) -> np.ndarray:
        return self.speeds[top] - self.speeds[bottom]


def test_the_arm_that_stays_does_not_flip_with_noise() -> None:
    rng = np.random.default_rng(2)
    reasons = Reasons({n: [] for n in REGISTERED["decision"]["incumbents"]})
    moved = better = 0
    for _ in range(400):
        speeds = {n: np.full(BLOCKS, -9.0) for n in REGISTERED["decision"]["incumbents"]}
        speeds |= {n: rng.normal(0, 0.01, BLOCKS) for n in ("K1", "K1T")}
        better += speeds["K1T"].mean() > speeds["K1"].mean()
        table: Any = Table(speeds)
        moved += language.staying(table, reasons, REGISTERED) != "K1"
    assert 160 < better < 240  # what an answer by the better mean would do
    assert moved / 400 <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / 400)


@pytest.mark.parametrize(
    ("k3", "expected"), [(11.0, (ADOPT, None, "K3")), (21.0, (KEEP, RULED_OUT, "K1T"))]
)
def test_where_the_reference_can_not_stay_the_best_other_arm_does(
    k3: float, expected: tuple[Any, ...]
) -> None:
    events = trial(flat(**BASE, K1T=21.0, K3=k3), missing={**LACKS, "K1": "branch"})
    verdict = decide(events, REGISTERED)
    assert answer(verdict) == expected
    assert verdict.data["language"]["reference"] == "K1T"


def test_without_k1_which_all_evidence_rests_on_nothing_is_decided() -> None:
    verdict = run(flat(**BASE, K1T=21.0, K3=11.0), not_built={"K1": "no compiler"})
    assert (verdict.outcome, verdict.store) == (INCONCLUSIVE, None)


def test_no_cython_arm_that_can_stay_is_no_answer() -> None:
    lacking = dict.fromkeys(REGISTERED["decision"]["incumbents"], "branch")
    verdict = decide(trial(flat(**BASE, K3=11.0), missing=lacking), REGISTERED)
    assert verdict.outcome == INCONCLUSIVE
    assert "no FP32 incumbent is eligible" in verdict.data["language"]["reason"]


@pytest.mark.parametrize(("k1t", "reference"), [(22.0, "K1"), (21.0, "K1T")])
def test_the_reference_after_adoption_is_the_best_eligible_cython_arm(
    k1t: float, reference: str
) -> None:
    found = run(flat(**BASE, K1T=k1t, K3=11.0)).data["language"]
    assert (found["outcome"], found["adopted"], found["reference"]) == (ADOPT, "K3", reference)


def test_outcomes_retire_what_the_rule_says() -> None:
    assert run(flat(**BASE, K3=11.0)).data["language"]["retired"] == ["K0"]
    assert run(flat(**BASE, K3=22.0)).data["language"]["retired"] == ["K3", "K4", "K3T"]


# --------------------------------------------------------------------------------------------------
# The sequence of challengers


def test_the_fixed_sequence_ends_at_the_first_challenger_in_the_trial() -> None:
    verdict = run(flat(**BASE, K3=22.0, K4=10.0))
    assert verdict.outcome == KEEP
    assert "K4 and K3T were not tested" in verdict.data["language"]["reason"]


def test_the_next_challenger_is_tested_when_the_first_is_out() -> None:
    verdict = run(flat(**BASE, K4=10.0), not_built={"K3": "rustc was not found"})
    assert answer(verdict) == (ADOPT, None, "K4")
    why = {"why": "not built", "text": "rustc was not found"}
    assert verdict.data["eligibility"]["K3"] == [why]


def test_without_clang_its_own_column_is_missing_and_no_more() -> None:
    arms = flat(**BASE, K1C=21.0, K3=11.0, K4=12.0)
    whole = run(arms)
    arms.pop("K1C")
    reduced = run(arms, not_built={"K1C": "clang was not found"})
    assert whole.outcome == ADOPT
    assert reduced.data["language"] == whole.data["language"]
    assert reduced.data["contrasts"] == whole.data["contrasts"]
    told = [{h["id"] for h in verdict.data["hypotheses"]} for verdict in (whole, reduced)]
    assert told[0] - told[1] == {"H6c", "H6l"}


def test_the_transposed_rust_arm_is_last_in_the_sequence() -> None:
    verdict = run(flat(**BASE, K1T=11.0, K3T=10.0))
    assert answer(verdict) == (ADOPT, None, "K3T")  # exactly 10% over its twin
    slower = run(flat(**BASE, K1T=10.9, K3T=10.0))
    assert answer(slower) == (KEEP, RULED_OUT, "K1T")
    assert "K3T runs at 1.090x the speed of K1T at 4096" in slower.data["language"]["reason"]
    differ = {
        (c["challenger"], c["incumbent"]): c["layouts_differ"] for c in slower.data["contrasts"]
    }
    assert (differ["K3T", "K1T"], differ["K3T", "K1"]) == (False, True)
    hypotheses = {h["id"]: h["layouts_differ"] for h in slower.data["hypotheses"]}
    assert (hypotheses["H3t"], hypotheses["H6t"]) == (True, False)


def test_without_rust_cython_stays() -> None:
    verdict = run(flat(**BASE), not_built=dict.fromkeys(("K3", "K4", "K3T"), "no rustc"))
    assert answer(verdict) == (KEEP, None, "K1")
    assert "K3 is out (not built: no rustc)" in verdict.data["language"]["reason"]


@pytest.mark.parametrize("name", ["K1C", "C0"])
def test_a_control_is_listed_and_never_wins_nor_is_compared_with(name: str) -> None:
    """K1 built by another compiler, and pages in RocksDB: measured, never a Cython arm."""
    registration = copy.deepcopy(REGISTERED)
    registration.pop("control")  # here it takes part in the pairs
    registration["candidates"] = [*dict.fromkeys([*registration["candidates"], name])]

    def decided(k3: float) -> Verdict:
        events = trial(flat(**BASE, K3=k3, **{name: 5.0}), registration=registration, missing=LACKS)
        role = row("run", "candidate/role", registration, candidate=name, text="control")
        return decide(with_rows(events, [role]), registration)

    verdict = decided(11.0)
    assert answer(verdict) == (ADOPT, None, "K3")  # 5 ms would have stopped it
    assert verdict.data["eligibility"][name][0]["why"] == "a control"
    assert any(arm["candidate"] == name for arm in verdict.data["arms"])
    # Registered among the arms to beat by mistake, it still is none.
    registration["decision"]["incumbents"].append(name)
    assert answer(decided(11.0)) == (ADOPT, None, "K3")
    assert answer(decided(22.0)) == (KEEP, RULED_OUT, "K1")


# --------------------------------------------------------------------------------------------------
# Rule 3: doubts


#: Name → rows that put an arm in doubt.
DOUBTS = {
    "crashed in m2": [("m2", "failed", {"text": "the process died (SIGSEGV)"})],
    "crashed in m1": [("m1", "failed", {"text": "ValueError: no"})],
    "conformance": [("conformance", "conformance/outcome", {"value": 0.0, "text": "KvFine@P32"})],
    "oracle, m2": [("m2", "m2/output_error", {"value": 1.0000001, "block": 0})],
    "oracle, m1": [("m1", "m1/output_error", {"value": 1.5, "block": 0, "shape": "14q2kv"})],
    "oracle, no number": [("m2", "m2/output_error", {"block": 0})],
    "rows": [("m2", "m2/row_error", {"value": 1.1, "block": 0})],
    "changed logits": [("m2", "output_xxh3", {"text": "b" * 32, "block": 1})],
    "changed rows": [("m2", "rows_xxh3", {"text": "b" * 32, "block": 1})],
}


def doubted(name: str, doubt: str, arms: dict[str, Any]) -> Verdict:
    rows = [row(stage, metric, candidate=name, **AT, **c) for stage, metric, c in DOUBTS[doubt]]
    return decide(with_rows(trial(arms, missing=LACKS), rows), REGISTERED)


@pytest.mark.parametrize(
    ("name", "doubt"), [*(("K1", doubt) for doubt in DOUBTS), ("K0", "oracle, m2"), ("A2", "rows")]
)
def test_a_doubt_about_an_incumbent_never_removes_it(name: str, doubt: str) -> None:
    verdict = doubted(name, doubt, flat(**BASE, K3=11.0))
    found = verdict.data["language"]
    assert (found["outcome"], found["adopted"]) == (INCONCLUSIVE, None)
    assert found["reason"].startswith(f"{name}, which a challenger has to beat, is in doubt:")
    assert not verdict.decided
    assert any(arm["candidate"] == name for arm in verdict.data["arms"])


@pytest.mark.parametrize("doubt", ["crashed in m2", "conformance", "oracle, m1", "changed rows"])
def test_a_doubt_about_a_challenger_is_its_own(doubt: str) -> None:
    verdict = doubted("K3", doubt, flat(**BASE, K3=5.0, K4=22.0))
    assert answer(verdict) == (KEEP, RULED_OUT, "K1")
    assert "K3 is out (" in verdict.data["language"]["reason"]
    assert any(arm["candidate"] == "K3" for arm in verdict.data["arms"])


@pytest.mark.parametrize("name", ["K2", "K1C"])
def test_a_doubt_about_an_arm_that_nobody_has_to_beat_stops_nothing(name: str) -> None:
    assert doubted(name, "oracle, m2", flat(**BASE, K1C=22.0, K3=11.0)).outcome == ADOPT


def test_issue_19_a_doubt_about_k1_does_not_adopt_an_arm_that_is_7_percent_faster() -> None:
    arms = flat(**BASE, K3=20.5)
    plain = run(arms)
    assert answer(plain) == (KEEP, RULED_OUT, "K1")
    for doubt in ("crashed in m2", "oracle, m2"):
        found = doubted("K1", doubt, arms)
        assert found.outcome == INCONCLUSIVE, doubt
        assert found.data["language"]["reference"] is None
    tokens = [
        row("m2", f"m2/logits_{what}", candidate="K1", block=0, value=value, **AT)
        for what, value in (("top1", 0.5), ("kld", 0.1), ("shift", 0.6))
    ]
    # Another token in the quantised decode is rounding: reported, and no doubt.
    with_another_token = decide(with_rows(trial(arms, missing=LACKS), tokens), REGISTERED)
    assert answer(with_another_token) == (KEEP, RULED_OUT, "K1")


def test_only_what_was_not_built_is_left_out_of_what_has_to_be_beaten() -> None:
    arms = flat(**BASE, K1T=20.5, K3=20.0)
    assert run(arms).outcome == KEEP
    absent = run(arms, not_built={"K1T": "no compiler"})
    assert absent.outcome == ADOPT
    assert "K1T" not in {one["incumbent"] for one in absent.data["language"]["against"]}
    assert doubted("K1T", "rows", arms).outcome == INCONCLUSIVE


def test_an_incumbent_without_conformance_is_in_doubt() -> None:
    events = without(trial(flat(**BASE, K3=11.0)), stage="conformance", candidate="A1")
    found = decide(events, REGISTERED).data["language"]
    assert found["outcome"] == INCONCLUSIVE
    assert (
        "A1, which a challenger has to beat, is in doubt: conformance: not run" in found["reason"]
    )
    gaps = trial(flat(**BASE, K3=11.0))
    gaps.loc[(gaps["stage"] == "conformance") & (gaps["candidate"] == "A1"), "value"] = math.nan
    assert "no test was passed" in decide(gaps, REGISTERED).data["language"]["reason"]


def test_logits_past_the_declared_tolerance_are_out() -> None:
    verdict = run(flat(**BASE, K3=5.0, K4=22.0), difference={"K3": 0.5})
    assert verdict.outcome == KEEP
    (reason, *_) = verdict.data["eligibility"]["K3"]
    assert reason["why"] == "parity" and "declared tolerance" in reason["text"]
    assert run(flat(**BASE, K3=5.0, K4=22.0), difference={"A1": 0.5}).outcome == INCONCLUSIVE


@pytest.mark.parametrize("difference", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_out_and_the_verdict_is_written(difference: float) -> None:
    verdict = run(flat(**BASE, K3=5.0, K4=22.0), difference={"K3": difference})
    assert verdict.outcome == KEEP
    assert f"a logit differs by {difference:.4g}" in verdict.data["eligibility"]["K3"][0]["text"]
    found = json.loads(verdict.to_json())["parity"]["candidates"]["K3"]
    assert found["max_abs_logit_difference"] is None


def test_one_nan_among_the_differences_is_not_lost() -> None:
    metric = "parity/max_abs_logit_difference"
    late = row("parity", metric, candidate="K3", index=24, value=math.nan)
    verdict = decide(with_rows(trial(flat(**BASE, K3=5.0, K4=22.0)), [late]), REGISTERED)
    assert "a logit differs by nan" in verdict.data["eligibility"]["K3"][0]["text"]


def test_without_evidence_nobody_is_in_parity() -> None:
    events = trial(flat(**BASE, K3=5.0, K4=22.0))
    bare = events[(events["stage"] != "parity") | (events["metric"] == "attempt/complete")]
    verdict = decide(bare, REGISTERED)
    assert verdict.outcome == INCONCLUSIVE
    assert verdict.store is None
    assert {"parity"} == {reason["why"] for reason in verdict.data["eligibility"]["A1"]}


def test_reasons_are_kinds_with_data() -> None:
    reasons = Reasons({"K1": [Reason(Why.LACKS, "pool")], "K3": [Reason(Why.OUTPUT, "wrong")]})
    assert not reasons.eligible("K1") and reasons.built("K1") and not reasons.doubts("K1")
    assert [str(reason) for reason in reasons.doubts("K3")] == ["output: wrong"]
    assert reasons.as_json()["K3"] == [{"why": "output", "text": "wrong"}]


# --------------------------------------------------------------------------------------------------
# Rule 3: what has to be there


@pytest.mark.parametrize("stage", NEEDED)
def test_a_stage_without_a_complete_attempt_decides_nothing(stage: str) -> None:
    events = without(trial(flat(**BASE, K3=11.0)), stage=stage, metric="attempt/complete")
    verdict = decide(events, REGISTERED)
    assert verdict.outcome == INCONCLUSIVE
    assert verdict.data["language"]["reason"] == f"stage {stage} has no complete attempt"
    assert (verdict.store, verdict.decided) == (None, False)
    assert verdict.data["run"]["reason"] == f"stage {stage} has no complete attempt"


def test_a_stage_that_was_not_run_at_all_is_named_too() -> None:
    events = trial(flat(**BASE, K3=11.0))
    verdict = decide(events[events["stage"] != "aa"], REGISTERED)
    assert "stage aa has no complete attempt" in verdict.data["language"]["reason"]


@pytest.mark.parametrize(
    ("context", "blocks"), [(4096, 1), *((context, BLOCKS - 1) for context in CONTEXTS)]
)
def test_fewer_valid_blocks_than_registered_decide_nothing(context: int, blocks: int) -> None:
    arms = {n: {**c, context: c[context][:blocks]} for n, c in flat(**BASE, K3=11.0).items()}
    verdict = run(arms)
    assert answer(verdict) == (INCONCLUSIVE, None, None)
    said = f"context {context} can't be decided: {blocks} valid blocks; {BLOCKS} are registered"
    assert verdict.data["language"]["reason"] == said
    assert verdict.store is None


def test_a_primary_cell_that_was_not_extended_as_its_plan_asks_decides_nothing() -> None:
    # (t s / 0.015)² = (2.365 × 0.02138 / 0.015)² = 11.4 blocks are asked for by a spread of 2.1%.
    k3 = {n: at_contexts(up_and_down(11.0, 0.02, n), 11.0, 11.0) for n in (8, 11, 12)}
    assert math.ceil((t(7) * spread(0.02, 8) / 0.015) ** 2) == 12
    for blocks, outcome in ((8, INCONCLUSIVE), (11, INCONCLUSIVE), (12, ADOPT)):
        arms = {**longer(flat(**BASE), blocks), "K3": k3[blocks]}
        verdict = run(arms)
        assert verdict.outcome == outcome
        if outcome == INCONCLUSIVE:
            assert f"{blocks} valid blocks; 12 are registered" in verdict.data["language"]["reason"]


@pytest.mark.parametrize(
    ("bad", "name", "context"),
    [
        *((bad, "K3", 4096) for bad in (math.nan, 0.0, -1.0, math.inf)),
        (math.nan, "K1", 4096),
        (0.0, "A1", 512),
    ],
)
def test_a_time_that_is_no_positive_number_is_inconclusive_never_a_silent_no(
    bad: float, name: str, context: int
) -> None:
    arms = flat(**BASE, K3=11.0)
    arms[name][context][3] = bad
    verdict = run(arms)
    assert answer(verdict) == (INCONCLUSIVE, None, None)
    assert f" at {context}: log ratios hold nan" in verdict.data["language"]["reason"]
    json.loads(verdict.to_json())


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0])
def test_a_bad_step_does_not_hide_in_a_blocks_total(bad: float) -> None:
    steps = dict.fromkeys(range(1, 8), 11.0) | {8: bad}
    events = without(trial(flat(**BASE, K3=11.0)), stage="m2", context=4096, block=2)
    rows = []
    for name, ms in {**BASE, "K3": 11.0}.items():
        own = steps if name == "K3" else dict.fromkeys(range(1, 9), ms)
        rows += arm_rows(name, own, context=4096, block=2)
    assert decide(with_rows(events, rows), REGISTERED).outcome == INCONCLUSIVE


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_missing_context_is_inconclusive_never_a_win(context: int) -> None:
    arms = {n: {c: b for c, b in own.items() if c != context} for n, own in flat(**BASE).items()}
    verdict = run(arms)
    assert verdict.outcome == INCONCLUSIVE
    assert f"context {context}" in verdict.data["language"]["reason"]


@pytest.mark.parametrize(("context", "name"), [(4096, "K3"), (512, "A1"), (16384, "K3")])
def test_an_arm_missing_from_one_context_is_inconclusive(context: int, name: str) -> None:
    arms = flat(**BASE, K3=11.0)
    del arms[name][context]
    verdict = run(arms)
    assert verdict.outcome == INCONCLUSIVE
    pair = "K3 against K0" if name == "K3" else "A1 against K1"
    said = verdict.data["language"]["reason"]
    assert f"{pair} at {context}: 0 valid blocks; {BLOCKS} are registered" in said


def test_an_arm_missing_from_one_block_is_inconclusive_never_cut_to_fit() -> None:
    arms = longer(flat(**BASE, K3=11.0), 12)
    arms["K0"][4096] = up_and_down(100.0, 0.001, 12)
    arms["K1"][4096] = up_and_down(22.0, 0.02, 12)  # asks for twelve
    arms["K3"][4096] = arms["K3"][4096][:11]  # eight would be enough to make an interval
    verdict = run(arms)
    assert verdict.outcome == INCONCLUSIVE
    assert "blocks [11] lack one of them; nothing is cut" in verdict.data["language"]["reason"]


@pytest.mark.parametrize("metric", ["cell/lost", "cell/skipped"])
@pytest.mark.parametrize(("context", "outcome"), [(16384, INCONCLUSIVE), (99, ADOPT)])
def test_a_cell_that_was_given_up_is_said(metric: str, context: int, outcome: str) -> None:
    why = "9 runs of its blocks were void; at most 8 are allowed"
    events = with_rows(trial(flat(**BASE, K3=11.0)), [row("m2", metric, context=context, text=why)])
    verdict = decide(events, REGISTERED)
    assert verdict.outcome == outcome
    if outcome == INCONCLUSIVE:
        said = f"context {context} can't be decided: {why}"
        assert said == verdict.data["language"]["reason"] == verdict.data["run"]["reason"]
    skipped = [{"stage": "m2", "cell": f"{context}x1x1", "reason": why}]
    assert verdict.data["skipped"] == (skipped if metric == "cell/skipped" else [])


def test_other_binaries_than_those_that_passed_are_no_trial() -> None:
    parts = [("conformance", "a" * 64), ("m2", "a" * 64), ("m1", "b" * 64)]
    rows = [row(stage, "x", binary_sha256=binary) for stage, binary in parts]
    events = trial(flat(**BASE, K3=11.0))
    found = decide(with_rows(events, rows), REGISTERED)
    assert (found.outcome, found.store) == (INCONCLUSIVE, None)
    assert "m1 bbbbbbbbbbbb" in found.data["language"]["reason"]
    assert decide(with_rows(events, rows[:2]), REGISTERED).outcome == ADOPT


# --------------------------------------------------------------------------------------------------
# Attempts, protocols, order


def test_the_first_complete_attempt_decides_and_all_are_counted() -> None:
    first = trial(flat(**BASE, K3=22.0), missing=LACKS)
    second = trial(flat(**BASE, K3=11.0), missing=LACKS)
    second = second[second["stage"] == "m2"].assign(attempt=2)
    verdict = decide(pd.concat([first, second], ignore_index=True), REGISTERED)
    assert verdict.outcome == KEEP
    assert verdict.data["attempts"]["m2"] == {"made": 2, "complete": 2, "decided_by": 1}


def test_an_incomplete_attempt_does_not_decide() -> None:
    first = trial(flat(**BASE, K3=22.0), missing=LACKS)
    first = without(first, stage="m2", metric="attempt/complete")
    second = trial(flat(**BASE, K3=11.0), missing=LACKS)
    second = second[second["stage"] == "m2"].assign(attempt=2)
    verdict = decide(pd.concat([first, second], ignore_index=True), REGISTERED)
    assert verdict.outcome == ADOPT
    assert verdict.data["attempts"]["m2"] == {"made": 2, "complete": 1, "decided_by": 2}


def test_events_of_another_protocol_are_refused() -> None:
    other = copy.deepcopy(REGISTERED)
    other["sampling"]["half_width"] = 0.02
    with pytest.raises(MixedProtocol, match="never mixes"):
        decide(trial(flat(**BASE)), other)


def test_the_verdict_does_not_depend_on_the_order_of_rows() -> None:
    rng = np.random.default_rng(3)
    arms = flat(**BASE, K3=11.0)
    for contexts in arms.values():
        for context, own in contexts.items():
            contexts[context] = list(np.array(own) * np.exp(rng.normal(0, 0.005, len(own))))
    events = trial(arms, missing=LACKS)
    shuffled = events.sample(frac=1.0, random_state=5)
    verdict = decide(events, REGISTERED)
    assert verdict.data["error_rates"]["arrangements"]
    assert verdict.to_json() == decide(shuffled, REGISTERED).to_json()


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


# --------------------------------------------------------------------------------------------------
# The registration


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"page_tokens": 0}, "page_tokens"),
        ({"surprise": 1}, "surprise"),
        ({"candidates": ["K1"]}, "K3"),
        ({"cells": []}, "cells"),
        (
            {"known_answers": {**REGISTERED["known_answers"], "candidate": "K9"}},
            "known_answers.candidate: 'K9'",
        ),
        ({"parity": {**REGISTERED["parity"], "baseline": "K9"}}, "parity.baseline: 'K9'"),
        ({"parity": {**REGISTERED["parity"], "comparison": "K9"}}, "parity.comparison: 'K9'"),
        ({"parity": {**REGISTERED["parity"], "slow": ["K9"]}}, "parity.slow: 'K9'"),
        (
            {"hypotheses": [{"id": "X1", "claim": "fast", "from": "K1", "to": "TwoPas"}]},
            "hypotheses.X1: 'TwoPas' is not among candidates",
        ),
        (
            {"sampling": {**REGISTERED["sampling"], "pairs": [["K3", "K9"]]}},
            "sampling.pairs.0: 'K9'",
        ),
        ({"sampling": {**REGISTERED["sampling"], "most": 7}}, "blocks 8 and most 7"),
        (
            {"decision": {**REGISTERED["decision"], "reference": "K2"}},
            "decision.reference: 'K2' is not among incumbents",
        ),
        ({"conformance": {"page_tokens": [16]}}, "conformance.page_tokens: 32 is measured"),
        ({"cells": [{**REGISTERED["cells"][0], "threads": "all"}]}, "only with role 'extra'"),
    ],
)
def test_a_bad_protocol_is_named(change: dict, names: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(protocol.ProtocolError, match=names):
        protocol.check({**REGISTERED, **change})


@pytest.mark.parametrize(
    ("version", "by"), [(1, "releases before 2026-11"), (2, "up to commit 17f3a9a")]
)
def test_a_protocol_of_an_older_form_names_who_decides_it(version: int, by: str) -> None:
    with pytest.raises(protocol.ProtocolError, match=rf"version {version} .*{by}.*source_commit"):
        protocol.check({**REGISTERED, "version": version}, "protocol.json")


# --------------------------------------------------------------------------------------------------
# Rule 6: which cold store


def cold_rows(
    z1: list[float], z2: list[float], recovered: float = 1.0, fsyncs: tuple[float, ...] = (1.0, 1.0)
) -> list[Any]:
    """Restore times by block, one crash round of each store, and its fsyncs a batch."""
    at = {"context": REGISTERED["cold"]["prefix_tokens"]}
    rows = [
        row("cold_tier", "cold/restore_cold_ms", candidate=name, block=block, value=ms, **at)
        for name, times in (("Z1", z1), ("Z2", z2))
        for block, ms in enumerate(times)
    ]
    for name, value in (("Z1", 1.0), ("Z2", recovered)):
        rows.append(
            row("cold_tier", "cold/crash_recovered", candidate=name, value=value, text="killed")
        )
    for name, value in zip(("Z1", "Z2"), fsyncs):
        rows.append(row("cold_tier", "cold/fsyncs_per_batch", candidate=name, value=value))
    return [*rows, row("cold_tier", "attempt/complete", value=1.0)]


def cold(rows: list[Any]) -> Any:
    return decide(with_rows(trial(flat(**BASE)), rows), REGISTERED).data["cold"]


@pytest.mark.parametrize(
    ("z1", "z2", "adopted", "tie"),
    [
        ([200.0] * 6, [100.0] * 6, "Z2", False),
        ([100.0] * 6, [200.0] * 6, "Z1", False),
        ([100.0] * 6, [100.0] * 6, "Z2", True),
        ([101.0, 120.0] * 3, [100.0] * 6, "Z2", True),
    ],
)
def test_the_cold_store_that_restores_faster_is_adopted(
    z1: list[float], z2: list[float], adopted: str, tie: bool
) -> None:
    found = cold(cold_rows(z1, z2))
    assert (found["adopted"], found["index"]) == (adopted, "RocksDB")
    assert ("close to a tie" in found["reason"]) == tie
    ratio = math.exp(np.mean(np.log(z1)) - np.mean(np.log(z2)))
    assert found["z1_over_z2"]["ratio"] == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recovered": 0.0}, "Z2 broke a promise after: killed"),
        ({"recovered": math.nan}, "Z2 broke a promise after: killed"),
        ({"fsyncs": (1.0, 2.0)}, "fsyncs per batch differ"),
        ({"fsyncs": ()}, "fsyncs per batch were not counted"),
        ({"fsyncs": (1.0,)}, "fsyncs per batch were not counted"),
    ],
)
def test_no_cold_store_is_adopted_unless_durability_is_shown_to_be_equal(
    changed: dict[str, Any], said: str
) -> None:
    found = cold(cold_rows([200.0] * 6, [100.0] * 6, **changed))
    assert found["adopted"] is None
    assert said in found["reason"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "stage cold_tier has no complete attempt"),
        (cold_rows([200.0] * 6, [100.0] * 6)[:-1], "stage cold_tier has no complete attempt"),
        (cold_rows([200.0] * 5, [100.0] * 5), "5 blocks; 6 are registered"),
        (cold_rows([200.0] * 6, [100.0] * 5), "blocks [5] have one arm only"),
        (cold_rows([200.0] * 5 + [0.0], [100.0] * 6), "block 5 has 0.0"),
        (
            [r for r in cold_rows([2.0] * 6, [1.0] * 6) if r["metric"] != "cold/crash_recovered"],
            "Z1: no crash evidence",
        ),
    ],
)
def test_what_was_not_measured_as_registered_decides_no_cold_store(
    rows: list[Any], said: str
) -> None:
    found = cold(rows)
    assert found["adopted"] is None
    assert said in found["reason"]
