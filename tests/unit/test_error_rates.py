"""The rule's error rates: the simulation against theory, planted faults, unfriendly noise, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats as scipy_stats
from trial_events import BLOCKS, CONTEXTS, REGISTERED, flat, row, trial, with_rows

from kvtrial.decision import error_rates, rule
from kvtrial.decision.error_rates import SIMULATIONS, CellNoise, simulate
from kvtrial.decision.verdict import ADOPT, KEEP, decide
from kvtrial.measure.plan import Bounds, SamplingPlan

Logs = npt.NDArray[np.float64]
DECISION = REGISTERED["decision"]
EDGE = math.log(1.10)
CELLS = {cell["context"]: cell for cell in REGISTERED["cells"] if cell["role"] != "extra"}
ARRANGEMENTS = ("as_measured", "all_equal")
#: So many blocks are seen that drawing from them is drawing from the law itself.
SEEN = 4000


def error(p: float, runs: int = SIMULATIONS) -> float:
    return math.sqrt(p * (1 - p) / runs)


def noise_of(context: int, logs: Logs, pairs: Logs | None = None, void_rate: float = 0.0) -> Any:
    cell = CELLS[context]
    plan = SamplingPlan.of_cell(REGISTERED, cell)
    pairs = logs[:1] if pairs is None else pairs
    return CellNoise(f"{context}x1x1", cell["role"], plan, logs, pairs, void_rate)


def normal(deviation: float, incumbents: int, seed: int = 1, shared: float = 0.0) -> Logs:
    """(incumbents, SEEN) log ratios; ``shared`` of their variance is the challenger's own noise."""
    rng = np.random.default_rng(seed)
    own, theirs = rng.normal(0, deviation, (1, SEEN)), rng.normal(0, deviation, (incumbents, SEEN))
    return math.sqrt(shared) * own + math.sqrt(1 - shared) * theirs


def run_noise(
    deviation: float, incumbents: int = 5, *, behind: float = 0.0, void_rate: float = 0.0
) -> list[CellNoise]:
    """A whole run; incumbents but for the first are ``behind`` (a log) it, in all cells."""
    level = np.array([[0.2], *[[0.2 + behind]] * (incumbents - 1)])
    return [
        noise_of(context, level + normal(deviation, incumbents, seed, 0.5), void_rate=void_rate)
        for seed, context in enumerate(CONTEXTS)
    ]


def at(found: dict[str, Any], arrangement: str) -> dict[float, float]:
    """True improvement → chance of adopting."""
    chances = found["arrangements"][arrangement]["adopt_probability"]
    return dict(zip(found["true_improvement"], chances))


# --------------------------------------------------------------------------------------------------
# Against theory


def test_the_improvements_are_those_that_are_claimed() -> None:
    found = simulate(run_noise(0.01, 2), REGISTERED)
    assert found["true_improvement"] == [0.0, 0.05, 0.10, 0.12, 0.13, 0.15, 0.20]
    assert (found["adopt_at"], found["claim"], found["simulations"]) == (0.10, 0.025, SIMULATIONS)
    assert set(found["arrangements"]) == set(ARRANGEMENTS)
    for name in ARRANGEMENTS:
        chances = found["arrangements"][name]["adopt_probability"]
        assert chances == sorted(chances)
        errors = found["arrangements"][name]["standard_error"]
        assert errors == pytest.approx([error(p) for p in chances], rel=1e-9)


@pytest.mark.parametrize("deviation", [0.02, 0.04])
def test_one_incumbent_and_eight_blocks_give_the_power_of_the_noncentral_t(
    deviation: float,
) -> None:
    logs = scipy_stats.norm.ppf((np.arange(SEEN) + 0.5) / SEEN)[None, :] * deviation
    cell = noise_of(512, logs)  # never extended; in the primary cell's role
    primary = CellNoise(cell.name, "primary", cell.plan, logs, logs)
    found = simulate([primary], REGISTERED)
    for name in ARRANGEMENTS:
        for x, chance in at(found, name).items():
            away = (math.log1p(x) - EDGE) / (deviation / math.sqrt(8))
            theory = scipy_stats.nct.sf(scipy_stats.t.ppf(0.975, 7), 7, away)
            assert chance == pytest.approx(theory, abs=4 * error(theory) + 1e-6)


@pytest.mark.parametrize("deviation", [0.008, 0.02, 0.03, 0.06])
@pytest.mark.parametrize("behind", [0.0, 0.3])
def test_the_claim_holds_at_exactly_the_edge(deviation: float, behind: float) -> None:
    found = simulate(run_noise(deviation, behind=behind), REGISTERED)
    for name in ARRANGEMENTS:
        assert at(found, name)[0.10] <= 0.025 + 3 * error(0.025)
        assert at(found, name)[0.0] == 0.0
    assert found["claim_holds"]
    if behind:  # the others are out of reach: it is the chance of one comparison
        assert at(found, "as_measured")[0.10] > 0.01


@pytest.mark.parametrize("deviation", [0.012, 0.025, 0.03])
def test_power_at_13_percent_is_that_of_a_normal_approximation(deviation: float) -> None:
    """As measured, with one incumbent near: half-width and standard error at the number asked for."""
    t7 = float(scipy_stats.t.ppf(0.975, 7))
    blocks = min(max((t7 * deviation / 0.015) ** 2, 8), 24)
    standard_error = deviation / math.sqrt(blocks)
    away = math.log(1.13 / 1.10) - max(
        t7 * standard_error, scipy_stats.t.ppf(0.975, blocks - 1) * standard_error
    )
    theory = float(scipy_stats.norm.cdf(away / standard_error))
    found = simulate(run_noise(deviation, behind=0.3), REGISTERED)
    assert at(found, "as_measured")[0.13] == pytest.approx(theory, abs=0.05)
    assert at(found, "as_measured")[0.13] >= 0.9  # what issue 18 asks for
    expected = SamplingPlan.of_cell(REGISTERED, CELLS[4096]).wanted(
        np.random.default_rng(9).normal(0, deviation, (20_000, 1, 8))
    )
    assert found["mean_blocks"]["4096x1x1"] == pytest.approx(expected.mean(), abs=0.2)
    assert found["mean_blocks"]["512x1x1"] == found["mean_blocks"]["16384x1x1"] == 8.0


def test_incumbents_that_are_equally_near_each_may_stop_the_challenger() -> None:
    near = simulate(run_noise(0.03), REGISTERED)
    far = simulate(run_noise(0.03, behind=0.3), REGISTERED)
    assert at(far, "as_measured")[0.13] > at(far, "all_equal")[0.13] + 0.05
    assert at(far, "all_equal")[0.13] == pytest.approx(at(near, "all_equal")[0.13], abs=0.02)
    assert at(near, "as_measured")[0.13] == pytest.approx(at(near, "all_equal")[0.13], abs=0.03)


def test_arms_of_a_block_keep_what_they_share() -> None:
    """The same log against every incumbent is one comparison, not five."""
    same = np.repeat(normal(0.03, 1), 5, axis=0)
    found = simulate([noise_of(4096, same)], REGISTERED)
    alone = simulate([noise_of(4096, same[:1])], REGISTERED)
    assert at(found, "all_equal") == at(alone, "all_equal")


def test_a_veto_cell_can_stop_it() -> None:
    quiet = [noise_of(4096, normal(0.005, 1))]
    # At a true +10% its mean has to lie 0.126 under the truth to be vetoed.
    loud = [*quiet, noise_of(512, normal(0.4, 1, seed=2))]
    chance = float(scipy_stats.norm.cdf((math.log(1.15) - math.log(0.97)) / (0.4 / math.sqrt(8))))
    assert at(simulate(quiet, REGISTERED), "all_equal")[0.15] == 1.0
    assert at(simulate(loud, REGISTERED), "all_equal")[0.15] == pytest.approx(
        chance, abs=4 * error(chance)
    )


# --------------------------------------------------------------------------------------------------
# Void runs


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5])
def test_void_runs_past_the_cap_end_a_run(rate: float) -> None:
    """Eight blocks a cell, none extended: a cell is given up where more than eight runs are void."""
    found = simulate(run_noise(0.001, 2, void_rate=rate), REGISTERED)
    lost = float(scipy_stats.nbinom.sf(8, 8, 1 - rate)) if rate else 0.0
    finished = (1 - lost) ** 3
    assert found["not_finished"] == pytest.approx(1 - finished, abs=4 * error(finished) + 1e-12)
    for name in ARRANGEMENTS:
        assert at(found, name)[0.20] == pytest.approx(finished, abs=4 * error(finished) + 1e-12)
    assert set(found["void_rate"].values()) == {rate}


def test_a_machine_that_voids_everything_finishes_nothing() -> None:
    found = simulate(run_noise(0.001, 2, void_rate=1.0), REGISTERED)
    assert found["not_finished"] == 1.0
    assert at(found, "all_equal")[0.20] == 0.0


# --------------------------------------------------------------------------------------------------
# It asks the plan and the rule, and nobody else


def test_the_plans_number_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    before = simulate(run_noise(0.01, 2), REGISTERED)
    monkeypatch.setattr(
        SamplingPlan, "wanted", lambda plan, logs: np.full(logs.shape[:-2], plan.most)
    )
    after = simulate(run_noise(0.01, 2), REGISTERED)
    assert before["mean_blocks"]["4096x1x1"] < 9
    assert after["mean_blocks"]["4096x1x1"] == 24.0


def test_the_plans_interval_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(plan: SamplingPlan, logs: Logs, confidence: float | None = None) -> Bounds:
        mean = logs.mean(axis=-1)
        return Bounds(mean, mean - 1e-9, mean + 1e-9)

    monkeypatch.setattr(SamplingPlan, "bounds", points)
    found = simulate([noise_of(4096, normal(0.03, 1))], REGISTERED)
    # Without an interval every second run adopts at the edge, and the claim is seen to be broken.
    assert at(found, "all_equal")[0.10] == pytest.approx(0.5, abs=4 * error(0.5))
    assert not found["claim_holds"]


def test_the_plans_cap_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingPlan, "lost", lambda plan, void: np.asarray(void) >= 0)
    assert simulate(run_noise(0.01, 2), REGISTERED)["not_finished"] == 1.0


def test_the_rule_is_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "adopts", lambda cells, decision: np.ones(SIMULATIONS, np.bool_))
    assert at(simulate(run_noise(0.01, 2), REGISTERED), "as_measured")[0.0] == 1.0


@pytest.mark.parametrize(
    ("fault", "worst"),
    [
        # The spread of the first blocks is not allowed for: the plain interval of those that were kept.
        ("plain", 0.0275),
        # The interval of so many blocks as there may be.
        ("most", 0.05),
        # Rounds or blocks counted as independent that are not: each twice.
        ("twice", 0.07),
    ],
)
def test_a_planted_fault_is_seen(fault: str, worst: float, monkeypatch: pytest.MonkeyPatch) -> None:
    true_bounds = SamplingPlan.bounds

    def wrong(plan: SamplingPlan, logs: Logs, confidence: float | None = None) -> Bounds:
        n = logs.shape[-1]
        if fault == "plain":
            return true_bounds(SamplingPlan(n, n), logs)
        if fault == "twice":
            return true_bounds(SamplingPlan(2 * n, 2 * n), np.concatenate([logs, logs], axis=-1))
        mean, low, _ = true_bounds(plan, logs)
        half = (mean - low) * math.sqrt(n / plan.most)
        return Bounds(mean, mean - half, mean + half)

    runs = 200_000 if fault == "plain" else SIMULATIONS
    monkeypatch.setattr(error_rates, "SIMULATIONS", runs)
    cell = [noise_of(4096, normal(0.021, 1))]
    sound = simulate(cell, REGISTERED)
    assert sound["claim_holds"]
    monkeypatch.setattr(SamplingPlan, "bounds", wrong)
    found = simulate(cell, REGISTERED)
    assert at(found, "all_equal")[0.10] > worst
    assert not found["claim_holds"]


# --------------------------------------------------------------------------------------------------
# Noise that is not friendly


def rates(noise: Callable[[np.random.Generator, int, int], Logs]) -> tuple[float, float]:
    """(coverage of the interval, chance of adopting at exactly +10% over one incumbent), 8 blocks."""
    runs = 100_000
    logs = EDGE + noise(np.random.default_rng(11), runs, 8)
    bounds = SamplingPlan.of_cell(REGISTERED, CELLS[512]).bounds(logs)
    own = Bounds(*(x[:, None] for x in bounds))
    adopted = rule.adopts([("primary", own)], DECISION)
    return float(((bounds.low <= EDGE) & (bounds.high >= EDGE)).mean()), float(adopted.mean())


def shared_drift(rng: np.random.Generator, runs: int, n: int) -> Logs:
    """The machine slows by 20% over the run, for both arms of a pair alike."""
    machine = -np.linspace(0, 0.2, n) + rng.normal(0, 0.1, (runs, n))
    arm = rng.normal(0, 0.02, (2, runs, n))
    return (machine + arm[0]) - (machine + arm[1])


def autocorrelated(rng: np.random.Generator, runs: int, n: int) -> Logs:
    """AR(1), rho 0.3, stationary from its first block."""
    noise = rng.normal(0, 0.03, (runs, n))
    noise[:, 0] /= math.sqrt(1 - 0.3**2)
    for block in range(1, n):
        noise[:, block] += 0.3 * noise[:, block - 1]
    return noise


@pytest.mark.parametrize(
    "noise", [lambda rng, runs, n: rng.normal(0, 0.03, (runs, n)), shared_drift]
)
def test_the_interval_covers_and_the_claim_holds(noise: Any) -> None:
    coverage, adopted = rates(noise)
    assert coverage == pytest.approx(0.95, abs=4 * error(0.95, 100_000))
    assert adopted <= 0.025 + 4 * error(0.025, 100_000)


def test_heavy_tails_make_the_interval_cautious() -> None:
    coverage, adopted = rates(lambda rng, runs, n: 0.02 * rng.standard_t(3, (runs, n)))
    assert 0.95 < coverage < 0.97
    assert adopted < 0.025


def test_autocorrelated_blocks_break_the_claim() -> None:
    """Why a block is a fresh process and its lag-1 autocorrelation is shown."""
    coverage, adopted = rates(autocorrelated)
    assert 0.84 < coverage < 0.90
    assert adopted > 0.04


def test_noise_that_looks_skewed_by_chance_breaks_no_claim() -> None:
    """The challenger loses 30% in one block of eight: signs are drawn, or few draws would miss it."""
    logs = np.random.default_rng(14).normal(0, 0.01, (1, 8))
    logs[0, 5] -= 0.3
    found = simulate([noise_of(4096, logs)], REGISTERED)
    assert found["claim_holds"]
    assert at(found, "all_equal")[0.10] < 0.03


@pytest.mark.parametrize("seed", range(4))
def test_eight_blocks_are_enough_to_draw_from(seed: int) -> None:
    """Few draws have no normal law, but near one."""
    rng = np.random.default_rng(seed)
    cells = [noise_of(context, rng.normal(0.2, 0.02, (4, 8))) for context in CONTEXTS]
    found = simulate(cells, REGISTERED)
    assert found["claim_holds"]


# --------------------------------------------------------------------------------------------------
# Edges of the simulation


def test_the_same_noise_gives_the_same_figures() -> None:
    once = simulate(run_noise(0.02, 3), REGISTERED)
    assert once == simulate(run_noise(0.02, 3), REGISTERED)
    other = {**REGISTERED, "decision": {**DECISION, "seed": 1}}
    assert once != simulate(run_noise(0.02, 3), other)


def test_too_little_to_draw_from_is_none_with_its_reason() -> None:
    rng = np.random.default_rng(1)
    few = simulate([noise_of(4096, rng.normal(0, 0.01, (2, 5)))], REGISTERED)
    assert few["arrangements"] is None
    assert "5 blocks in cell 4096x1x1; 6 are needed" in few["reason"]
    constant = simulate([noise_of(4096, np.full((2, 8), 0.2))], REGISTERED)
    assert constant["arrangements"] is None and "constant" in constant["reason"]


# --------------------------------------------------------------------------------------------------
# The rule on arrays, by hand, and on events


COMPARATORS = ["K0", "A1", "A2", "K1"]


def table(rng: np.random.Generator, challenger: float) -> dict[str, dict[int, list[float]]]:
    """Step times by arm and context, around the edges of the rule."""
    scale = {"K0": 1.3, "K1": 1.02, "A1": 1.0, "A2": 1.05, "K3": 1 / challenger}
    steps: dict[str, dict[int, list[float]]] = {name: {} for name in scale}
    for context in CONTEXTS:
        machine = rng.normal(0, 0.1, BLOCKS)
        slower = 1.0 if context == 4096 else rng.choice([1.0, 1.0, 1.0, 1.4])
        for name, level in scale.items():
            own = level * (slower if name == "K3" else 1.0)
            # A spread of K3 over K1 of 1.3%: nobody asks for more than eight blocks.
            logs = machine + rng.normal(0, 0.004, BLOCKS)
            steps[name][context] = list(20 * own * np.exp(logs))
    return steps


def log_ratios(steps: dict[str, dict[int, list[float]]]) -> list[Logs]:
    """(comparators, blocks) of the three contexts, primary first."""
    return [
        np.array([np.log(steps[c][context]) - np.log(steps["K3"][context]) for c in COMPARATORS])
        for context in CONTEXTS
    ]


def by_hand(primary: Logs, *vetoes: Logs) -> bool:
    """The rule as the specification has it, one contrast at a time, with scipy's interval."""
    lows = [scipy_stats.ttest_1samp(row, 0).confidence_interval(0.95).low for row in primary]
    ratios = [math.exp(row.mean()) for veto in vetoes for row in veto]
    return all(math.exp(low) >= 1.10 for low in lows) and all(ratio >= 0.97 for ratio in ratios)


def test_the_rule_on_many_tables_is_the_rule_on_each() -> None:
    rng = np.random.default_rng(15)
    logs = [log_ratios(table(rng, float(rng.uniform(1.08, 1.3)))) for _ in range(150)]
    expected = [by_hand(*three) for three in logs]
    assert 15 < sum(expected) < 135
    judged = [
        (
            CELLS[context]["role"],
            SamplingPlan.of_cell(REGISTERED, CELLS[context]).bounds(np.stack(own)),
        )
        for context, own in zip(CONTEXTS, zip(*logs))
    ]
    assert rule.adopts(judged, DECISION).tolist() == expected


def test_the_verdict_is_the_rule_on_arrays() -> None:
    rng = np.random.default_rng(15)
    seen = set()
    for _ in range(10):
        steps = table(rng, float(rng.uniform(1.08, 1.3)))
        verdict = decide(trial(steps), REGISTERED)
        assert verdict.outcome == (ADOPT if by_hand(*log_ratios(steps)) else KEEP)
        seen.add(("elsewhere" in verdict.data["language"]["reason"], verdict.outcome))
    assert seen == {(False, ADOPT), (False, KEEP), (True, KEEP)}


def test_a_verdict_carries_the_rates_of_its_own_noise() -> None:
    rng = np.random.default_rng(16)
    steps = table(rng, 1.2)
    events = trial(steps, missing={"K0": "pool"})
    found = decide(events, REGISTERED).data["error_rates"]
    assert (found["challenger"], found["simulations"]) == ("K3", SIMULATIONS)
    # By hand from the same step times: every incumbent, and the one registered pair that is there.
    cells = [
        noise_of(context, own, pairs=own[3:]) for context, own in zip(CONTEXTS, log_ratios(steps))
    ]
    expected = simulate(cells, REGISTERED)
    for name in ARRANGEMENTS:
        assert at(found, name) == pytest.approx(at(expected, name), abs=1e-12)
    assert found["mean_blocks"] == expected["mean_blocks"]


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ({"K0": 100.0, "K1": 22.0}, "no challenger is in the trial"),
        ({"K0": 100.0, "K1": 22.0, "K3": 11.0}, "constant"),
    ],
)
def test_a_run_without_noise_or_arms_has_no_rates(arms: dict[str, float], said: str) -> None:
    events = trial(flat(**arms))
    found = decide(events, REGISTERED).data["error_rates"]
    assert found["arrangements"] is None and said in found["reason"]


def test_a_run_without_an_incumbent_has_no_rates() -> None:
    roles = [row("run", "candidate/role", candidate=n, text="control") for n in ("K0", "K1")]
    events = with_rows(trial(flat(K0=100.0, K1=22.0, K3=11.0)), roles)
    found = decide(events, REGISTERED).data["error_rates"]
    assert found == {"arrangements": None, "reason": "no incumbent is in the trial"}
