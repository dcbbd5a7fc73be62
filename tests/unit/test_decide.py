"""The rule of the specification, branch by branch, on tables made by hand."""

from __future__ import annotations

import copy
import io
import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from rich.console import Console
from trial_events import REGISTERED, flat, row, trial, with_rows

from kvtrial.decision.verdict import ADOPT, INCONCLUSIVE, KEEP, MixedProtocol, Verdict, decide
from kvtrial.run import protocol
from kvtrial.show.plots import forest, waterfall
from kvtrial.show import summary
from kvtrial.show.terminal import print_verdict

LACKS = {"K0": "branch, holes, pool"}
BASE = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 22.0, "K2": 15.0}


def run(step_ms: dict, **kw) -> Verdict:  # type: ignore[no-untyped-def,type-arg]
    return decide(trial(step_ms, missing=LACKS, **kw), REGISTERED)


@pytest.mark.parametrize(
    ("k3_ms", "outcome", "adopted"),
    [
        (22.0 / 1.10, ADOPT, "K3"),  # exactly 10% adopts
        (22.0 / 1.0999999, KEEP, "K1"),
        (22.0 / 1.30, ADOPT, "K3"),
        (22.0, KEEP, "K1"),  # equal arms keep the incumbent
        (30.0, KEEP, "K1"),
    ],
)
def test_the_edge_of_adoption(k3_ms: float, outcome: str, adopted: str) -> None:
    verdict = run(flat(**BASE, K3=k3_ms, K4=25.0))
    assert (verdict.outcome, verdict.adopted) == (outcome, adopted)


@pytest.mark.parametrize(("ratio", "outcome"), [(0.97, ADOPT), (0.969999, KEEP), (0.99, ADOPT)])
@pytest.mark.parametrize("veto_context", [512, 16384])
def test_the_edge_of_the_veto(ratio: float, outcome: str, veto_context: int) -> None:
    k3 = {4096: [11.0] * 12, 512: [11.0] * 6, 16384: [11.0] * 6}
    k3[veto_context] = [22.0 / ratio] * 6
    verdict = run(flat(**BASE, K3=k3))
    assert verdict.outcome == outcome
    assert ("vetoed" in verdict.data["hot"]["reason"]) == (outcome == KEEP)


def test_a_veto_passed_without_its_interval_clearing_is_said() -> None:
    # Mean log ratio 0 at 512 with a wide interval: the point estimate passes, the interval does not.
    wide = [22.0 * math.exp(x) for x in (0.1, -0.1, 0.1, -0.1, 0.1, -0.1)]
    verdict = run(flat(**BASE, K3={4096: [11.0] * 12, 512: wide, 16384: [11.0] * 6}))
    assert verdict.outcome == ADOPT
    assert "passes the veto against K1 at 512" in verdict.data["hot"]["reason"]


def test_a_good_estimate_with_a_wide_interval_does_not_adopt() -> None:
    noisy = [22.0 / 1.2 * math.exp(x) for x in [0.2, -0.2] * 6]
    verdict = run(flat(**BASE, K3={4096: noisy, 512: [11.0] * 6, 16384: [11.0] * 6}))
    assert verdict.outcome == KEEP
    contrast = next(
        c
        for c in verdict.data["hot"]["contrasts"]
        if (c["challenger"], c["incumbent"], c["context"]) == ("K3", "K1", 4096)
    )
    assert contrast["ratio"] == pytest.approx(1.2, rel=1e-9)
    assert contrast["ci95"][0] < 1.1
    assert contrast["n_blocks"] == 12


def test_every_incumbent_counts_not_only_k1() -> None:
    verdict = run(flat(**{**BASE, "A2": 20.5}, K3=20.0))
    assert verdict.outcome == KEEP
    assert "against A2 at 4096" in verdict.data["hot"]["reason"]


def test_a_challenger_has_to_beat_k1t_too() -> None:
    verdict = run(flat(**BASE, K1T=20.5, K3=20.0))
    assert (verdict.outcome, verdict.adopted) == (KEEP, "K1T")
    assert "against K1T (layouts differ) at 4096" in verdict.data["hot"]["reason"]


def test_keep_adopts_the_best_arm_that_can_win() -> None:
    # K0 is fastest here but lacks required capabilities: it is compared with, and can't win.
    verdict = run(flat(K0=10.0, A1=80.0, A2=21.0, K1=22.0, K3=22.0))
    assert (verdict.outcome, verdict.adopted) == (KEEP, "A2")
    assert verdict.data["eligibility"]["K0"] == ["lacks: branch, holes, pool"]


def test_the_fixed_sequence_ends_at_the_first_challenger_in_the_trial() -> None:
    verdict = run(flat(**BASE, K3=22.0, K4=10.0))
    assert verdict.outcome == KEEP
    assert "K4, K3T not tested" in verdict.data["hot"]["reason"]


def test_the_next_challenger_is_tested_when_the_first_is_out() -> None:
    verdict = run(flat(**BASE, K4=10.0), not_built={"K3": "rustc was not found"})
    assert (verdict.outcome, verdict.adopted) == (ADOPT, "K4")
    assert verdict.data["eligibility"]["K3"] == ["not built: rustc was not found"]


def test_without_clang_its_own_column_is_missing_and_no_more() -> None:
    arms = flat(**BASE, K1C=21.0, K3=11.0, K4=12.0)
    whole = run(arms)
    arms.pop("K1C")
    without = run(arms, not_built={"K1C": "clang was not found"})
    assert (whole.outcome, without.outcome) == (ADOPT, ADOPT)
    assert without.data["eligibility"]["K1C"] == ["not built: clang was not found"]
    assert without.data["hot"]["reason"] == whole.data["hot"]["reason"]
    assert without.data["hot"]["contrasts"] == whole.data["hot"]["contrasts"]
    told = [{h["id"] for h in verdict.data["hypotheses"]} for verdict in (whole, without)]
    assert told[0] - told[1] == {"H6c", "H6l"}


def test_the_transposed_rust_arm_is_last_in_the_sequence() -> None:
    out = {"K3": "no pool", "K4": "no kernel"}
    verdict = run(flat(**BASE, K1T=11.0, K3T=10.0), not_built=out)
    assert (verdict.outcome, verdict.adopted) == (ADOPT, "K3T")  # exactly 10% over its twin
    slower = run(flat(**BASE, K1T=10.9, K3T=10.0), not_built=out)
    assert (slower.outcome, slower.adopted) == (KEEP, "K1T")
    assert "K3T: against K1T at 4096" in slower.data["hot"]["reason"]
    differ = {
        (c["challenger"], c["incumbent"]): c["layouts_differ"]
        for c in slower.data["hot"]["contrasts"]
    }
    assert (differ["K3T", "K1T"], differ["K3T", "K1"]) == (False, True)
    hypotheses = {h["id"]: h["layouts_differ"] for h in slower.data["hypotheses"]}
    assert (hypotheses["H3t"], hypotheses["H6t"]) == (True, False)


def test_without_rust_cython_stays() -> None:
    verdict = run(flat(**BASE), not_built={"K3": "no rustc", "K4": "no rustc"})
    assert (verdict.outcome, verdict.adopted) == (KEEP, "K1")
    assert "no rustc" in verdict.data["hot"]["reason"]


def test_outcomes_retire_what_the_rule_says() -> None:
    assert run(flat(**BASE, K3=11.0)).data["hot"]["retired"] == ["K0"]
    assert run(flat(**BASE, K3=11.0)).data["hot"]["reference"] == "K1"
    assert run(flat(**BASE, K3=22.0)).data["hot"]["retired"] == ["K3", "K4", "K3T"]


def test_a_failed_conformance_test_makes_a_fast_arm_ineligible_and_listed() -> None:
    verdict = run(
        flat(**BASE, K3=5.0, K4=22.0), failed_conformance={"K3": "KvBranchCopyOnWrite@P32"}
    )
    assert verdict.outcome == KEEP
    assert verdict.data["eligibility"]["K3"] == ["conformance: KvBranchCopyOnWrite@P32 failed"]
    assert any(arm["candidate"] == "K3" for arm in verdict.data["hot"]["arms"])


def test_logits_past_the_declared_tolerance_are_ineligible() -> None:
    verdict = run(flat(**BASE, K3=5.0, K4=22.0), difference={"K3": 0.5})
    assert verdict.outcome == KEEP
    assert "declared tolerance" in verdict.data["eligibility"]["K3"][0]


@pytest.mark.parametrize("difference", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_ineligible_and_the_verdict_is_written(
    difference: float,
) -> None:
    verdict = run(flat(**BASE, K3=5.0, K4=22.0), difference={"K3": difference})
    assert verdict.outcome == KEEP
    assert f"a logit differs by {difference:.4g}" in verdict.data["eligibility"]["K3"][0]
    found = json.loads(verdict.to_json())["parity"]["candidates"]["K3"]
    assert found["max_abs_logit_difference"] is None


def test_one_nan_among_the_differences_is_not_lost() -> None:
    table = trial(flat(**BASE, K3=5.0, K4=22.0))
    metric = "parity/max_abs_logit_difference"
    late = row("parity", metric, candidate="K3", index=24, value=math.nan)
    verdict = decide(with_rows(table, [late]), REGISTERED)
    assert "a logit differs by nan" in verdict.data["eligibility"]["K3"][0]


def test_without_evidence_nobody_is_in_parity() -> None:
    table = trial(flat(**BASE, K3=5.0, K4=22.0))
    verdict = decide(table[table["stage"] != "parity"], REGISTERED)
    assert verdict.outcome == INCONCLUSIVE
    assert "parity: not shown at context 512" in verdict.data["eligibility"]["K3"][1]


@pytest.mark.parametrize("context", [512, 4096, 16384])
def test_a_missing_context_is_inconclusive_never_a_win(context: int) -> None:
    arms = flat(**BASE, K3=11.0)
    for contexts in arms.values():
        contexts.pop(context)
    verdict = run(arms)
    assert (verdict.outcome, verdict.adopted) == (INCONCLUSIVE, None)
    assert str(context) in verdict.data["hot"]["reason"]


@pytest.mark.parametrize("context", [512, 4096, 16384])
def test_a_challenger_missing_from_one_context_is_inconclusive(context: int) -> None:
    arms = flat(**BASE, K3=11.0)
    arms["K3"] = {c: b for c, b in arms["K3"].items() if c != context}
    assert run(arms).outcome == INCONCLUSIVE


@pytest.mark.parametrize("blocks", [1, 2])
def test_fewer_than_three_blocks_is_inconclusive(blocks: int) -> None:
    arms = {n: {c: b[:blocks] for c, b in cs.items()} for n, cs in flat(**BASE, K3=11.0).items()}
    assert run(arms).outcome == INCONCLUSIVE


def test_nan_is_inconclusive_with_its_reason_never_a_silent_no() -> None:
    k3 = {4096: [11.0] * 11 + [math.nan], 512: [11.0] * 6, 16384: [11.0] * 6}
    verdict = run(flat(**BASE, K3=k3))
    assert verdict.outcome == INCONCLUSIVE


@pytest.mark.parametrize("name", ["A1", "K1"])
def test_nan_without_a_challenger_is_inconclusive_too(name: str) -> None:
    arms = flat(**BASE)
    arms[name][4096] = [math.nan, *arms[name][4096][1:]]
    verdict = run(arms, not_built={"K3": "no rustc", "K4": "no rustc"})
    assert verdict.outcome == INCONCLUSIVE
    assert (
        f"{name} has a time that is not a positive, finite number" in verdict.data["hot"]["reason"]
    )


def test_contradicting_contexts_keep() -> None:
    k3 = {4096: [11.0] * 12, 512: [60.0] * 6, 16384: [11.0] * 6}
    assert run(flat(**BASE, K3=k3)).outcome == KEEP


def test_a_void_block_is_left_out_whole_and_the_cap_breaks_the_gate() -> None:
    verdict = run(flat(**BASE, K3=11.0), bandwidth={(4096, 3): (10.0, 12.0)})
    assert verdict.outcome == INCONCLUSIVE
    assert "read bandwidth moved by 20.0%" in verdict.data["hot"]["reason"]
    assert verdict.data["gates"]["m2"]["4096x1x1"] == {"valid": 11, "void": 1}
    assert run(flat(**BASE, K3=11.0), bandwidth={(4096, 3): (10.0, 11.4)}).outcome == ADOPT


def test_a_void_trial_gives_way_to_the_next_trial_of_the_block() -> None:
    events = trial(flat(**BASE, K3=11.0), missing=LACKS, bandwidth={(4096, 3): (10.0, 12.0)})
    again = events[(events["stage"] == "m2") & (events["context"] == 4096) & (events["block"] == 3)]
    again = again.assign(trial=1)
    again.loc[again["metric"] == "probe/read_gb_per_s", "value"] = 10.0
    verdict = decide(pd.concat([events, again], ignore_index=True), REGISTERED)
    assert verdict.outcome == ADOPT
    assert verdict.data["gates"]["m2"]["4096x1x1"] == {"valid": 12, "void": 1}


def test_the_first_complete_attempt_decides_and_all_are_counted() -> None:
    first = trial(flat(**BASE, K3=22.0), missing=LACKS)
    second = trial(flat(**BASE, K3=11.0), missing=LACKS)
    second = second[second["stage"] == "m2"].assign(attempt=2)
    verdict = decide(pd.concat([first, second], ignore_index=True), REGISTERED)
    assert verdict.outcome == KEEP
    assert verdict.data["attempts"]["m2"] == {"made": 2, "complete": 2, "decided_by": 1}


def test_an_incomplete_attempt_does_not_decide() -> None:
    first = trial(flat(**BASE, K3=22.0), missing=LACKS)
    first = first[~((first["stage"] == "m2") & (first["metric"] == "attempt/complete"))]
    second = trial(flat(**BASE, K3=11.0), missing=LACKS)
    second = second[second["stage"] == "m2"].assign(attempt=2)
    verdict = decide(pd.concat([first, second], ignore_index=True), REGISTERED)
    assert verdict.outcome == ADOPT


def test_events_of_another_protocol_are_refused() -> None:
    other = copy.deepcopy(REGISTERED)
    other["decode_steps"] = 65
    with pytest.raises(MixedProtocol, match="never mixes"):
        decide(trial(flat(**BASE)), other)


def test_the_verdict_does_not_depend_on_the_order_of_rows() -> None:
    events = trial(flat(**BASE, K3=11.0), missing=LACKS)
    shuffled = events.sample(frac=1.0, random_state=5)
    assert decide(events, REGISTERED).to_json() == decide(shuffled, REGISTERED).to_json()
    json.loads(decide(events, REGISTERED).to_json())


def test_hypotheses_are_ratios_of_the_registered_arms() -> None:
    verdict = run(flat(**BASE, K3=11.0))
    h1 = next(h for h in verdict.data["hypotheses"] if h["id"] == "H1" and h["context"] == 4096)
    assert h1["ratio"] == pytest.approx(100 / 80, rel=1e-9)
    h4 = next(h for h in verdict.data["hypotheses"] if h["id"] == "H4" and h["context"] == 4096)
    assert h4["ratio"] == pytest.approx(22 / 15, rel=1e-9)


def test_arms_carry_their_latencies_with_intervals_over_blocks() -> None:
    # Logs 0.1, 0.2, 0.3 a block: t(0.975, 2) = 4.302652729911275, standard error 0.1 / sqrt(3).
    steps = {4096: [math.exp(x) for x in (0.1, 0.2, 0.3)], 512: [1.0] * 3, 16384: [1.0] * 2}
    verdict = run(flat(K1=steps, K3=steps))
    arms = {(a["candidate"], a["context"]): a for a in verdict.data["hot"]["arms"]}
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    for quantile in ("p50", "p95"):  # one step a block
        assert arms["K1", 4096][f"step_ms_{quantile}"] == pytest.approx(math.exp(0.2), rel=1e-9)
        assert arms["K1", 4096][f"step_ms_{quantile}_ci95"] == pytest.approx(
            [math.exp(0.2 - half), math.exp(0.2 + half)], rel=1e-9
        )
        assert arms["K1", 512][f"step_ms_{quantile}_ci95"] == [1.0, 1.0]
        assert arms["K1", 16384][f"step_ms_{quantile}_ci95"] is None  # two blocks


def test_tokens_per_second_are_total_over_total_and_an_extended_cell_has_its_wider_interval() -> (
    None
):
    # 18 blocks, 12 of which asked for the others; all the spread is in the first.
    steps = {4096: [10.0, 20.0] * 6 + [15.0] * 6, 512: [1.0] * 6, 16384: [1.0] * 6}
    arms = {
        (a["candidate"], a["context"]): a for a in run(flat(K1=steps, K3=steps)).data["hot"]["arms"]
    }
    assert arms["K1", 4096]["tokens_per_s"] == pytest.approx(18 / (18 * 0.015), rel=1e-9)
    logs = -np.log(np.array(steps[4096]) / 1e3)
    # t(0.975, 11) = 2.200985160082949
    half = 2.200985160082949 * logs[:12].std(ddof=1) / math.sqrt(18)
    assert arms["K1", 4096]["tokens_per_s_ci95"] == pytest.approx(
        [math.exp(logs.mean() - half), math.exp(logs.mean() + half)], rel=1e-9
    )


def test_a_drift_of_one_arm_is_reported_and_voids_nothing() -> None:
    k3 = [11.0 * math.exp(0.01 * b + 0.002 * (-1) ** b) for b in range(12)]
    verdict = run(flat(**BASE, K3={4096: k3, 512: [11.0] * 6, 16384: [11.0] * 6}))
    assert verdict.outcome == ADOPT
    drift = {
        c["context"]: c["drift_p"]
        for c in verdict.data["hot"]["contrasts"]
        if (c["challenger"], c["incumbent"]) == ("K3", "K1")
    }
    assert drift[4096] < 1e-6
    assert drift[512] is None  # constant ratios have no slope to test


def test_a_value_that_is_not_finite_shows_as_missing_at_the_terminal() -> None:
    k3 = {4096: [11.0] * 11 + [math.nan], 512: [11.0] * 6, 16384: [11.0] * 6}
    console = Console(width=120, record=True, file=io.StringIO())
    print_verdict(run(flat(**BASE, K3=k3)).data, console)
    assert "Error rates were not simulated" in console.export_text()


def test_a_reduced_precision_profile_needs_parity() -> None:
    assert run(flat(**BASE)).data["profiles"]["K2"]["default_allowed"]
    labelled = run(flat(**BASE, K2T=14.0)).data["profiles"]
    assert not labelled["K2"]["layouts_differ"] and labelled["K2T"]["layouts_differ"]
    broken = run(flat(**BASE), difference={"K2": 5.0}).data["profiles"]["K2"]
    assert not broken["default_allowed"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"decode_steps": 0}, "decode_steps"),
        ({"surprise": 1}, "surprise"),
        ({"candidates": ["K1"]}, "K3"),
        ({"cells": []}, "cells"),
        ({"aa": {"candidate": "K9", "blocks": 6}}, "aa.candidate: 'K9'"),
        ({"parity": {**REGISTERED["parity"], "baseline": "K9"}}, "parity.baseline: 'K9'"),
        ({"parity": {**REGISTERED["parity"], "comparison": "K9"}}, "parity.comparison: 'K9'"),
        ({"parity": {**REGISTERED["parity"], "slow": ["K9"]}}, "parity.slow: 'K9'"),
        (
            {"hypotheses": [{"id": "X1", "claim": "fast", "from": "K1", "to": "TwoPas"}]},
            "hypotheses.X1: 'TwoPas' is not among candidates",
        ),
        (
            {
                "decision": {
                    **REGISTERED["decision"],
                    "precision": {"from": "K1", "to": "K9", "half_width": 0.03},
                }
            },
            "decision.precision: 'K9'",
        ),
        ({"conformance": {"page_tokens": [16]}}, "conformance.page_tokens: 32 is measured"),
        ({"cells": [{**REGISTERED["cells"][0], "max_blocks": 11}]}, "blocks 12 and max_blocks 11"),
        ({"cells": [{**REGISTERED["cells"][0], "threads": "all"}]}, "only with role 'extra'"),
    ],
)
def test_a_bad_protocol_is_named(change: dict, names: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(protocol.ProtocolError, match=names):
        protocol.check({**REGISTERED, **change})


def test_a_protocol_of_an_older_form_names_who_reads_it() -> None:
    with pytest.raises(protocol.ProtocolError, match=r"version 1; .* version 2: .*source_commit"):
        protocol.check({**REGISTERED, "version": 1}, "protocol.json")


@pytest.mark.parametrize("name", ["K1C", "C0"])
def test_a_control_is_listed_and_never_wins_nor_is_compared_with(name: str) -> None:
    """K1 built by another compiler, and pages in RocksDB: measured, never a Cython arm."""
    registration = copy.deepcopy(REGISTERED)
    registration.pop("control")  # here it takes part in the pairs
    registration["candidates"] = [*dict.fromkeys([*registration["candidates"], name])]
    events = trial(flat(**BASE, K3=11.0, **{name: 5.0}), registration=registration, missing=LACKS)
    role = row("run", "candidate/role", registration, candidate=name, text="control")
    verdict = decide(with_rows(events, [role]), registration)
    assert (verdict.outcome, verdict.adopted) == (ADOPT, "K3")  # 5 ms would have stopped it
    assert verdict.data["eligibility"][name] == ["a control: measured, never to win"]
    assert any(arm["candidate"] == name for arm in verdict.data["hot"]["arms"])
    # Registered among the arms to beat by mistake, it still is none.
    registration["decision"]["incumbents"].append(name)
    events = trial(flat(**BASE, K3=22.0, **{name: 5.0}), registration=registration, missing=LACKS)
    role = row("run", "candidate/role", registration, candidate=name, text="control")
    verdict = decide(with_rows(events, [role]), registration)
    assert (verdict.outcome, verdict.adopted) == (KEEP, "K1")


def test_fewer_than_three_blocks_in_a_veto_cell_are_inconclusive_too() -> None:
    arms = {n: {**cs, 512: cs[512][:2]} for n, cs in flat(**BASE, K3=11.0).items()}
    verdict = run(arms)
    assert verdict.outcome == INCONCLUSIVE
    assert "2 valid blocks at context 512; 3 are needed" in verdict.data["hot"]["reason"]


def test_an_arm_missing_from_one_block_is_inconclusive_never_cut_to_fit() -> None:
    arms = flat(**BASE, K3=11.0)
    arms["K3"][4096] = arms["K3"][4096][:11]
    verdict = run(arms)
    assert verdict.outcome == INCONCLUSIVE
    assert "blocks [11] have one arm only" in verdict.data["hot"]["reason"]


def test_more_blocks_than_registered_are_judged_by_the_wider_interval() -> None:
    # Twelve noisy blocks, then six quiet ones: their own spread would make the interval too narrow.
    noisy = [0.1, -0.1] * 6
    k3 = [22.0 / 1.2 * math.exp(x) for x in (*noisy, *[0.0] * 6)]
    arms = flat(**BASE, K3={4096: k3, 512: [11.0] * 6, 16384: [11.0] * 6})
    for name, contexts in arms.items():
        contexts[4096] = (contexts[4096] * 2)[:18] if name != "K3" else k3
    hot = run(arms).data["hot"]
    (precision,) = hot["precision"]
    assert (precision["blocks_wanted"], precision["n_blocks"]) == (18, 18)
    found = next(
        c
        for c in hot["contrasts"]
        if (c["challenger"], c["incumbent"], c["context"]) == ("K3", "K1", 4096)
    )
    # t(0.975, 11) = 2.200985160082949; the standard deviation of twelve times 0.1 up and down.
    half = 2.200985160082949 * 0.1 * math.sqrt(12 / 11) / math.sqrt(18)
    bounds = [math.log(1.2) - half, math.log(1.2) + half]
    assert [math.log(b) for b in found["ci95"]] == pytest.approx(bounds, rel=1e-9)
    assert precision["half_width_seen"] == pytest.approx(half, rel=1e-9)


def test_a_contrast_of_arms_with_different_layouts_says_so_wherever_it_is_shown() -> None:
    data = run(flat(**{**BASE, "K0": 20.5}, K3=20.0)).data
    contrasts = data["hot"]["contrasts"]
    differ = {(c["challenger"], c["incumbent"]): c["layouts_differ"] for c in contrasts}
    assert differ["K3", "K1"] is differ["K3", "A2"] is differ["K2", "K1"] is False
    assert differ["K3", "K0"] is differ["K3", "A1"] is differ["K2", "K0"] is True
    hypotheses = {h["id"]: h["layouts_differ"] for h in data["hypotheses"]}
    assert (hypotheses["H1"], hypotheses["H2"], hypotheses["H6"]) == (False, True, False)
    assert data["hot"]["reason"].startswith("K3: against K0 (layouts differ) at 4096")
    console = Console(width=160, record=True, file=io.StringIO())
    print_verdict(data, console)
    terminal = console.export_text()
    assert "K0 (layouts differ)" in terminal and "A1 → A2 (layouts differ)" in terminal
    assert "K1 → K3 (" not in terminal
    lines = summary.markdown(data, {}).splitlines()
    assert "| K3 | K0 (layouts differ) | 1.025 | 1.025 to 1.025 | 12 |" in lines
    assert "| K3 | K1 | 1.100 | 1.100 to 1.100 | 12 |" in lines
    drawn = _texts(forest.draw(data, pd.DataFrame()))
    assert {"K3 / K0 (layouts differ)", "K3 / K1", "4,096 positions, primary (n = 12)"} <= {*drawn}
    assert any("A1 → A2 (layouts" in text for text in _texts(waterfall.draw(data, pd.DataFrame())))


def _texts(figure: Any) -> list[str]:
    axis = figure.axes[0]
    texts = [axis.get_title(), *(label.get_text() for label in axis.get_yticklabels())]
    plt.close(figure)
    return texts


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


def test_the_cold_store_that_restores_faster_is_adopted() -> None:
    def cold(*times: list[float]) -> Any:
        return decide(with_rows(trial(flat(**BASE)), cold_rows(*times)), REGISTERED).data["cold"]

    found = cold([200.0] * 6, [100.0] * 6)
    assert (found["adopted"], found["z1_over_z2"]["ratio"]) == ("Z2", 2.0)
    assert cold([100.0] * 6, [200.0] * 6)["adopted"] == "Z1"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recovered": 0.0}, "Z2 broke a promise after: killed"),
        ({"fsyncs": (1.0, 2.0)}, "fsyncs per batch differ"),
        ({"fsyncs": ()}, "fsyncs per batch were not counted"),
        ({"fsyncs": (1.0,)}, "fsyncs per batch were not counted"),
    ],
)
def test_no_cold_store_is_adopted_unless_durability_is_shown_to_be_equal(
    changed: dict[str, Any], said: str
) -> None:
    rows = cold_rows([200.0] * 6, [100.0] * 6, **changed)
    found = decide(with_rows(trial(flat(**BASE)), rows), REGISTERED).data["cold"]
    assert found["adopted"] is None
    assert said in found["reason"]
