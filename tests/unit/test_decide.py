"""The rule of the specification, branch by branch, on tables made by hand: which store and which language."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
from decided import BASE, LACKS, answer, longer, run, spread, t, up_and_down
from trial_events import (
    BLOCKS,
    REGISTERED,
    at_contexts,
    flat,
    row,
    trial,
    with_rows,
)

from kvtrial.decision import language
from kvtrial.decision.eligibility import Reasons
from kvtrial.decision.language import NOT_SHOWN, RULED_OUT
from kvtrial.decision.verdict import (
    ADOPT,
    INCONCLUSIVE,
    KEEP,
    Verdict,
    decide,
)
from kvtrial.measure.plan import SamplingPlan

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
