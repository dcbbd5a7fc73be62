"""Partials: a part of the heads or positions, here or in another store, merged to the whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kvtrial.conformance.trial import (
    Trial,
    at,
    fill,
    needs,
    queries,
    raises,
    require,
    require_attention,
    rows,
)
from kvtrial.contract import Capability, KVError, KVStore, Partial, merge


def _ranges(stop: int, page: int) -> list[list[tuple[int, int]]]:
    cuts: tuple[list[int], ...] = (
        [],
        [page],
        [1],
        [page - 1, page + 1],
        [page // 2, stop - 1],
        [stop],
    )
    return [list(zip([0, *c], [*c, stop], strict=True)) for c in cuts]


def position_ranges(trial: Trial) -> None:
    """Any cut of the positions merges to the oracle's whole, empty parts included."""
    page = trial.page_tokens
    n = 2 * page + 5
    with trial.store(layers=1) as store:
        session = store.open_session()
        fill(session, range(n))
        k, v = rows(store, 0, range(n))
        q = queries(store)
        for parts in _ranges(n, page):
            merged = merge([session.attend_partial(0, q, 0.4, positions=part) for part in parts])
            require_attention(merged, trial.profile, q, k, v, 0.4, what=f"parts {parts}")


def head_groups(trial: Trial) -> None:
    """A head group fills its own heads and is empty elsewhere; groups merge to the whole."""
    n = trial.page_tokens + 2
    with trial.store(layers=1, q_heads=6, kv_heads=3) as store:
        session = store.open_session()
        fill(session, range(n))
        k, v = rows(store, 0, range(n))
        q = queries(store)
        parts = [session.attend_partial(0, q, 0.4, kv_heads=h) for h in ((0, 1), (1, 3))]
        require(np.isneginf(parts[0].max[2:]).all(), "a head outside the group has a maximum")
        require(not parts[0].sum[2:].any(), "a head outside the group has a sum")
        require(not parts[0].output[2:].any(), "a head outside the group has output")
        require(np.isfinite(parts[0].max[:2]).all(), "a head inside the group is empty")
        require_attention(merge(parts), trial.profile, q, k, v, 0.4, what="two head groups")
        both = [
            session.attend_partial(0, q, 0.4, kv_heads=h, positions=p)
            for h in ((0, 2), (2, 3))
            for p in ((0, 7), (7, n))
        ]
        require_attention(merge(both), trial.profile, q, k, v, 0.4, what="heads x positions")


def dots_of_ones(trial: Trial) -> None:
    """B16: a dot of n ones is exactly n, whatever of n is left over from whole vectors."""
    if (
        trial.profile.rounded is None
    ):  # a block of Q8_0 stores a one as 127 steps of 1 / 127, rounded
        return
    for n in range(1, 68):
        with trial.store(2, layers=1, q_heads=2, kv_heads=1, head_dim=n) as store:
            session = store.open_session()
            ones = np.ones((3, 1, n), np.float32)
            session.append(0, at(0, 3), ones, ones)
            part = session.attend_partial(0, np.ones((2, n), np.float32), 1.0)
            require((part.max == n).all(), f"a dot of {n} ones is {part.max.tolist()}")
            require((part.sum == 3).all(), f"3 equal weights sum to {part.sum.tolist()}")
            require((part.output == 3).all(), f"3 rows of {n} ones sum to {part.output.tolist()}")


def nothing_in_the_part(trial: Trial) -> None:
    """An empty part is (-inf, 0, 0) and merges to zeros."""
    with trial.store(layers=1) as store:
        session = store.open_session()
        q = queries(store)
        for part in (
            session.attend_partial(0, q, 1.0),
            session.attend_partial(0, q, 1.0, positions=(0, 0)),
        ):
            require(isinstance(part, Partial), f"attend_partial gave {type(part).__name__}")
            require(np.isneginf(part.max).all(), "the maximum of nothing is not -inf")
            require(not part.sum.any() and not part.output.any(), "nothing has a sum")
            require(not merge([part, part]).any(), "merged nothing is not zeros")


def stores_by_head_group(trial: Trial) -> None:
    """One store per head group (`kv_head_range`), each in a thread, merges to the whole."""
    n = trial.page_tokens + 3
    with (
        trial.store(layers=1, kv_head_range=(0, 2)) as low,
        trial.store(layers=1, kv_head_range=(2, 3)) as high,
    ):

        def part(store: KVStore) -> Partial:
            session = store.open_session()
            fill(session, range(n))
            return session.attend_partial(0, queries(store), 0.4)

        with ThreadPoolExecutor(2) as threads:
            parts = list(threads.map(part, (low, high)))
        k = np.concatenate([rows(s, 0, range(n))[0] for s in (low, high)], axis=1)
        v = np.concatenate([rows(s, 0, range(n))[1] for s in (low, high)], axis=1)
        require_attention(
            merge(parts), trial.profile, queries(low), k, v, 0.4, what="a store per head group"
        )
        q = queries(low)
        out = np.full_like(q, 77)
        session = low.open_session()
        fill(session, range(n))
        session.attend(0, q, out, 0.4)
        require((out[4:] == 77).all(), "attend wrote heads of another group")
        require_attention(
            out[:4], trial.profile, q[:4], k[:, :2], v[:, :2], 0.4, what="the group's own heads"
        )


def stores_by_position_range(trial: Trial) -> None:
    """One store per position range (`base_position`) merges to the whole."""
    page = trial.page_tokens
    cut, n = page + 5, 3 * page
    with trial.store(layers=1) as low, trial.store(layers=1, base_position=cut) as high:
        parts = []
        for store, positions in ((low, range(cut)), (high, range(cut, n))):
            session = store.open_session()
            fill(session, positions)
            parts.append(session.attend_partial(0, queries(store), 0.4))
        k, v = rows(low, 0, range(n))
        require_attention(
            merge(parts), trial.profile, queries(low), k, v, 0.4, what="a store per range"
        )
        for below in ((0, page), (0, cut), (cut, cut)):
            part = session.attend_partial(0, queries(high), 0.4, positions=below)
            require(not part.sum.any(), f"positions {below} hold rows, the first is {cut}")
        whole = session.attend_partial(0, queries(high), 0.4, positions=(0, n))
        require(np.array_equal(whole.output, parts[1].output), "a range from before the first row")


def ranges_out_of_bounds(trial: Trial) -> None:
    """A head range or position range that is not there is a typed error."""
    with trial.store(layers=1) as store:
        session = store.open_session()
        fill(session, range(5))
        q = queries(store)
        for bad in ((-1, 2), (0, 4), (2, 1), (3, 5)):
            with raises(KVError):
                session.attend_partial(0, q, 1.0, kv_heads=bad)
        for bad in ((-1, 2), (3, 2)):
            with raises(KVError):
                session.attend_partial(0, q, 1.0, positions=bad)


@needs(Capability.THREADS)
def threads_do_not_show(trial: Trial) -> None:
    """Partials too are bitwise the same for any number of threads."""
    n = 5 * trial.page_tokens + 1
    seen = set()
    for threads in (1, 2, 3):
        with trial.store(layers=1, threads=threads) as store:
            session = store.open_session()
            fill(session, range(n))
            part = session.attend_partial(0, queries(store), 0.4, positions=(3, n - 2))
            seen.add(part.max.tobytes() + part.sum.tobytes() + part.output.tobytes())
    require(len(seen) == 1, "partials depend on the number of threads")


def after_holes_and_slots(trial: Trial) -> None:
    """A partial of rows around holes equals the oracle's over the same rows."""
    if not trial.has(Capability.HOLES):
        return
    n = trial.page_tokens + 6
    with trial.store(layers=1) as store:
        session = store.open_session(position_holes_allowed=True)
        fill(session, range(n))
        holes = [0, 5, trial.page_tokens]
        session.invalidate(0, at(0, 3) * 0 + holes)
        valid = np.ones(n, bool)
        valid[holes] = False
        k, v = rows(store, 0, range(n))
        q = queries(store)
        merged = merge([session.attend_partial(0, q, 0.4, positions=p) for p in ((0, 6), (6, n))])
        require_attention(merged, trial.profile, q, k, v, 0.4, valid, what="parts with holes")
