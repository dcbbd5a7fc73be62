"""The conformance suite: the named tests, and `run`, which tries a candidate on all of them."""

from __future__ import annotations

import contextlib
import enum
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvtrial.conformance import (
    append,
    attention,
    branch,
    errors,
    holes,
    owner,
    partials,
    pool,
    rollback,
    slots,
    spill,
    walk,
)
from kvtrial.conformance.trial import Check, Trial
from kvtrial.contract import PAGE_TOKENS, POISON_VARIABLE, Candidate, Capability


class Status(enum.Enum):
    """How a named test ended."""

    PASSED = "passed"
    FAILED = "failed"
    GAP = "gap"  # the candidate does not claim the capability that the test is about


@dataclass(frozen=True)
class Outcome:
    """One named test at one page size."""

    test: str
    page_tokens: int
    status: Status
    #: What failed, check by check; the missing capability of a gap; empty for a pass.
    detail: str = ""


@dataclass(frozen=True)
class ConformanceTest:
    """A name, the capabilities that it is about, and its checks."""

    name: str
    requires: frozenset[Capability]
    checks: tuple[Check, ...]


def _test(name: str, *checks: Check, requires: Iterable[Capability] = ()) -> ConformanceTest:
    return ConformanceTest(name, frozenset(requires), checks)


TESTS = (
    _test(
        "KvAppendRequiresOwner",
        owner.closed_handle_is_stale,
        owner.many_generations,
        owner.closed_store_is_stale,
        owner.double_close_frees_once,
        owner.sessions_do_not_mix,
        requires=[Capability.OWNER],
    ),
    _test(
        "KvAppendMatchesSingles",
        append.any_n_equals_singles,
        append.every_row_at_its_place,
        append.pages_used_are_rounded_up,
        append.base_position_is_where_it_starts,
        append.positions_are_not_rewritten,
    ),
    _test(
        "KvStepsGoLayerByLayer",
        append.steps_go_layer_by_layer,
        append.boundary_verbs_wait_for_the_step,
    ),
    _test(
        "KvRollbackRestoresPrefix",
        rollback.zero_and_too_many,
        rollback.history_stays,
        rollback.draft_then_bonus,
        rollback.pages_come_back,
        requires=[Capability.ROLLBACK],
    ),
    _test(
        "KvBranchCopyOnWrite",
        branch.writers_do_not_meet,
        branch.every_fork_length,
        branch.commit_counts_from_the_fork,
        branch.moved_parent_refuses,
        branch.rollback_stops_at_forks,
        branch.branches_nest,
        branch.what_a_branch_gave_back_stays_its_ancestors,
        branch.shared_pages_count_once,
        branch.commit_copies_nothing,
        branch.exhausted_copy_changes_nothing,
        branch.branch_waits_for_the_step,
        requires=[Capability.BRANCH],
    ),
    _test(
        "KvHolesOnlyWhereAllowed",
        holes.refused_by_default,
        holes.restored_holes_need_leave_too,
        holes.left_out_positions,
        holes.far_positions_are_refused,
        holes.invalidated_positions,
        holes.a_hole_at_the_end,
        holes.a_page_of_holes_costs_nothing,
        holes.holes_stay_in_their_branch,
        requires=[Capability.HOLES],
    ),
    _test(
        "KvPoolBoundedNoStepAllocation",
        pool.bounded_by_the_ledger,
        pool.less_than_a_page_is_refused,
        pool.exhaustion_leaves_no_trace,
        pool.exhaustion_in_a_later_layer,
        pool.sessions_share_one_pool,
        pool.as_many_sessions_as_promised,
        pool.accounting_adds_up,
        pool.a_pool_of_one_page,
        pool.nothing_stays_behind,
        pool.a_rollback_copies_nothing,
        pool.a_step_allocates_nothing,
        requires=[Capability.POOL],
    ),
    _test(
        "AttentionMatchesReferenceInterpreter",
        attention.every_head_dim,
        attention.every_head_ratio,
        attention.fresh_pages_do_not_show,
        attention.uniform_weights,
        attention.one_row_is_itself,
        attention.long_sums,
        attention.wide_scores,
        attention.causal_block,
        attention.long_causal_block,
        attention.attending_changes_nothing,
        attention.a_new_row_counts_at_once,
        attention.thread_count_does_not_show,
        attention.a_nan_row_shows,
        attention.scores_near_the_largest_number_count,
        attention.scores_of_minus_infinity_weigh_nothing,
        attention.stored_numbers_round_once,
    ),
    _test(
        "AttentionMasksHoles",
        holes.masked_by_skipping,
        holes.low_scores_beside_holes,
        holes.nothing_valid_is_zero,
        holes.causal_block_skips_holes,
        requires=[Capability.HOLES],
    ),
    _test(
        "KvReserveSlotMatchesAppend",
        slots.equals_append,
        slots.many_rows_inside_a_page,
        slots.unreservable_positions,
        slots.invisible_until_committed,
        slots.commit_twice,
        slots.other_mutations_cancel,
        slots.a_second_reservation,
        slots.shared_page_is_copied_first,
        slots.neighbours_stay,
        requires=[Capability.RESERVE_SLOT],
    ),
    _test(
        "KvPartialsMerge",
        partials.position_ranges,
        partials.head_groups,
        partials.dots_of_ones,
        partials.nothing_in_the_part,
        partials.stores_by_head_group,
        partials.stores_by_position_range,
        partials.ranges_out_of_bounds,
        partials.threads_do_not_show,
        partials.after_holes_and_slots,
        requires=[Capability.PARTIALS],
    ),
    _test(
        "KvSpillRestoresBitwise",
        spill.same_bits,
        spill.valid_rows_alone,
        spill.holes_and_odd_bits,
        spill.unfinished_is_invisible,
        spill.reserved_rows_are_not_spilled,
        spill.refused_restores,
        requires=[Capability.SPILL],
    ),
    _test(
        "KvBadInputIsTyped",
        errors.wrong_arrays,
        errors.wrong_numbers,
        errors.nothing_at_all,
        errors.handles_of_another_store,
        errors.a_closed_store_stays_closed,
        errors.accepted_arrays,
        errors.appended_rows_are_copies,
        errors.numbers_that_do_not_fit,
        errors.lacking_verbs_say_so,
    ),
    _test("KvFollowsDictionaryModel", walk.random_walks),
)


def run(
    candidate: Candidate,
    page_tokens: Iterable[int] = PAGE_TOKENS,
    tests: Iterable[ConformanceTest] = TESTS,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Try ``candidate`` on every named test at every page size.

    Parameters
    ----------
    candidate : Candidate
        From any package; registered or not.
    page_tokens : iterable of int
        Page sizes P in tokens.
    tests : iterable of ConformanceTest
        By default all of `TESTS`.
    on_outcome : callable, optional
        Told each outcome as it comes.

    Returns
    -------
    list of Outcome
        One for each test and page size. Nothing is raised for what the candidate does, short of
        ending the process: `run_isolated` records that too.
    """
    outcomes = []
    chosen = tuple(tests)
    for page in page_tokens:
        for test in chosen:
            outcome = run_test(test, Trial(candidate, page))
            outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
    return outcomes


def run_test(test: ConformanceTest, trial: Trial) -> Outcome:
    """One named test at one page size, with memory poisoned; a failed check does not stop the next."""
    missing = sorted(c.value for c in test.requires - trial.candidate.capabilities)
    if missing:
        return Outcome(test.name, trial.page_tokens, Status.GAP, ", ".join(missing))
    failures = []
    with poisoned():
        for check in test.checks:
            if not trial.has(*getattr(check, "needs", ())):
                continue
            try:
                check(trial)
            except Exception as error:
                failures.append(_describe(check, error))
    status = Status.FAILED if failures else Status.PASSED
    return Outcome(test.name, trial.page_tokens, status, "\n".join(failures))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Stores opened inside fill memory that nobody may read with NaN."""
    before = os.environ.get(POISON_VARIABLE)
    os.environ[POISON_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[POISON_VARIABLE]
        else:
            os.environ[POISON_VARIABLE] = before


def _describe(check: Check, error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[1:2]
    line = f" (line {place[0].lineno})" if place else ""
    return f"{check.__module__.rsplit('.', 1)[-1]}.{check.__name__}{line}: " + (
        str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    )
