"""The suite itself: a right store passes, wrong ones are caught by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plain import PlainSession, candidate
from wrong import WRONG

from kvtrial.conformance import TESTS, Outcome, Status, Trial, run, run_test
from kvtrial.conformance.isolated import result, write
from kvtrial.contract import PAGE_TOKENS, Capability

BY_NAME = {test.name: test for test in TESTS}


@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
def test_a_right_candidate_passes_everything(page_tokens: int) -> None:
    outcomes = run(candidate("plain", PlainSession), [page_tokens])
    assert [o.test for o in outcomes] == list(BY_NAME)
    assert [o for o in outcomes if o.status is not Status.PASSED] == []


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_candidate_is_caught_by_name(wrong: type[PlainSession]) -> None:
    outcome = run_test(BY_NAME[WRONG[wrong]], Trial(candidate("wrong", wrong), 16))
    assert outcome.status is Status.FAILED
    assert outcome.detail


def test_gaps_name_the_capability() -> None:
    lacking = dataclasses.replace(
        candidate("lacking", PlainSession),
        capabilities=frozenset({Capability.OWNER, Capability.ROLLBACK}),
    )
    outcome = run_test(BY_NAME["KvBranchCopyOnWrite"], Trial(lacking, 16))
    assert outcome == Outcome("KvBranchCopyOnWrite", 16, Status.GAP, "branch")
    # Claiming less than the verbs do is no way out: a lacking verb has to say so.
    assert run_test(BY_NAME["KvBadInputIsTyped"], Trial(lacking, 16)).status is Status.FAILED


def test_plan_names_are_registered() -> None:
    assert set(BY_NAME) >= {
        "KvAppendRequiresOwner",
        "KvRollbackRestoresPrefix",
        "KvBranchCopyOnWrite",
        "KvHolesOnlyWhereAllowed",
        "KvPoolBoundedNoStepAllocation",
        "AttentionMatchesReferenceInterpreter",
        "AttentionMasksHoles",
        "KvReserveSlotMatchesAppend",
        "KvPartialsMerge",
        "KvSpillRestoresBitwise",
    }


def test_the_document_counts_gaps_apart_from_failures(tmp_path: Path) -> None:
    outcomes = [
        Outcome("A", 16, Status.PASSED),
        Outcome("A", 32, Status.FAILED, "why"),
        Outcome("B", 16, Status.GAP, "branch"),
    ]
    plain = candidate("plain", PlainSession)
    document = result(plain, outcomes)
    assert document["passed"] is False
    assert document["failed"] == ["A"]
    assert document["gaps"] == ["branch"]
    assert document["outcomes"]["A"]["32"] == {"status": "failed", "detail": "why"}
    assert result(plain, outcomes[:1])["passed"] is True
    assert result(plain, outcomes[2:])["passed"] is True
    assert result(plain, [])["passed"] is False
    assert result(plain, outcomes[:1], crash="ended by SIGSEGV")["passed"] is False
    write(tmp_path / "deep" / "plain.json", document)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["plain.json"]
