"""Finds candidates through the entry-point group ``kvtrial.candidates`` and opens their stores."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvtrial.contract import (
    Candidate,
    CandidateNotBuilt,
    InvalidArgument,
    KVStore,
    Profile,
    RetiredCandidate,
    StoreSpec,
    UnknownCandidate,
)
from kvtrial.host import build, selection

GROUP = "kvtrial.candidates"


@functools.cache
def candidates() -> dict[str, Candidate]:
    """Every registered candidate by name, sorted. Ours are registered as a stranger's are."""
    points = sorted(entry_points(group=GROUP), key=lambda p: p.name)
    return {point.name: _load(point) for point in points}


def _load(point: EntryPoint) -> Candidate:
    """The candidate behind an entry point. One that does not load costs its own column, not the run."""
    try:
        candidate = point.load()
        if not isinstance(candidate, Candidate):
            raise TypeError(f"it is a {type(candidate).__name__}, not a kvtrial.contract.Candidate")
        if candidate.name != point.name:
            raise ValueError(f"it names candidate {candidate.name!r}; the two names must be equal")
    except Exception as error:
        return Candidate(
            name=point.name,
            title="(does not load)",
            role="contender",
            profile=Profile.FP32,
            language="unknown",
            owner="unknown",
            layout="unknown",
            capabilities=frozenset(),
            open=_refuse,
            not_built=f"entry point {point.value}: {type(error).__name__}: {error}",
        )
    return candidate


def _refuse(spec: StoreSpec) -> KVStore:
    raise CandidateNotBuilt("its entry point does not load; see its not_built")


def get(name: str) -> Candidate:
    """The candidate of that name; `UnknownCandidate` lists the known ones."""
    known = candidates()
    if name not in known:
        raise UnknownCandidate(f"no candidate {name!r}; registered: {', '.join(known) or 'none'}")
    return known[name]


def open_store(name: str | None = None, *, trial: bool = False, **spec: Any) -> KVStore:
    """Open a store by name, or the adopted default.

    Parameters
    ----------
    name : str, optional
        A registered candidate; None for the default of config/selection.yaml (K1 before any verdict).
    trial : bool
        Open a retired store all the same.
    **spec
        The fields of `kvtrial.contract.StoreSpec`: layers, q_heads, kv_heads, head_dim, page_tokens,
        budget_bytes (bytes), ledger, base_position, kv_head_range, threads.

    Raises
    ------
    UnknownCandidate, RetiredCandidate, CandidateNotBuilt, StaleBuild, InvalidArgument, PoolExhausted
    """
    selected = selection.load()
    candidate = get(name or selected.default)
    if candidate.name in selected.retired and not trial:
        raise RetiredCandidate(
            f"{candidate.name} was retired by the adopted verdict ({selected.run_id}); use "
            f"{selected.default}, or pass trial=True to open it for a trial"
        )
    if candidate.not_built is not None:
        raise CandidateNotBuilt(f"{candidate.name} is not built: {candidate.not_built}")
    build.refuse_stale()
    try:
        parsed = StoreSpec(**spec)
    except TypeError as error:
        raise InvalidArgument(f"open_store: {error}; see kvtrial.contract.StoreSpec") from None
    return candidate.open(parsed)
