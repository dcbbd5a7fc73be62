"""All faults that are put into the code on purpose; here those of packed weights and of the decision."""

from __future__ import annotations

from mutant import Mutant
from mutants_cold import COLD
from mutants_hot import HOT

_PANELS, _UNPACKED = "src/kvtrial/native/panels.h", "src/kvtrial/native/unpacked.h"


def _weights(name: str, old: str, new: str, *ways: str, file: str = _PANELS) -> Mutant:
    """A fault in the products of packed weights: ``ways`` are kinds of block and kernels."""
    test = "test_quantised_products_round_each_block_of_activations"
    red = tuple(f"tests/unit/test_engine_weights.py::{test}[5-66-96-{way}]" for way in ways)
    return Mutant(f"weights: {name}", ("engine",), file, old, new, red)


ENGINE = [
    _weights(
        "which activations meet the high nibbles",
        "q_add_sums(dots[i], high, q_load_four(at + 16))",
        "q_add_sums(dots[i], high, q_load_four(at))",
        "Q4_1-decoded",
    ),
    _weights(
        "where the high nibbles are unpacked to",
        "q_store_i8(to + 8 * 32, q_high_nibbles(both))",
        "q_store_i8(to + 6 * 32, q_high_nibbles(both))",
        "Q4_1-prefilled",
        file=_UNPACKED,
    ),
    _weights(
        "what a byte was raised by",
        "q_mul(scale, q_set(-128))",
        "q_mul(scale, q_set(-127))",
        "Q8_0-prefilled",
        file=_UNPACKED,
    ),
    _weights(
        "a row's place in its panel of nibbles",
        "memcpy(vectors + 32 * s + 4 * r, both + 4 * s, 4);",
        "memcpy(vectors + 32 * s + 4 * (r ^ 1), both + 4 * s, 4);",
        "Q4_1-decoded",
        "Q4_1-prefilled",
    ),
    _weights(
        "a row's place in its panel of bytes",
        "memcpy(vectors + 32 * s + 4 * r, unit->codes + 4 * s, 4);",
        "memcpy(vectors + 32 * s + 4 * (r ^ 1), unit->codes + 4 * s, 4);",
        "Q8_0-decoded",
        "Q8_0-prefilled",
    ),
]

_DECISION, _UNIT = "src/kvtrial/decision", "tests/unit"
_PLAN, _FIGURES = "src/kvtrial/measure/plan.py", "src/kvtrial/measure/figures.py"


def _rule(name: str, file: str, old: str, new: str, *red: str) -> Mutant:
    """A fault in the decision or in what it asks of the measuring: ``red`` are ids under tests/unit."""
    return Mutant(name, ("decision",), file, old, new, tuple(f"{_UNIT}/{test}" for test in red))


DECISION = [
    _rule(
        "plan: the spread of the first blocks is not allowed for",
        _PLAN,
        "        if n > self.first >= 2:\n",
        "        if False:\n",
        "test_plan.py::test_bounds_after_an_extension_are_the_wider_of_the_two[False-24]",
        "test_plan.py::test_the_interval_covers_whatever_number_the_spread_asks_for[0.02]",
    ),
    _rule(
        "plan: blocks beyond the first have a say in their number",
        _PLAN,
        "spread = logs[..., : self.first].std(",
        "spread = logs.std(",
        "test_plan.py::test_blocks_beyond_the_first_have_no_say_in_their_number",
    ),
    _rule(
        "plan: the cap on void runs is one more",
        _PLAN,
        "np.asarray(void) > self.most_void",
        "np.asarray(void) > self.most_void + 1",
        "test_plan.py::test_a_cell_is_lost_past_the_registered_void_runs[9-True]",
    ),
    _rule(
        "void: a stop is let through",
        "src/kvtrial/measure/void.py",
        "past = own & ~(value <= limits[ceiling.limit])",
        "past = own & (value > 1000 * limits[ceiling.limit])",
        "test_validity.py::test_a_stop_in_one_step_is_void_and_enters_no_average",
    ),
    _rule(
        "figures: steps are paired in their order, whatever their rounds",
        _FIGURES,
        "pairs += [(ours[n], theirs[n]) for n in sorted(ours.keys() & theirs.keys())]",
        "pairs += list(zip(ours.values(), theirs.values()))",
        "test_figures.py::test_only_rounds_that_both_took_part_in_count",
    ),
    _rule(
        "figures: a time of 0 hides in the total",
        _FIGURES,
        "return bool(np.isfinite(pairs).all() and (pairs > 0).all())",
        "return bool(np.isfinite(pairs).all() and (pairs.sum(axis=0) > 0).all())",
        "test_decide_evidence.py::test_a_bad_step_does_not_hide_in_a_blocks_total[0.0]",
    ),
    _rule(
        "rotation: the mirrored rows of an odd square are left out",
        "src/kvtrial/measure/rotation.py",
        "return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]",
        "return rows",
        "test_rotation.py::test_a_square_is_balanced_in_places_and_in_successors[5]",
    ),
    _rule(
        "rule: the veto asks for the interval",
        f"{_DECISION}/rule.py",
        "return np.asarray(bounds.mean >= worst_allowed(",
        "return np.asarray(bounds.low >= worst_allowed(",
        "test_decide.py::test_a_veto_passed_without_its_interval_clearing_is_said",
    ),
    _rule(
        "rule: without its slack",
        f"{_DECISION}/rule.py",
        'math.log1p(decision[at_least]) - decision["relative_slack"]',
        "math.log1p(decision[at_least])",
        "test_decide.py::test_the_edge_of_adoption[within-the-slack]",
    ),
    _rule(
        "eligibility: a doubt removes an incumbent from what has to be beaten",
        f"{_DECISION}/eligibility.py",
        "if self.built(n) and n not in controls",
        "if not self.doubts(n) and n not in controls",
        "test_decide_evidence.py::test_issue_19_a_doubt_about_k1_does_not_adopt_an_arm_that_is_7_percent_faster",
    ),
    _rule(
        "verdict: a stage without a complete attempt is decided by what there is",
        f"{_DECISION}/verdict.py",
        'if not attempts.get(stage, {}).get("complete"):',
        "if stage not in attempts:",
        "test_decide_evidence.py::test_a_stage_without_a_complete_attempt_decides_nothing[m2]",
    ),
    _rule(
        "verdict: the extension is not waited for",
        f"{_DECISION}/verdict.py",
        "if (why := measured.short(cell)) is not None:",
        "if False and (why := measured.short(cell)) is not None:",
        "test_decide_evidence.py::test_a_primary_cell_that_was_not_extended_as_its_plan_asks_decides_nothing",
    ),
    _rule(
        "contrasts: a block that lacks an arm is cut out",
        f"{_DECISION}/contrasts.py",
        "            if lacking:\n",
        "            if False:\n",
        "test_decide_evidence.py::test_an_arm_missing_from_one_block_is_inconclusive_never_cut_to_fit",
    ),
    _rule(
        "language: the better mean stays",
        f"{_DECISION}/language.py",
        'if primary.low[0] > decision["relative_slack"] and',
        'if primary.mean[0] > decision["relative_slack"] and',
        "test_decide.py::test_the_arm_that_stays_does_not_flip_with_noise",
    ),
    _rule(
        "known answers: any miss voids",
        f"{_DECISION}/known_answers.py",
        "CERTAIN = 0.999",
        "CERTAIN = 0.95",
        "test_known_answers.py::test_only_an_interval_at_99_9_percent_that_misses_voids_the_method[1-second]",
    ),
    _rule(
        "output: what was not compared is right",
        f"{_DECISION}/output.py",
        "    for metric in _EVIDENCE:\n",
        "    for metric in ():\n",
        "test_output.py::test_timed_steps_without_evidence_show_nothing[m2/output_error]",
    ),
    _rule(
        "running: the confidence does not allow for the number of profiles",
        f"{_DECISION}/running.py",
        '(1 - decision["confidence"]) / max(1, len(names))',
        '(1 - decision["confidence"])',
        "test_what_to_run.py::test_the_confidence_allows_for_the_number_of_profiles",
    ),
    _rule(
        "running: the quality is not asked",
        f"{_DECISION}/running.py",
        'if not evidence["shown"]:',
        "if False:",
        "test_what_to_run.py::test_a_profile_whose_quality_is_not_shown_is_not_run",
    ),
    _rule(
        "error rates: the simulation has an interval of its own",
        f"{_DECISION}/error_rates.py",
        "cell.plan.bounds(logs[own, :, :n])",
        "SamplingPlan(int(n), int(n)).bounds(logs[own, :, :n])",
        "test_error_rates.py::test_a_planted_fault_is_seen[plain-0.0275]",
    ),
    _rule(
        "error rates: void runs end nothing",
        f"{_DECISION}/error_rates.py",
        "finished &= ~cell.plan.lost(void)",
        "finished &= True",
        "test_error_rates.py::test_void_runs_past_the_cap_end_a_run[0.5]",
    ),
]

MUTANTS = [*HOT, *COLD, *ENGINE, *DECISION]
