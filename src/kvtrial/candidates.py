"""Finds candidates through the entry-point group ``kvtrial.candidates`` and opens their stores."""

from __future__ import annotations

import functools
import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvtrial.contract import (
    CANDIDATE_NAME,
    Candidate,
    CandidateNotBuilt,
    InvalidArgument,
    KVStore,
    Profile,
    RetiredCandidate,
    StoreSpec,
    UnknownCandidate,
    shown,
)
from kvtrial.host import build, selection

GROUP = "kvtrial.candidates"


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
    if not isinstance(name, str) or name not in known:
        raise UnknownCandidate(
            f"no candidate {shown(name)}; registered: {', '.join(known) or 'none'}"
        )
    return known[name]


def choose(name: str | None = None, profile: Profile | str | None = None) -> tuple[Candidate, str]:
    """The candidate that `open_store` opens, and why that one, in words.

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
    selected = selection.load()
    default = get(selected.default)
    # The FP32 store last: it is what `fp32` names where the default is one too.
    stores = {default.profile.value: selected.default, Profile.FP32.value: selected.fp32}
    if profile is None:
        return default, selected.origin
    asked = _profile_text(profile)
    if asked not in stores:
        allowed = ", ".join(f"{key} ({store})" for key, store in sorted(stores.items()))
        raise InvalidArgument(
            f"profile {asked!r} was not adopted on this machine; allowed: {allowed}. Any other store can be "
            "opened by its name"
        )
    return get(stores[asked]), f"{asked} was asked for; {selected.origin}"


def _profile_text(profile: Profile | str) -> str:
    return profile.value if isinstance(profile, Profile) else str(profile)


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
        A registered candidate; None for the default of config/selection.yaml (K1 before any verdict).
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
    candidate, _ = choose(name, profile)
    selected = selection.load()
    if candidate.name in selected.retired and not trial:
        raise RetiredCandidate(
            f"{candidate.name} was retired by the adopted verdict ({selected.run_id}); use "
            f"{selected.default}, or pass trial=True (in Python) to open it for a trial"
        )
    if candidate.not_built is not None:
        raise CandidateNotBuilt(f"{candidate.name} is not built: {candidate.not_built}")
    build.refuse_stale()
    try:
        parsed = StoreSpec(**spec)
    except TypeError as error:
        raise InvalidArgument(f"open_store: {error}; see kvtrial.contract.StoreSpec") from None
    return candidate.open(parsed)
