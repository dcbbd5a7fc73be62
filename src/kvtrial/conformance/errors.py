"""Bad input is a typed error with a message, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvtrial.conformance.trial import (
    CheckFailed,
    Trial,
    at,
    attended,
    contents,
    fill,
    queries,
    raises,
    require,
    require_attention,
    require_rows,
    rows,
    unchanged,
)
from kvtrial.contract import (
    Capability,
    InvalidArgument,
    KVError,
    KVSession,
    MemoryLedger,
    NumericRange,
    StaleOwner,
    StoreSpec,
    Unsupported,
)


def _each(calls: dict[str, Callable[[], Any]], trial: Trial, session: KVSession) -> None:
    for name, call in calls.items():
        with unchanged(trial, session.store, session):
            try:
                with raises(KVError):
                    call()
            except CheckFailed as error:
                raise CheckFailed(f"{name}: {error}") from error


def wrong_arrays(trial: Trial) -> None:
    """A12, B18, B23: dtype, shape, strides and read-only outputs, each by verb."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(5))
        k, v = rows(store, 0, [5])
        q = queries(store)
        out = np.zeros_like(q)
        frozen = out.copy()
        frozen.flags.writeable = False
        wide = np.zeros((1, 3, 64), np.float32)
        one = at(5, 6)
        _each(
            {
                "k as float64": lambda: session.append(0, one, k.astype(np.float64), v),
                "v as float16": lambda: session.append(0, one, k, v.astype(np.float16)),
                "k of two dimensions": lambda: session.append(0, one, k[0], v),
                "k with a head too few": lambda: session.append(0, one, k[:, :2].copy(), v),
                "k at an odd address": lambda: session.append(0, one, misaligned(k), v),
                "v of the other byte order": lambda: session.append(
                    0, one, k, v.astype(v.dtype.newbyteorder())
                ),
                "k with strides": lambda: session.append(0, one, wide[:, :, ::2], v),
                "v backwards": lambda: session.append(0, one, k, v[:, :, ::-1]),
                "two rows for one position": lambda: session.append(
                    0, one, np.concatenate([k, k]), np.concatenate([v, v])
                ),
                "one row for two positions": lambda: session.append(0, at(5, 7), k, v),
                "positions as floats": lambda: session.append(0, np.array([5.0]), k, v),
                "positions of two dimensions": lambda: session.append(0, one[None], k, v),
                "k missing": lambda: session.append(0, one, None, v),  # type: ignore[arg-type]
                "q as float64": lambda: session.attend(0, q.astype(np.float64), out, 1.0),
                "q with a head too many": lambda: session.attend(
                    0, np.zeros((7, 32), np.float32), out, 1.0
                ),
                "q of another head_dim": lambda: session.attend(
                    0, np.zeros((6, 31), np.float32), out, 1.0
                ),
                "out of another shape": lambda: session.attend(0, q, out[:3], 1.0),
                "out with strides": lambda: session.attend(
                    0, q, np.zeros((6, 64), np.float32)[:, ::2], 1.0
                ),
                "out read-only": lambda: session.attend(0, q, frozen, 1.0),
                "q at an odd address": lambda: session.attend(0, misaligned(q), out, 1.0),
                "out at an odd address": lambda: session.attend(0, q, misaligned(out), 1.0),
                "out missing": lambda: session.attend(0, q, None, 1.0),  # type: ignore[arg-type]
                "out as float64": lambda: session.attend(0, q, out.astype(np.float64), 1.0),
                "scale that is NaN": lambda: session.attend(0, q, out, float("nan")),
                "scale that is infinite": lambda: session.attend(0, q, out, float("inf")),
                "scale as text": lambda: session.attend(0, q, out, "1"),  # type: ignore[arg-type]
                "block longer than the layer": lambda: session.attend_block(
                    0, queries(store, 6), np.zeros((6, 6, 32), np.float32), 1.0
                ),
                "block of two dimensions": lambda: session.attend_block(0, q, out, 1.0),
                "block out read-only": lambda: session.attend_block(0, q[None], frozen[None], 1.0),
            },
            trial,
            session,
        )
        require(not out.any(), "a refused attend wrote its output")


def misaligned(x: np.ndarray) -> np.ndarray:
    """A copy whose floats lie a byte off their places."""
    raw = np.zeros(x.nbytes + 64, np.uint8)
    start = (-raw.ctypes.data) % 32 + 1
    moved = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    moved[...] = x
    return moved


def nothing_at_all(trial: Trial) -> None:
    """n = 0 is a no-op for every verb that takes n rows or positions."""
    with trial.store() as store:
        session = store.open_session(position_holes_allowed=trial.has(Capability.HOLES))
        none = at(0, 0)
        for held in (0, 5):
            fill(session, range(session.length(0), held))
            k, v = rows(store, 0, [])
            q = queries(store, 0)
            with unchanged(trial, store, session):
                session.append(0, none, k, v)
                session.append(1, none, k, v)
                session.attend_block(0, q, q.copy(), 1.0)
                read = session.read(0, none)
                require([x.shape for x in read] == [k.shape, v.shape], "read of nothing has rows")
                if trial.has(Capability.HOLES):
                    session.invalidate(0, none)
                if trial.has(Capability.RESERVE_SLOT):
                    require(session.reserve_slot(0, none) is None, "a slot of nothing")
                if trial.has(Capability.ROLLBACK):
                    session.rollback_tail(0)


def handles_of_another_store(trial: Trial) -> None:
    """A session is shown by its own store alone, though another has one of the same number."""
    with trial.store() as store, trial.store() as other:
        mine, theirs = store.open_session(), other.open_session()
        fill(mine, range(3))
        fill(theirs, range(trial.page_tokens + 1), tag=2)
        with unchanged(trial, store, mine), unchanged(trial, other, theirs):
            with raises(KVError):
                store.page_table(theirs, 0)
            for nobody in (None, store, 0):
                with raises(KVError):
                    store.page_table(nobody, 0)  # type: ignore[arg-type]


def a_closed_store_stays_closed(trial: Trial) -> None:
    """A second close is refused, and gives the reservation back once."""
    ledger = MemoryLedger(1 << 22)
    spec = StoreSpec(2, 6, 3, 32, trial.page_tokens, 1 << 20, ledger)
    store, neighbour = trial.candidate.open(spec), trial.candidate.open(spec)
    held = ledger.reserved_bytes
    store.close()
    for _ in range(2):
        with raises(StaleOwner):
            store.close()
        require(ledger.reserved_bytes == held // 2, "a second close released something")
    neighbour.close()
    require(ledger.reserved_bytes == 0, f"{ledger.reserved_bytes} bytes are left after close")


def wrong_numbers(trial: Trial) -> None:
    """A12: layers, positions and counts that are negative, too large, or no integers at all."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(5))
        k, v = rows(store, 0, [5])
        q = queries(store)
        out = np.zeros_like(q)
        calls: dict[str, Callable[[], Any]] = {}
        layers: tuple[Any, ...] = (-1, 2, 2**31, 2**40, 2**70, "0", 0.5, None)
        for layer in layers:
            calls |= {
                f"append, layer {layer}": partial(session.append, layer, at(5, 6), k, v),
                f"attend, layer {layer}": partial(session.attend, layer, q, out, 1.0),
                f"read, layer {layer}": partial(session.read, layer, at(0, 1)),
                f"length, layer {layer}": partial(session.length, layer),
                f"valid, layer {layer}": partial(session.valid, layer),
            }
            if trial.has(Capability.POOL):
                calls[f"page_table, layer {layer}"] = partial(session.page_table, layer)
            if trial.has(Capability.RESERVE_SLOT):
                calls[f"reserve_slot, layer {layer}"] = partial(
                    session.reserve_slot, layer, at(5, 6)
                )
        for position in (-1, 5, 2**31, 2**40, 2**62):
            calls[f"read, position {position}"] = partial(session.read, 0, np.array([position]))
        for position in (-1, -(2**63), 4, 2**40, 2**62, 2**63 - 1):
            calls[f"append, position {position}"] = partial(
                session.append, 0, np.array([position]), k, v
            )
        if trial.has(Capability.ROLLBACK):
            counts: tuple[Any, ...] = (-1, 6, 2**31, 2**70, "1", 1.5, None)
            for n in counts:
                calls[f"rollback_tail({n})"] = partial(session.rollback_tail, n)
        if trial.has(Capability.BRANCH):
            calls["commit_prefix without a branch"] = lambda: session.commit_prefix(0)
        _each(calls, trial, session)


def accepted_arrays(trial: Trial) -> None:
    """B18, B23: read-only and oddly aligned inputs are accepted and right, or refused as such."""
    with trial.store(layers=1) as store:
        k, v = rows(store, 0, range(20))
        q = queries(store)
        for offset in (0, 4, 8, 12, 20):
            session = store.open_session()

            def shifted(x: np.ndarray, offset: int = offset) -> np.ndarray:
                raw = np.zeros(x.nbytes + 128, np.uint8)
                start = (-raw.ctypes.data) % 64 + offset
                moved = raw[start : start + x.nbytes].view(np.float32).reshape(x.shape)
                moved[...] = x
                moved.flags.writeable = False
                return moved

            where = at(0, 20)
            where.flags.writeable = False
            session.append(0, where, shifted(k), shifted(v))
            raw = np.zeros(q.nbytes + 128, np.uint8)
            start = (-raw.ctypes.data) % 64 + offset
            out = raw[start : start + q.nbytes].view(np.float32).reshape(q.shape)
            session.attend(0, shifted(q), out, 0.5)
            require_attention(out, trial.profile, q, k, v, 0.5, what=f"inputs at offset {offset}")
            session.close()
        session = store.open_session()
        frozen = [np.frombuffer(x.tobytes(), np.float32).reshape(x.shape) for x in (k, v)]
        session.append(0, np.frombuffer(at(0, 20).tobytes(), np.int64), *frozen)
        require_rows(trial, session, 0, range(20), 0, "rows from read-only buffers")


def appended_rows_are_copies(trial: Trial) -> None:
    """The caller's arrays may change after an append, and what `read` gave may be written."""
    with trial.store(layers=1) as store:
        session = store.open_session()
        k, v = rows(store, 0, range(4))
        session.append(0, at(0, 4), k, v)
        shown, seen = contents(session), attended(session)
        k[...], v[...] = 9, 9
        for read in session.read(0, at(0, 4)):
            read[...] = 7
        session.valid(0)[...] = False
        require(contents(session) == shown and attended(session) == seen, "the store kept a view")


def numbers_that_do_not_fit(trial: Trial) -> None:
    """B11: what the storage format can't hold is `NumericRange`, and nothing is stored."""
    limit, odd = trial.profile.limit, [np.inf, -np.inf, np.nan]
    large = [65504.0, -65504.0, 65519.0, 65520.0, 7e4, -7e4, 1e6, 3e38, -3e38]
    if np.isfinite(limit):
        large += [limit, -limit, float(np.nextafter(np.float32(limit), np.float32(0)))]
    bad = [x for x in large if abs(x) >= limit]
    good = [0.0, *(x for x in large if abs(x) < limit)]
    (bad if trial.profile.finite else good).extend(odd)
    with trial.store(layers=1) as store:
        session = store.open_session()
        fill(session, range(3))
        for number in bad:
            for which in (0, 1):
                pair = rows(store, 0, [3, 4])
                pair[which][1, 2, 30] = number
                with unchanged(trial, store, session), raises(NumericRange, InvalidArgument):
                    session.append(0, at(3, 5), *pair)
        for number in good:
            position = session.length(0)
            k, v = rows(store, 0, [position])
            k[0, 2, 30] = number
            session.append(0, at(position, position + 1), k, v)
            back = session.read(0, at(position, position + 1))[0][0, 2, 30]
            near = (
                np.isnan(back)
                if np.isnan(number)
                else (
                    back == number or abs(back - number) <= trial.profile.storage_bound(k[0, 2])[30]
                )
            )
            require(near, f"{number!r} was stored as {back!r}")


def lacking_verbs_say_so(trial: Trial) -> None:
    """A verb that the capability table denies raises `Unsupported`, or is None for a slot."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(3))
        lacking: dict[Capability, Callable[[], Any]] = {
            Capability.ROLLBACK: lambda: session.rollback_tail(1),
            Capability.BRANCH: lambda: session.begin_branch(),
            Capability.HOLES: lambda: store.open_session(position_holes_allowed=True),
            Capability.POOL: lambda: session.page_table(0),
            Capability.PARTIALS: lambda: session.attend_partial(0, queries(store), 1.0),
            Capability.RESERVE_SLOT: lambda: session.reserve_slot(0, at(3, 4)),
            Capability.SPILL: lambda: session.page_bytes(0, 0),
        }
        for capability, call in lacking.items():
            if trial.has(capability):
                continue
            shown = contents(session)
            try:
                got = call()
            except Unsupported as error:
                require(str(error).strip(), f"{capability.value}: Unsupported without a message")
            except KVError as error:
                raise CheckFailed(
                    f"{capability.value} is not claimed; expected Unsupported, got "
                    f"{type(error).__name__}"
                ) from error
            else:
                require(
                    capability is Capability.RESERVE_SLOT and got is None,
                    f"{capability.value} is not claimed, yet its verb works",
                )
            require(contents(session) == shown, f"a lacking {capability.value} changed the session")
