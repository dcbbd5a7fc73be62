"""The rule's error rates: planted effects, unfriendly noise, and the simulation against theory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats as scipy_stats
from trial_events import REGISTERED, trial

from kvtrial.decision import error_rates, rule, stats
from kvtrial.decision.error_rates import CellNoise, operating_characteristics
from kvtrial.decision.verdict import ADOPT, KEEP, decide
from kvtrial.measure.order import mirrored_orders
from kvtrial.show.plots import characteristics as figure

Noise = Callable[[np.random.Generator, int, int], npt.NDArray[np.float64]]
DECISION = REGISTERED["decision"]
RUNS = 100_000
EDGE = math.log(1.10)


def normal(rng: np.random.Generator, runs: int, n: int) -> npt.NDArray[np.float64]:
    return rng.normal(0, 0.03, (runs, n))


def heavy_tails(rng: np.random.Generator, runs: int, n: int) -> npt.NDArray[np.float64]:
    return 0.02 * rng.standard_t(3, (runs, n))


def autocorrelated(rng: np.random.Generator, runs: int, n: int) -> npt.NDArray[np.float64]:
    """AR(1), rho 0.3, stationary from its first block."""
    noise = rng.normal(0, 0.03, (runs, n))
    noise[:, 0] /= math.sqrt(1 - 0.3**2)
    for block in range(1, n):
        noise[:, block] += 0.3 * noise[:, block - 1]
    return noise


def shared_drift(rng: np.random.Generator, runs: int, n: int) -> npt.NDArray[np.float64]:
    """The machine slows by 20% over the run, for both arms of a pair alike."""
    machine = -np.linspace(0, 0.2, n) + rng.normal(0, 0.1, (runs, n))
    arm = rng.normal(0, 0.02, (2, runs, n))
    return (machine + arm[0]) - (machine + arm[1])


def by_place(rng: np.random.Generator, runs: int, n: int) -> npt.NDArray[np.float64]:
    """5% lost by whoever runs first, 1% more by each later place, in the orders of the blocks."""
    orders = mirrored_orders(["K0", "A1", "A2", "K1", "K3"], n, seed=1)
    cost = [0.05, 0.0, 0.01, 0.02, 0.03]
    bias = np.array([cost[o.index("K1")] - cost[o.index("K3")] for o in orders])
    return bias + rng.normal(0, 0.03, (runs, n))


def rates(noise: Noise, n: int) -> tuple[float, float]:
    """(coverage of the 95% interval, chance of adopting at exactly +10% over one comparator)."""
    logs = EDGE + noise(np.random.default_rng(11), RUNS, n)
    _, low, high = stats.t_bounds(logs, 0.95)
    adopted = rule.adopts([rule.bounds(cell(n), logs[:, None, :], DECISION)], DECISION)
    return float(((low <= EDGE) & (high >= EDGE)).mean()), float(adopted.mean())


def cell(blocks: int, context: int = 4096, **more: int) -> dict[str, Any]:
    role = "primary" if context == 4096 else "veto"
    at = {"context": context, "sessions": 1, "threads": 1}
    return {**at, "blocks": blocks, "role": role, "profile": "default", **more}


def error(p: float) -> float:
    return math.sqrt(p * (1 - p) / RUNS)


@pytest.mark.parametrize("n", [6, 12])
@pytest.mark.parametrize("noise", [normal, shared_drift])
def test_the_interval_covers_and_the_claim_holds(noise: Noise, n: int) -> None:
    coverage, adopted = rates(noise, n)
    assert coverage == pytest.approx(0.95, abs=4 * error(0.95))
    assert adopted <= 0.025 + 4 * error(0.025)


@pytest.mark.parametrize("n", [6, 12])
def test_heavy_tails_make_the_interval_cautious(n: int) -> None:
    coverage, adopted = rates(heavy_tails, n)
    assert 0.95 < coverage < 0.97
    assert adopted < 0.025


def test_a_bias_by_place_cancels_over_mirrored_blocks() -> None:
    # Over ten blocks each of the five arms has stood in each place twice: what is left of the bias
    # only widens the interval.
    bias = by_place(np.random.default_rng(0), 1, 10) - normal(np.random.default_rng(0), 1, 10)
    assert bias.std() > 0.01
    assert bias.mean() == pytest.approx(0.0, abs=1e-15)
    coverage, adopted = rates(by_place, 10)
    assert coverage >= 0.95 - 4 * error(0.95)
    assert adopted <= 0.025 + 4 * error(0.025)


def test_autocorrelation_breaks_the_claim_as_the_protocol_says() -> None:
    coverage, adopted = rates(autocorrelated, 12)
    assert 0.85 < coverage < 0.87
    assert 0.065 < adopted < 0.075


def test_drift_p_finds_a_drift_of_one_arm_and_is_uniform_without() -> None:
    rng = np.random.default_rng(12)
    flat = [stats.drift_p(row, range(12)) or 0.0 for row in normal(rng, 1000, 12)]
    assert np.mean(np.array(flat) < 0.05) == pytest.approx(
        0.05, abs=3 * math.sqrt(0.05 * 0.95 / 1e3)
    )
    tilted = normal(rng, 200, 12) + np.linspace(0, 0.15, 12)
    assert np.mean([(stats.drift_p(row, range(12)) or 0.0) < 0.05 for row in tilted]) > 0.8
    assert stats.drift_p([0.1, 0.2], [0, 1]) is None
    assert stats.drift_p([0.1] * 6, range(6)) is None


def test_an_effect_is_found_through_a_bias_by_place() -> None:
    """Case F7: a true +12% with 5% lost in the first place, in ten blocks."""
    logs = math.log(1.12) + by_place(np.random.default_rng(17), 20_000, 10)
    mean, low, high = stats.t_bounds(logs, 0.95)
    assert mean.mean() == pytest.approx(math.log(1.12), abs=4 * 0.03 / math.sqrt(10 * 20_000))
    assert ((low <= math.log(1.12)) & (high >= math.log(1.12))).mean() >= 0.95 - 4 * 0.0016


# --------------------------------------------------------------------------------------------------
# How many blocks: by the spread of the first ones, never by their mean


OPEN = cell(12, max_blocks=18)
HALF = DECISION["precision"]["half_width"]


@pytest.mark.parametrize(
    ("half_width", "wanted"),
    # Twelve blocks of half-width w have one of w * sqrt(12 / n) with n: n = 12 (w / 0.03) ** 2.
    [(0.01, 12), (0.02999, 12), (0.0301, 14), (0.034, 16), (0.0367, 18), (0.3, 18)],
)
def test_blocks_are_asked_for_until_the_interval_is_as_narrow_as_registered(
    half_width: float, wanted: int
) -> None:
    logs = np.array([1.0, -1.0] * 6)
    _, low, high = stats.t_bounds(logs, 0.95)
    logs *= 2 * half_width / (high - low)
    assert rule.blocks_wanted(logs, OPEN, DECISION) == wanted
    assert rule.blocks_wanted(logs + 0.5, OPEN, DECISION) == wanted
    assert rule.blocks_wanted(-logs, OPEN, DECISION) == wanted
    assert rule.blocks_wanted(logs, cell(12), DECISION) == 12


def test_blocks_beyond_the_first_have_no_say_in_their_number() -> None:
    rng = np.random.default_rng(18)
    logs = rng.normal(0, 0.05, 18)
    changed = logs.copy()
    changed[12:] = 9.0
    assert rule.blocks_wanted(logs, OPEN, DECISION) == rule.blocks_wanted(changed, OPEN, DECISION)


def sized(logs: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(interval covers EDGE, adopted) of runs whose first blocks fix how many of 18 are kept."""
    wanted = rule.blocks_wanted(logs, OPEN, DECISION)
    covers, adopted = (np.zeros(len(logs), np.bool_) for _ in range(2))
    for n in np.unique(wanted):
        own = wanted == n
        kept = logs[own, :n]
        _, low, high = stats.t_bounds(kept, 0.95, OPEN["blocks"])
        covers[own] = (low <= EDGE) & (high >= EDGE)
        bounds = rule.bounds(OPEN, kept[:, None], DECISION)
        adopted[own] = rule.adopts([bounds], DECISION)
    return covers, adopted


@pytest.mark.parametrize("sd", [0.03, 0.047, 0.055, 0.1])
def test_the_claim_holds_whatever_number_the_spread_asks_for(sd: float) -> None:
    logs = EDGE + np.random.default_rng(19).normal(0, sd, (RUNS, 18))
    covers, adopted = sized(logs)
    assert covers.mean() >= 0.95 - 4 * error(0.95)
    assert covers.mean() <= 0.962  # wider of two intervals, but not by much
    assert adopted.mean() <= 0.025 + 4 * error(0.025)


def test_without_allowing_for_it_a_stop_by_spread_would_cover_too_little() -> None:
    # Why the interval is Stein's: the plain one, of the blocks that were kept, misses more often.
    logs = EDGE + np.random.default_rng(20).normal(0, 0.05, (RUNS, 18))
    wanted = rule.blocks_wanted(logs, OPEN, DECISION)
    covered = 0
    for n in np.unique(wanted):
        _, low, high = stats.t_bounds(logs[wanted == n, :n], 0.95)
        covered += int(((low <= EDGE) & (high >= EDGE)).sum())
    assert covered / RUNS < 0.95 - 4 * error(0.95)


# --------------------------------------------------------------------------------------------------
# The simulation that a verdict carries


def cells(
    blocks: int = 12, comparators: int = 4, sd: float = 0.03, void_rate: float = 0.0
) -> list[CellNoise]:
    rng = np.random.default_rng(13)
    return [
        CellNoise(cell(n, context), rng.normal(0.2, sd, (comparators, n)), void_rate)
        for context, n in ((4096, blocks), (512, 6), (16384, 6))
    ]


def test_one_comparator_gives_the_power_of_the_noncentral_t() -> None:
    # So many blocks are seen that drawing from them is drawing from the normal law itself.
    sd, seen, n = 0.03, 4000, 12
    logs = scipy_stats.norm.ppf((np.arange(seen) + 0.5) / seen)[None, :] * sd
    found = operating_characteristics([CellNoise(cell(n), logs)], REGISTERED)
    for x, chance in zip(found["true_improvement"], found["adopt_probability"]):
        away = (math.log1p(x) - EDGE) / (sd / math.sqrt(n))
        theory = scipy_stats.nct.sf(scipy_stats.t.ppf(0.975, n - 1), n - 1, away)
        spread = math.sqrt(theory * (1 - theory) / found["simulations"])
        assert chance == pytest.approx(theory, abs=3.5 * spread + 1e-6)


def test_the_claim_holds_and_power_rises_with_the_improvement() -> None:
    found = operating_characteristics(cells(), REGISTERED)
    at = dict(zip(found["true_improvement"], found["adopt_probability"]))
    assert at[0.0] == 0.0
    assert 0.01 < at[0.1] <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / found["simulations"])
    assert found["claim_familywise"] == 0.025
    assert found["claim_holds"]
    assert at[0.2] > 0.99
    for arrangement in (found["one_close"], found["all_equal"]):
        assert arrangement["adopt_probability"] == sorted(arrangement["adopt_probability"])
    assert found["all_equal"]["adopt_probability"] < found["one_close"]["adopt_probability"]


def test_noise_of_one_arm_that_stalls_breaks_the_claim_as_seen() -> None:
    # The challenger loses 30% in one block of twelve: most draws of few blocks miss how bad it can be.
    rng = np.random.default_rng(14)
    logs = rng.normal(0, 0.01, (1, 12))
    logs[0, 5] -= 0.3
    found = operating_characteristics([CellNoise(cell(12), logs)], REGISTERED)
    at_edge = found["true_improvement"].index(0.1)
    assert found["as_seen"]["one_close"]["adopt_probability"][at_edge] > 0.1
    assert found["one_close"]["adopt_probability"][at_edge] < 0.03


def test_void_blocks_past_the_cap_cost_the_chance_that_some_block_is_lost() -> None:
    # 24 blocks, each lost with 0.3 ** 3: no run is left whole more often than (1 - 0.027) ** 24.
    protocol = {**REGISTERED, "gates": {**REGISTERED["gates"], "max_trials": 3}}
    found = operating_characteristics(cells(sd=0.001, void_rate=0.3), protocol)
    whole = (1 - 0.3**3) ** 24
    spread = math.sqrt(whole * (1 - whole) / found["simulations"])
    assert found["adopt_probability"][-1] == pytest.approx(whole, abs=3.5 * spread)


def test_the_simulation_goes_through_the_number_of_blocks() -> None:
    rng = np.random.default_rng(21)
    others = cells(sd=0.05)[1:]

    def found(sd: float) -> dict[str, Any]:
        logs = rng.normal(0.2, sd, (2, 12))
        return operating_characteristics([CellNoise(OPEN, logs, 0.0, 1), *others], REGISTERED)

    quiet, noisy = found(0.02), found(0.2)
    assert quiet["mean_blocks"]["4096x1x1"] == pytest.approx(12.0, abs=0.2)
    assert noisy["mean_blocks"]["4096x1x1"] == pytest.approx(18.0, abs=0.2)
    assert quiet["mean_blocks"]["512x1x1"] == 6.0
    for figures in (quiet, noisy):  # twelve blocks are no normal law, but near one
        assert 0.018 < figures["adopt_probability"][2] < 0.032


def test_the_same_noise_gives_the_same_figures() -> None:
    assert operating_characteristics(cells(), REGISTERED) == operating_characteristics(
        cells(), REGISTERED
    )


def test_too_little_to_draw_from_is_none_with_its_reason() -> None:
    few = operating_characteristics(cells(blocks=5), REGISTERED)
    assert few["adopt_probability"] is None
    assert "5 blocks in cell 4096x1x1; 6 are needed" in few["reason"]
    constant = operating_characteristics(cells(sd=0.0), REGISTERED)
    assert "constant" in constant["reason"]


# --------------------------------------------------------------------------------------------------
# The rule on arrays and the rule on events


def table(rng: np.random.Generator, challenger: float) -> dict[str, dict[int, list[float]]]:
    """Step times by arm and context, around the edges of the rule."""
    scale = {"K0": 1.3, "K1": 1.02, "A1": 1.0, "A2": 1.05, "K3": 1 / challenger}
    steps: dict[str, dict[int, list[float]]] = {name: {} for name in scale}
    for context, n in ((4096, 4), (512, 3), (16384, 3)):
        machine = rng.normal(0, 0.1, n)
        slower = 1.0 if context == 4096 else rng.choice([1.0, 1.0, 1.0, 1.4])
        for name, level in scale.items():
            own = level * (slower if name == "K3" else 1.0)
            logs = machine + rng.normal(0, 0.02, n)
            steps[name][context] = list(20 * own * np.exp(logs))
    return steps


COMPARATORS = ["K0", "A1", "A2", "K1"]


def log_ratios(steps: dict[str, dict[int, list[float]]]) -> list[npt.NDArray[np.float64]]:
    """(comparators, blocks) of the three contexts, primary first."""
    return [
        np.array([np.log(steps[c][context]) - np.log(steps["K3"][context]) for c in COMPARATORS])
        for context in (4096, 512, 16384)
    ]


def by_hand(primary: npt.NDArray[np.float64], *vetoes: npt.NDArray[np.float64]) -> bool:
    """The rule as docs/protocol.md has it, one contrast at a time, with scipy's interval."""
    lows = [scipy_stats.ttest_1samp(row, 0).confidence_interval(0.95).low for row in primary]
    ratios = [math.exp(row.mean()) for veto in vetoes for row in veto]
    return all(math.exp(low) >= 1.10 for low in lows) and all(ratio >= 0.97 for ratio in ratios)


def test_the_rule_on_many_tables_is_the_rule_on_each() -> None:
    rng = np.random.default_rng(15)
    logs = [log_ratios(table(rng, float(rng.uniform(1.08, 1.3)))) for _ in range(400)]
    expected = [by_hand(*three) for three in logs]
    assert 40 < sum(expected) < 360
    judged = [
        rule.bounds(cell(n, context), np.stack(own), DECISION)
        for (context, n), own in zip(((4096, 4), (512, 3), (16384, 3)), zip(*logs))
    ]
    assert rule.adopts(judged, DECISION).tolist() == expected


def test_the_verdict_is_the_rule_on_arrays() -> None:
    short = {
        **REGISTERED,
        "decision": {**DECISION, "bootstrap_resamples": 100},
    }
    rng = np.random.default_rng(15)
    seen = set()
    for _ in range(12):
        steps = table(rng, float(rng.uniform(1.08, 1.3)))
        verdict = decide(trial(steps, registration=short), short)
        assert verdict.outcome == (ADOPT if by_hand(*log_ratios(steps)) else KEEP)
        seen.add(("vetoed" in verdict.data["hot"]["reason"], verdict.outcome))
    assert seen == {(False, ADOPT), (False, KEEP), (True, KEEP)}


def noisy_run() -> dict[str, dict[int, list[float]]]:
    rng = np.random.default_rng(16)
    return {
        name: {
            c: list(ms * np.exp(rng.normal(0, 0.02, n)))
            for c, n in ((4096, 12), (512, 6), (16384, 6))
        }
        for name, ms in {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 22.0, "K3": 18.0}.items()
    }


def test_a_verdict_carries_them_bit_for_bit_and_the_figure_draws_them() -> None:
    events = trial(noisy_run(), missing={"K0": "pool"})
    verdict = decide(events, REGISTERED)
    found = verdict.data["characteristics"]
    assert found["challenger"] == "K3"
    assert found["simulations"] == error_rates.SIMULATIONS
    assert {0.0, 0.1, 0.15, 0.2} <= set(found["true_improvement"])
    assert decide(events.sample(frac=1, random_state=1), REGISTERED).to_json() == verdict.to_json()
    drawn = figure.draw(verdict.data, events)
    assert drawn is not None
    lines = [line.get_ydata() for line in drawn.axes[0].get_lines()]
    assert any(np.array_equal(y, found["one_close"]["adopt_probability"]) for y in lines)


def test_a_run_without_a_challenger_has_none() -> None:
    steps = noisy_run()
    del steps["K3"]
    verdict = decide(trial(steps, not_built={"K3": "no rustc", "K4": "no rustc"}), REGISTERED).data
    found = verdict["characteristics"]
    assert found["adopt_probability"] is None
    assert found["reason"] == "no challenger is in the trial"
    assert figure.draw(verdict, trial(steps)) is None
