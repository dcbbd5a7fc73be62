"""A candidate in a process of its own: found by its entry point, counted, and allowed to crash."""

from __future__ import annotations

import json
from pathlib import Path

import plain
import pytest

from kvtrial import candidates
from kvtrial.conformance import TESTS, run_isolated
from kvtrial.contract import Capability, UnknownCandidate
from kvtrial.measure import allocations


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package on the path, with entry points of its own."""
    metadata = tmp_path / "stranger-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[kvtrial.candidates]\nplain = plain:PLAIN\ncrashes = plain:CRASHES\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    here = Path(plain.__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{here}")
    candidates.candidates.cache_clear()
    yield
    candidates.candidates.cache_clear()


def test_a_crash_is_a_result(stranger: None, tmp_path: Path) -> None:
    document = run_isolated("crashes", tmp_path / "out" / "crashes.json", page_tokens=(16,))
    assert document["passed"] is False
    assert document["crash"].startswith("ended by SIGSEGV")
    assert document["outcomes"] == {}
    assert json.loads((tmp_path / "out" / "crashes.json").read_text()) == document


def test_a_strangers_candidate_is_tried_by_its_name(stranger: None, tmp_path: Path) -> None:
    """The NumPy store conforms, and is caught at allocating where allocations can be counted."""
    document = run_isolated("plain", tmp_path / "plain.json", page_tokens=(16,))
    counted = allocations.library() is not None
    assert document["crash"] == ""
    assert document["allocations_counted"] is counted
    assert document["failed"] == (["KvPoolBoundedNoStepAllocation"] if counted else [])
    assert list(document["outcomes"]) == [test.name for test in TESTS]
    if counted:
        detail = document["outcomes"]["KvPoolBoundedNoStepAllocation"]["16"]["detail"]
        assert detail.startswith("pool.a_step_allocates_nothing")
        assert "allocation calls" in detail


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
