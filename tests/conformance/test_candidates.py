"""The suite on every registered candidate, the real component with nothing stubbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtrial import candidates, reference
from kvtrial.conformance import TESTS, ConformanceTest, Outcome, Status, Trial, run_test
from kvtrial.contract import PAGE_TOKENS, Candidate

CANDIDATES = list(candidates.candidates().values())


@pytest.fixture(scope="module", autouse=True)
def each_question_once() -> Iterator[None]:
    """Arms are asked the same: the oracle answers each question once, its tolerance once a profile."""
    known: dict[bytes, Any] = {}

    def once(answer: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*question: Any) -> Any:
            digest = xxhash.xxh3_128(answer.__name__.encode())
            for part in question:
                is_array = isinstance(part, np.ndarray)
                digest.update(repr((part.shape, part.dtype) if is_array else part).encode())
                digest.update(part.tobytes() if is_array else b"")
            key = digest.digest()
            if key not in known:
                known[key] = answer(*question)
                known[key].flags.writeable = False
            return known[key]

        return asked

    with pytest.MonkeyPatch.context() as patch:
        for name in ("attention", "tolerance"):
            patch.setattr(reference, name, once(getattr(reference, name)))
        yield


@pytest.fixture(params=CANDIDATES, ids=lambda candidate: candidate.name)
def candidate(request: pytest.FixtureRequest) -> Candidate:
    """Each registered candidate that was built here."""
    found: Candidate = request.param
    if found.not_built is not None:
        pytest.skip(f"{found.name} is not built: {found.not_built}")
    return found


@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name)
def test_conforms(candidate: Candidate, test: ConformanceTest, page_tokens: int) -> None:
    missing = sorted(c.value for c in test.requires - candidate.capabilities)
    outcome = run_test(test, Trial(candidate, page_tokens))
    if missing:
        # A gap of the capability table is recorded as one, never a pass.
        assert outcome == Outcome(test.name, page_tokens, Status.GAP, ", ".join(missing))
    else:
        assert outcome == Outcome(test.name, page_tokens, Status.PASSED), outcome.detail


def test_the_capability_table() -> None:
    """K0 lacks branch, holes and pool; every arm that can win lacks nothing that is required."""
    table = {c.name: c.missing_capabilities for c in CANDIDATES}
    assert table.pop("C0") == ("branch", "holes", "pool", "spill")
    assert {"branch", "holes", "pool"} <= set(table.pop("K0"))
    assert set(table.pop("A1")) <= {"branch", "holes", "pool", "spill"}
    arms = ["A2", "K1", "K1C", "K2", "K3", "K4", "K5", "K1T", "K3T", "K2T"]
    arms += ["K5T", "K6", "K6N", "K7"]
    assert table == dict.fromkeys(arms, ())
