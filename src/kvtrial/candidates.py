"""Finds candidates through the entry-point group ``kvtrial.candidates`` and opens their stores."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvtrial.contract import (
    CANDIDATE_NAME,
    FP32,
    Candidate,
    CandidateNotBuilt,
    InvalidArgument,
    KVStore,
    PoolExhausted,
    Profile,
    RetiredCandidate,
    StoreSpec,
    UnknownCandidate,
)
from kvtrial.contract.arguments import flag, shown
from kvtrial.host import build, selection
from kvtrial.host.printed import did_you_mean

GROUP = "kvtrial.candidates"
#: A page of a store may be so much larger than its FP32 elements, as a power of two: a row of two
#: elements is padded to 32 and a scale.
_MOST_DOUBLINGS = 10


@functools.cache
def candidates() -> dict[str, Candidate]:
    """Every registered candidate by name, sorted. Ours are registered as a stranger's are."""
    points = sorted(entry_points(group=GROUP), key=lambda p: p.name)
    return {point.name: _load(point) for point in points if _has_a_name(point)}


def _has_a_name(point: EntryPoint) -> bool:
    """Whether it can be a candidate at all: its name becomes that of files."""
    if CANDIDATE_NAME.fullmatch(point.name):
        return True
    warnings.warn(
        f"entry point {point.name!r} of {GROUP} is left out: a name has letters, digits, '.', '_' and '-'",
        stacklevel=3,
    )
    return False


def _load(point: EntryPoint) -> Candidate:
    """The candidate behind an entry point. One that does not load costs its own column, not the run."""
    try:
        candidate = point.load()
        if not isinstance(candidate, Candidate):
            raise TypeError(f"it is a {type(candidate).__name__}, not a kvtrial.contract.Candidate")
        if candidate.name != point.name:
            raise ValueError(f"it names candidate {candidate.name!r}; the two names must be equal")
    except (Exception, SystemExit) as error:  # another's module may do anything
        return Candidate(
            name=point.name,
            title="(does not load)",
            role="contender",
            profile=FP32,
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
    if not isinstance(name, str) or name not in known:
        near = did_you_mean(name, known) if isinstance(name, str) else ""
        raise UnknownCandidate(
            f"no candidate {shown(name)}; registered: {', '.join(known) or 'none'}{near}"
        )
    return known[name]


def choose(
    name: str | None, profile: Profile | str | None, shape: Mapping[str, Any]
) -> tuple[Candidate, str]:
    """The candidate that `open_store` opens for a head shape, and why that one, in words.

    ``shape``: q_heads, kv_heads and head_dim.

    Raises
    ------
    UnknownCandidate, InvalidArgument
    """
    if name is not None:
        if profile is not None:
            raise InvalidArgument(
                f"both name {name!r} and profile {_profile_text(profile)!r} are given; give one of the two"
            )
        return get(name), "as asked"
    selected = selection.load(shape)
    default = get(selected.default)
    # The FP32 store last: it is what `fp32` names where the default is one too.
    stores = {default.profile.name: selected.default, FP32.name: selected.fp32}
    if profile is None:
        return default, selected.origin
    asked = _profile_text(profile)
    if asked not in stores:
        allowed = ", ".join(f"{key} ({store})" for key, store in sorted(stores.items()))
        raise InvalidArgument(
            f"profile {asked!r} was not adopted on this machine for these heads; allowed: {allowed}. Any other "
            "store can be opened by its name"
        )
    return get(stores[asked]), f"{asked} was asked for; {selected.origin}"


def _profile_text(profile: Profile | str) -> str:
    if isinstance(profile, str):
        return profile
    return profile.name if isinstance(profile, Profile) else shown(profile)


def open_store(
    name: str | None = None,
    *,
    profile: Profile | str | None = None,
    trial: bool = False,
    **spec: Any,
) -> KVStore:
    """Open a store by name, or the adopted one of a numerical profile.

    Parameters
    ----------
    name : str, optional
        A registered candidate; None for the default of config/selection.yaml for these heads (K1 before any
        verdict).
    profile : Profile or str, optional
        Without a name: ``"fp32"`` for the FP32 store that stays available whatever the default is, or the
        default's own profile.
    trial : bool
        Open a retired store all the same.
    **spec
        The fields of `kvtrial.contract.StoreSpec`: layers, q_heads, kv_heads, head_dim, page_tokens,
        budget_bytes (bytes), ledger, base_position, kv_head_range, threads.

    Raises
    ------
    UnknownCandidate, RetiredCandidate, CandidateNotBuilt, StaleBuild, InvalidArgument, PoolExhausted
    """
    try:
        parsed = StoreSpec(**spec)
    except TypeError as error:
        raise InvalidArgument(f"open_store: {error}; see kvtrial.contract.StoreSpec") from None
    candidate, _ = choose(name, profile, spec)
    trial = flag(trial, "trial")
    selected = selection.load(spec)
    if candidate.name in selected.retired and not trial:
        raise RetiredCandidate(
            f"{candidate.name} was retired by the adopted verdict ({selected.run_id}); use "
            f"{selected.default}, or pass trial=True (in Python) to open it for a trial"
        )
    _refuse_not_built(candidate)
    return candidate.open(parsed)


def pool_bytes(
    name: str | None,
    shape: Mapping[str, Any],
    *,
    tokens: int,
    sessions: int = 1,
    page_tokens: int = 16,
    spare_pages: int = 1,
) -> int:
    """The budget with which a store holds ``sessions`` of ``tokens`` positions each.

    Parameters
    ----------
    name : str or None
        As `open_store` takes it.
    shape : mapping
        layers, q_heads, kv_heads and head_dim.
    spare_pages : int
        Pages for each session and layer beyond those.

    Raises
    ------
    UnknownCandidate, CandidateNotBuilt, StaleBuild, InvalidArgument
    """
    candidate, _ = choose(name, None, shape)
    _refuse_not_built(candidate)
    spec = StoreSpec(**{**shape, "layers": 1}, page_tokens=page_tokens, budget_bytes=1)
    pages = -(-tokens // page_tokens) + spare_pages
    return sessions * int(shape["layers"]) * pages * page_bytes(candidate, spec)


@functools.cache
def page_bytes(candidate: Candidate, spec: StoreSpec) -> int:
    """Bytes of budget that a page of one layer takes: the store is asked, which may pad its rows.

    ``spec`` has one layer; its ``budget_bytes`` does not count.
    """
    budget = 8 * spec.page_tokens * spec.local_kv_heads * spec.head_dim
    for doubled in range(_MOST_DOUBLINGS):
        with contextlib.suppress(PoolExhausted):
            return _page_bytes_in(candidate, spec, budget << doubled)
    return _page_bytes_in(candidate, spec, budget << _MOST_DOUBLINGS)


def _page_bytes_in(candidate: Candidate, spec: StoreSpec, budget_bytes: int) -> int:
    store = candidate.open(dataclasses.replace(spec, budget_bytes=budget_bytes))
    try:
        return max(store.page_nbytes, store.row_bytes * spec.page_tokens)
    finally:
        store.close()


def _refuse_not_built(candidate: Candidate) -> None:
    if candidate.not_built is not None:
        raise CandidateNotBuilt(f"{candidate.name} is not built: {candidate.not_built}")
    build.refuse_stale()
