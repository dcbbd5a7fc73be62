"""A candidate in a process of its own, in which its allocations are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtrial import candidates
from kvtrial.conformance import run_isolated
from kvtrial.contract import Capability, UnknownCandidate


@pytest.mark.parametrize("name", list(candidates.candidates()))
def test_a_decode_step_allocates_nothing(name: str, tmp_path: Path) -> None:
    """I13, on every candidate that has a pool; K0 is outside of the promise."""
    candidate = candidates.get(name)
    if candidate.not_built is not None:
        pytest.skip(f"{name} is not built: {candidate.not_built}")
    document = run_isolated(
        name, tmp_path / "out.json", (16,), tests=("KvPoolBoundedNoStepAllocation",)
    )
    status = document["outcomes"]["KvPoolBoundedNoStepAllocation"]["16"]
    expected = "passed" if Capability.POOL in candidate.capabilities else "gap"
    assert status["status"] == expected, status["detail"]


def test_an_unknown_candidate_is_typed(tmp_path: Path) -> None:
    with pytest.raises(UnknownCandidate, match=r"registered: .*K1"):
        run_isolated("K99", tmp_path / "K99.json")
    assert not (tmp_path / "K99.json").exists()
