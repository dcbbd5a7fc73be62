"""What a verdict is made from: doubts about an arm, what has to be there, attempts and protocols."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from decided import BASE, LACKS, answer, longer, run, spread, t, up_and_down
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

from kvtrial.decision.eligibility import Reason, Reasons, Why
from kvtrial.decision.language import RULED_OUT
from kvtrial.decision.verdict import (
    ADOPT,
    INCONCLUSIVE,
    KEEP,
    NEEDED,
    MixedProtocol,
    Verdict,
    decide,
)

AT = {"context": 4096}


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
