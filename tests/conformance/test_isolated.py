"""A candidate in a process of its own, in which its allocations are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtrial import candidates
from kvtrial.conformance import TESTS, isolated, run_isolated
from kvtrial.contract import Capability, UnknownCandidate


@pytest.mark.parametrize("name", list(candidates.candidates()))
def test_hostile_input_and_allocations(name: str, tmp_path: Path) -> None:
    """B18, I13: what may crash, and what only a process with a counter can see, in such a process.

    Allocations are promised by candidates that have a pool: K0, A1 and C0 are outside of that.
    """
    candidate = candidates.get(name)
    if candidate.not_built is not None:
        pytest.skip(f"{name} is not built: {candidate.not_built}")
    asked = ("KvBadInputIsTyped", "KvPoolBoundedNoStepAllocation")
    document = run_isolated(name, tmp_path / "out.json", (16,), tests=asked)
    assert document["crash"] == ""
    found = {test: document["outcomes"][test]["16"] for test in asked}
    assert found["KvBadInputIsTyped"] == {"status": "passed", "detail": ""}
    expected = "passed" if Capability.POOL in candidate.capabilities else "gap"
    allocated = found["KvPoolBoundedNoStepAllocation"]
    assert allocated["status"] == expected, allocated["detail"]


def test_an_unknown_candidate_is_typed(tmp_path: Path) -> None:
    with pytest.raises(UnknownCandidate, match=r"registered: .*K1"):
        run_isolated("K99", tmp_path / "K99.json")
    assert not (tmp_path / "K99.json").exists()


def test_each_outcome_is_told_as_it_comes(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    asked = ("KvAppendRequiresOwner", "KvStepsGoLayerByLayer")
    document = run_isolated(
        "K1",
        tmp_path / "K1.json",
        (16, 32),
        tests=asked,
        on_outcome=lambda test, page_tokens: told.append((test, page_tokens)),
    )
    assert told == [(test, page_tokens) for page_tokens in (16, 32) for test in asked]
    sizes = {test: set(found) for test, found in document["outcomes"].items()}
    assert sizes == {test: {"16", "32"} for test in asked}


def test_a_process_that_says_nothing_any_more_is_ended_in_time(tmp_path: Path) -> None:
    document = run_isolated("K1", tmp_path / "K1.json", timeout_s=0.01)
    first = f"not finished after 0.01 s, in {TESTS[0].name} at P=16"
    assert (document["passed"], document["crash"]) == (False, first)


def test_a_crash_names_the_test_that_it_was_in_and_the_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case: a kernel that ignored `valid` left a dump of its stack, and nothing said in which test."""
    asked = (
        "AttentionMasksHoles",
        "KvAppendRequiresOwner",
    )  # in whatever order: the suite has its own
    dump = 'Fatal Python error: Segmentation fault\n\nThread 0x1:\n  File "k.py", line 3 in attend\n  File "x"'

    def dies(command: object, timeout_s: float, listen: Callable[[str], None]) -> tuple[int, str]:
        listen("passed P=16 KvAppendRequiresOwner")
        return -11, dump

    monkeypatch.setattr(isolated, "_run", dies)
    said: list[str] = []
    found = run_isolated("K1", tmp_path / "K1.json", (16,), asked, echo=said.append)
    where = (
        'crashed in AttentionMasksHoles at P=16: ended by SIGSEGV: File "k.py", line 3 in attend'
    )
    assert (found["crash"], found["passed"]) == (where, False)
    assert said == ["passed P=16 KvAppendRequiresOwner"]
