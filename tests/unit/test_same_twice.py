"""A/A: what was measured of one candidate registered twice, and what its noise implies."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from trial_events import REGISTERED, block_rows, flat, trial, with_rows

from kvtrial.decision.error_rates import SIMULATIONS
from kvtrial.decision.verdict import decide
from kvtrial.run import schemas
from kvtrial.show import report, summary
from kvtrial.show.terminal import print_verdict

BASE = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=20.0)
EDGE = math.log(1.10)


def verdict(first: list[float], second: list[float]) -> dict[str, Any]:
    rows = block_rows("aa", "m2/step_ms", {"first": first, "second": second}, context=4096)
    return decide(with_rows(trial(BASE), rows), REGISTERED).data


def same_twice(first: list[float], second: list[float]) -> dict[str, Any]:
    found: dict[str, Any] = verdict(first, second)["characteristics"]["aa"]
    return found


def noisy(factor: float, logs: list[float]) -> tuple[list[float], list[float]]:
    return [20.0] * len(logs), [20.0 * factor * math.exp(x) for x in logs]


def test_it_is_judged_by_its_interval() -> None:
    fair = same_twice(*noisy(1.0, [0.01, -0.01] * 3))
    assert fair["ratio"] == pytest.approx(1.0, rel=1e-9)
    assert fair["n_blocks"] == 6
    # t(0.975, 5) = 2.570581835636314 times the spread of six, 0.01 up and down.
    half = 2.570581835636314 * 0.01 * math.sqrt(6 / 5) / math.sqrt(6)
    assert fair["ci95"] == pytest.approx([math.exp(-half), math.exp(half)], rel=1e-9)
    assert (fair["covers_1"], fair["adopts"]) == (True, False)
    assert fair["candidate"] == "K1"
    tilted = same_twice(*noisy(1.05, [0.01, -0.01] * 3))  # a slot effect that did not cancel
    assert tilted["ratio"] == pytest.approx(1 / 1.05, rel=1e-9)
    assert (tilted["covers_1"], tilted["adopts"]) == (False, False)


@pytest.mark.parametrize("factor", [1.2, 1 / 1.2])
def test_a_slot_effect_past_the_rules_edge_would_have_been_adopted(factor: float) -> None:
    assert same_twice(*noisy(factor, [0.01, -0.01] * 3))["adopts"] is True


def test_its_noise_implies_the_false_adoptions_of_the_noncentral_t() -> None:
    # So many blocks that drawing from them is drawing from the normal law, so wide that it shows.
    n, sd = 200, 3.0
    logs = scipy_stats.norm.ppf((np.arange(n) + 0.5) / n) * sd
    implied = same_twice(*noisy(1.0, logs.tolist()))["false_adoption"]
    assert implied["true_improvement"] == [0.0, 0.05, 0.1]
    for x, chance, error in zip(*(implied[key] for key in (
        "true_improvement", "adopt_probability", "standard_error"
    ))):  # fmt: skip
        away = (math.log1p(x) - EDGE) / (logs.std(ddof=1) / math.sqrt(n))
        theory = scipy_stats.nct.sf(scipy_stats.t.ppf(0.975, n - 1), n - 1, away)
        spread = math.sqrt(theory * (1 - theory) / SIMULATIONS)
        assert chance == pytest.approx(theory, abs=3.5 * spread)
        assert error == pytest.approx(math.sqrt(chance * (1 - chance) / SIMULATIONS), rel=1e-9)
    assert implied["claim_holds"] is True


def test_a_spread_of_a_few_percent_never_adopts_without_an_improvement() -> None:
    logs = np.random.default_rng(22).normal(0, 0.02, 12)
    implied = same_twice(*noisy(1.0, logs.tolist()))["false_adoption"]
    assert implied["adopt_probability"][0] == 0.0
    assert 0.015 < implied["adopt_probability"][-1] < 0.035


def test_void_blocks_are_lost_to_the_simulation_too() -> None:
    """Every second trial is void, so a block is lost with 1/2 to the power of its trials."""
    first, second = noisy(1.0, [3.0, -3.0] * 6)
    rows = block_rows("aa", "m2/step_ms", {"first": first, "second": second}, context=4096)
    void = [{**r, "trial": 0} for r in rows]
    valid = [{**r, "trial": 1} for r in rows]
    for r in void:
        if r["metric"] == "probe/spin_ms" and r["index"]:
            r["value"] = 500.0

    def chance(listed: list[dict[str, Any]]) -> float:
        found = decide(with_rows(trial(BASE), listed), REGISTERED).data["characteristics"]["aa"]
        assert found["n_blocks"] == 12
        return float(found["false_adoption"]["adopt_probability"][-1])

    whole, lossy = chance(valid), chance([*void, *valid])
    lost = 0.5 ** REGISTERED["gates"]["max_trials"]
    expected = whole * (1 - lost) ** 12
    assert lossy == pytest.approx(expected, abs=4 * math.sqrt(whole / SIMULATIONS))


@pytest.mark.parametrize(
    ("logs", "reason"),
    [([0.01, -0.01, 0.0], "3 blocks in cell 4096x1x1; 6 are needed"), ([0.0] * 6, "constant")],
)
def test_noise_that_can_not_be_drawn_from_says_why(logs: list[float], reason: str) -> None:
    implied = same_twice(*noisy(1.0, logs))["false_adoption"]
    assert implied["adopt_probability"] is None
    assert reason in implied["reason"]


def test_what_was_not_measured_says_so() -> None:
    found = decide(trial(BASE), REGISTERED).data["characteristics"]["aa"]
    assert found == {
        "candidate": "K1",
        "ratio": None,
        "ci95": None,
        "n_blocks": 0,
        "problem": "no valid blocks",
        "covers_1": None,
        "adopts": None,
        "false_adoption": None,
    }


LOGS = np.random.default_rng(22).normal(0, 0.02, 12).tolist()
SHOWN = {"measured": (LOGS, "% at"), "few blocks": (LOGS[:3], "not simulated: 3 blocks")}


@pytest.mark.parametrize("case", [*SHOWN, "nothing"])
def test_it_is_shown_beside_the_simulated_rates(case: str, tmp_path, capsys) -> None:
    logs, said = SHOWN.get(case, ([], "no valid blocks"))
    events = trial(BASE)
    if logs:
        first, second = noisy(1.0, logs)
        arms = {"first": first, "second": second}
        events = with_rows(events, block_rows("aa", "m2/step_ms", arms, context=4096))
    found = decide(events, REGISTERED)
    assert schemas.first_error(found.data, "verdict.schema.yaml") is None

    print_verdict(found.data)
    assert said in " ".join(capsys.readouterr().out.split())
    (tmp_path / "verdict.json").write_text(found.to_json(), encoding="utf-8")
    (tmp_path / "protocol.json").write_text(json.dumps(REGISTERED), encoding="utf-8")
    (tmp_path / "manifest.json").write_text("{}", encoding="utf-8")
    page = report.write(tmp_path, events).read_text(encoding="utf-8")
    aa = page[page.index("<strong>A/A</strong>") : page.index('<h2 id="cold">')]
    numbers = summary.verdict_metrics(found.data)
    text = summary.markdown(found.data, {})
    ratio = found.data["characteristics"]["aa"]["ratio"]
    if ratio is None:
        assert "no valid blocks" in aa
        assert "A/A, K1 registered twice: no valid blocks." in text
        assert not any("aa" in name for name in numbers)
        return
    low, high = found.data["characteristics"]["aa"]["ci95"]
    assert f"ratio {ratio:.4f}, 95% interval {low:.4f} to {high:.4f} over {len(logs)} blocks" in aa
    assert f"ratio {ratio:.4f} [{low:.4f}, {high:.4f}] over {len(logs)} blocks" in text
    assert numbers["characteristics/aa_ratio"] == ratio
    assert numbers["characteristics/aa_ratio.low"] == low
    assert numbers["characteristics/aa_blocks"] == len(logs)
    chance = numbers.get("characteristics/aa_adopt_probability_at_0.000")
    assert (chance == 0.0) if case == "measured" else (chance is None)
    assert ("0.00% ± 0.00 at a true improvement" in aa) == (case == "measured")


@pytest.mark.parametrize(
    "wrong",
    [{"ratio": 0.0}, {"covers_1": "yes"}, {"false_adoption": {"adopt_probability": [1.5]}}],
)
def test_the_schema_names_what_is_wrong(wrong: dict[str, Any]) -> None:
    data = verdict(*noisy(1.0, LOGS))
    data["characteristics"]["aa"] |= wrong
    error = schemas.first_error(data, "verdict.schema.yaml")
    assert error is not None and f"characteristics.aa.{next(iter(wrong))}" in error
