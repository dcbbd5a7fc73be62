"""What every check is handed, and the helpers that checks are written with.

A check is a function of one `Trial`. It fails by raising: `require` and `raises` say what was wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial import reference
from kvtrial.candidates import page_bytes
from kvtrial.contract import (
    F32,
    I64,
    Candidate,
    Capability,
    KVSession,
    KVStore,
    Profile,
    StaleOwner,
    StoreSpec,
)


class CheckFailed(AssertionError):
    """A store broke the contract; the message says how."""


Check = Callable[["Trial"], None]


def require(condition: Any, message: str) -> None:
    """Fail the check with ``message`` unless ``condition`` holds."""
    if not condition:
        raise CheckFailed(message)


@contextlib.contextmanager
def raises(*errors: type[Exception]) -> Iterator[None]:
    """The body must raise one of ``errors``, with a message."""
    names = " or ".join(e.__name__ for e in errors)
    try:
        yield
    except errors as error:
        require(str(error).strip(), f"{type(error).__name__} came without a message")
    except Exception as error:
        raise CheckFailed(f"expected {names}, got {type(error).__name__}: {error}") from error
    else:
        raise CheckFailed(f"expected {names}, nothing was raised")


def needs(*capabilities: Capability) -> Callable[[Check], Check]:
    """Mark a check that only applies to candidates with these capabilities as well."""

    def mark(check: Check) -> Check:
        check.needs = frozenset(capabilities)  # type: ignore[attr-defined]
        return check

    return mark


@dataclass(frozen=True)
class Trial:
    """One candidate at one page size."""

    candidate: Candidate
    page_tokens: int

    def has(self, *capabilities: Capability) -> bool:
        """Whether the candidate claims all of them."""
        return self.candidate.capabilities.issuperset(capabilities)

    @property
    def profile(self) -> Profile:
        return self.candidate.profile

    @contextlib.contextmanager
    def store(
        self,
        pages: int = 64,
        *,
        layers: int = 2,
        q_heads: int = 6,
        kv_heads: int = 3,
        head_dim: int = 32,
        **spec: Any,
    ) -> Iterator[KVStore]:
        """An open store with room for ``pages`` pages; exactly that many where it has pages."""
        shape = {
            "layers": layers,
            "q_heads": q_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "page_tokens": self.page_tokens,
            **spec,
        }
        one_layer = StoreSpec(**{**shape, "layers": 1, "budget_bytes": 1, "ledger": None})
        budget = pages * page_bytes(self.candidate, one_layer)
        store = self.candidate.open(StoreSpec(budget_bytes=budget, **shape))
        if store.page_nbytes and store.pages_total != pages:
            budget += (pages - store.pages_total) * store.page_nbytes
            store.close()
            store = self.candidate.open(StoreSpec(budget_bytes=budget, **shape))
            require(
                store.pages_total == pages,
                f"{budget} bytes give {store.pages_total} pages of {store.page_nbytes} bytes; "
                f"expected {pages}: the pool takes as many whole pages as fit",
            )
        try:
            yield store
        finally:
            with contextlib.suppress(StaleOwner):  # a check may have closed it
                store.close()


# --------------------------------------------------------------------------------------------------
# Rows that name themselves


def at(start: int, stop: int) -> I64:
    """Positions [start, stop)."""
    return np.arange(start, stop, dtype=np.int64)


def rows(store: KVStore, layer: int, positions: Iterable[int], tag: int = 0) -> tuple[F32, F32]:
    """K and V of shape (n, local H_kv, D), a function of (tag, layer, position) alone."""
    spec = store.spec
    low, high = spec.heads
    made = [_row(tag, layer, int(p), spec.kv_heads, spec.head_dim)[:, low:high] for p in positions]
    if not made:
        empty = np.zeros((0, high - low, spec.head_dim), np.float32)
        return empty, empty.copy()
    both = np.stack(made)
    return np.ascontiguousarray(both[:, 0]), np.ascontiguousarray(both[:, 1])


@functools.lru_cache(maxsize=8192)
def _row(tag: int, layer: int, position: int, kv_heads: int, head_dim: int) -> F32:
    """K and V (2, H_kv, D) of one position, read-only."""
    random = np.random.default_rng([tag, layer, position])
    row = random.standard_normal((2, kv_heads, head_dim), np.float32)
    row.flags.writeable = False
    return row


def queries(store: KVStore, n: int | None = None, seed: int = 7) -> F32:
    """q of shape (H_q, D), or (n, H_q, D)."""
    shape = (store.spec.q_heads, store.spec.head_dim)
    return np.random.default_rng(seed).standard_normal(
        shape if n is None else (n, *shape), np.float32
    )


def fill(session: KVSession, positions: Iterable[int], tag: int = 0) -> None:
    """Append the rows of ``positions`` to every layer: one whole step."""
    where = np.asarray(list(positions), np.int64)
    for layer in range(session.store.spec.layers):
        session.append(layer, where, *rows(session.store, layer, where, tag))


def fill_singly(session: KVSession, positions: Iterable[int], tag: int = 0) -> None:
    """The same as `fill`, a step for each position."""
    for position in positions:
        fill(session, [position], tag)


def require_rows(
    trial: Trial, session: KVSession, layer: int, positions: Iterable[int], tag: int, what: str
) -> None:
    """The layer holds the rows of ``tag`` at ``positions``, as its profile stores them."""
    where = np.asarray(list(positions), np.int64)
    got = session.read(layer, where)
    for name, read, given in zip("kv", got, rows(session.store, layer, where, tag), strict=True):
        require(read.dtype == np.float32, f"read gave {name} as {read.dtype}")
        require(read.shape == given.shape, f"read gave {name} {read.shape}, not {given.shape}")
        bad = np.abs(read.astype(np.float64) - given) > trial.profile.storage_bound(given)
        if bad.any() or not np.isfinite(read).all():
            row = int(np.flatnonzero((bad | ~np.isfinite(read)).any(axis=(1, 2)))[0])
            raise CheckFailed(
                f"{what}: layer {layer} position {where[row]} does not hold its own {name} row"
            )


# --------------------------------------------------------------------------------------------------
# Bitwise snapshots


def contents(session: KVSession) -> list[tuple[Any, ...]]:
    """Everything that a session shows, layer by layer: length, bitmap, rows, as bytes."""
    shown = []
    for layer in range(session.store.spec.layers):
        valid = session.valid(layer)
        where = session.store.spec.base_position + np.flatnonzero(valid).astype(np.int64)
        k, v = session.read(layer, where)
        shown.append((session.length(layer), valid.tobytes(), k.tobytes(), v.tobytes()))
    return shown


def attended(session: KVSession) -> bytes:
    """Attention of a fixed query over every layer, as bytes."""
    q = queries(session.store)
    out = np.empty_like(q)
    seen = b""
    for layer in range(session.store.spec.layers):
        session.attend(layer, q, out, 0.25)
        seen += out.tobytes()
    return seen


def ledger_of(store: KVStore, sessions: Iterable[KVSession]) -> tuple[Any, ...]:
    """Page tables, free pages and reference counts, after checking that they agree (A14)."""
    tables = [
        tuple(session.page_table(layer).page_ids.tolist())
        for session in sessions
        for layer in range(store.spec.layers)
    ]
    counts = store.reference_counts()
    mapped = [page for table in tables for page in table if page >= 0]
    expected = np.bincount(np.asarray(mapped, np.int64), minlength=store.pages_total)
    require(
        np.array_equal(counts, expected),
        f"reference counts {counts.tolist()} differ from page-table entries {expected.tolist()}",
    )
    used = int(np.count_nonzero(counts))
    require(
        store.pages_free + used == store.pages_total,
        f"{store.pages_free} free + {used} mapped pages are not {store.pages_total}",
    )
    require(
        store.resident_bytes == used * store.page_nbytes,
        f"resident_bytes is {store.resident_bytes} with {used} pages of {store.page_nbytes}",
    )
    return tables, store.pages_free, counts.tobytes()


def state(trial: Trial, store: KVStore, *sessions: KVSession) -> tuple[Any, ...]:
    """All of it, to be compared before and after what must change nothing."""
    shown: list[Any] = [contents(session) for session in sessions]
    if trial.has(Capability.POOL):
        shown.append(ledger_of(store, sessions))
    return tuple(shown)


@contextlib.contextmanager
def unchanged(trial: Trial, store: KVStore, *sessions: KVSession) -> Iterator[None]:
    """The body must leave every session and the pool bitwise as they were."""
    before = state(trial, store, *sessions)
    yield
    require(state(trial, store, *sessions) == before, "a refused call changed the store")


# --------------------------------------------------------------------------------------------------
# Attention beside the oracle


def require_attention(
    got: npt.NDArray[np.float32],
    profile: Profile,
    q: F32,
    k: F32,
    v: F32,
    scale: float,
    valid: npt.NDArray[np.bool_] | None = None,
    what: str = "attend",
) -> None:
    """``got`` (H_q, D) lies within the profile's bound of the oracle."""
    right = reference.attention(q, k, v, scale, valid)
    allowed = reference.tolerance(profile, q, k, v, scale, valid)
    require(np.isfinite(got).all(), f"{what}: output is not finite")
    wrong = np.abs(got.astype(np.float64) - right) > allowed
    if wrong.any():
        head, lane = (int(i[0]) for i in np.nonzero(wrong))
        raise CheckFailed(
            f"{what}: head {head} lane {lane} is {got[head, lane]!r}, the oracle has "
            f"{right[head, lane]!r} +- {allowed[head, lane]:.3g} ({int(wrong.sum())} elements off)"
        )
