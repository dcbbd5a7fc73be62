"""Finding candidates and opening stores by name."""

from __future__ import annotations

import contextlib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import kvtrial
from kvtrial import candidates
from kvtrial.contract import (
    CandidateNotBuilt,
    InvalidArgument,
    RetiredCandidate,
    UnknownCandidate,
)
from kvtrial.host.machine import machine_class

SHAPE = {"layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 8, "budget_bytes": 1 << 20}


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownCandidate, match=r"K9.*K1.*K2"):
        kvtrial.open_store("K9", **SHAPE)


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(InvalidArgument, match="heads_per_kv"):
        kvtrial.open_store("K1", **SHAPE, heads_per_kv=3)


@pytest.mark.parametrize("name", sorted(candidates.candidates()))
def test_a_session_without_a_store_can_not_be_made(name: str) -> None:
    """Its verbs would look behind a pointer that leads nowhere."""
    if candidates.get(name).not_built is not None:
        pytest.skip(str(candidates.get(name).not_built))
    with contextlib.closing(kvtrial.open_store(name, **SHAPE, trial=True)) as store:
        kind = type(store.open_session())
        with pytest.raises(TypeError, match=r"comes from open_session\(\)"):
            kind()


@pytest.mark.parametrize(
    "value", ["kvtrial.no_such_module:K", "kvtrial.contract:NoSuchName", "kvtrial.contract:merge"]
)
def test_a_candidate_that_does_not_load_costs_its_own_column(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint(name="X1", value=value, group=candidates.GROUP)
    every = [*candidates.entry_points(group=candidates.GROUP), broken]
    monkeypatch.setattr(candidates, "entry_points", lambda group: every)
    candidates.candidates.cache_clear()
    try:
        found = candidates.candidates()
        assert found["K1"].not_built is None
        assert value in str(found["X1"].not_built)
        with pytest.raises(CandidateNotBuilt, match="X1"):
            kvtrial.open_store("X1", **SHAPE)
    finally:
        candidates.candidates.cache_clear()


def test_the_adopted_selection_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    (tmp_path / "selection.yaml").write_text(
        f"{machine_class()}:\n  default: K2\n  reference: K1\n  retired: [K0]\n  run_id: r\n"
    )
    assert "fp16" in kvtrial.open_store(**SHAPE).page_format
    with pytest.raises(RetiredCandidate, match="trial=True"):
        kvtrial.open_store("K0", **SHAPE)
    kvtrial.open_store("K0", **SHAPE, trial=True).close()


def test_k1_is_the_default_before_any_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTRIAL_CONFIG", str(tmp_path))
    assert "fp32" in kvtrial.open_store(**SHAPE).page_format
