"""Attention beside the float64 oracle, over shapes, lengths and hostile numbers."""

from __future__ import annotations

import numpy as np

from kvtrial.conformance.trial import (
    Trial,
    at,
    contents,
    fill,
    needs,
    queries,
    require,
    require_attention,
    rows,
)
from kvtrial.contract import F32, Capability, merge

HEAD_DIMS = (1, 8, 32, 48, 59, 64, 72, 80, 96, 100, 128, 256)
#: (H_q, H_kv): the ratios of known models, and 1 to 16.
HEADS = ((14, 2), (28, 4), (32, 8), (12, 12), (8, 1), (6, 3), (9, 3), (16, 1), (5, 1), (3, 3))


def _attend(trial: Trial, k: F32, v: F32, q: F32, scale: float, *, what: str) -> F32:
    """Append k, v (N, H_kv, D) to a store of their shape, attend, compare, return the output."""
    n, kv_heads, head_dim = k.shape
    pages = n // trial.page_tokens + 2
    with trial.store(
        pages, layers=1, q_heads=len(q), kv_heads=kv_heads, head_dim=head_dim
    ) as store:
        session = store.open_session()
        session.append(0, at(0, n), k, v)
        out = np.full_like(q, np.nan)
        session.attend(0, q, out, scale)
        require_attention(out, trial.profile, q, k, v, scale, what=what)
        return out


def _normal(*shape: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def every_head_dim(trial: Trial) -> None:
    """B15, B16: no head_dim is special, at no length."""
    for head_dim in HEAD_DIMS:
        for n in (1, 17, 300):
            k, v = _normal(n, 2, head_dim), _normal(n, 2, head_dim, seed=4)
            q = _normal(4, head_dim, seed=5)
            scale = float(head_dim**-0.5)
            _attend(trial, k, v, q, scale, what=f"head_dim {head_dim}, {n} rows")


def every_head_ratio(trial: Trial) -> None:
    """B13: query head h reads KV head h // group."""
    n = 2 * trial.page_tokens + 3
    for q_heads, kv_heads in HEADS:
        k = _normal(n, kv_heads, 32)
        v = np.empty_like(k)
        v[:] = np.arange(kv_heads, dtype=np.float32)[None, :, None]
        q = _normal(q_heads, 32, seed=6)
        out = _attend(trial, k, v, q, 0.2, what=f"heads {q_heads}/{kv_heads}")
        right = np.arange(q_heads) // (q_heads // kv_heads)
        off = np.abs(out - right[:, None]).max()
        # Another's are 1 away, and 4 bits of a value up to 4/14 wide of it.
        require(off < 0.4, f"heads {q_heads}/{kv_heads}: a head reads another's values ({off})")


def fresh_pages_do_not_show(trial: Trial) -> None:
    """B1, B3: partly filled last pages, after other rows lay there; nothing valid gives zeros."""
    page = trial.page_tokens
    with trial.store(layers=1, pages=4) as store:
        session = store.open_session()
        q = queries(store)
        out = np.full_like(q, np.nan)
        session.attend(0, q, out, 0.5)
        require(not out.any(), "an empty layer does not attend to zeros")
        large = min(6e4, 0.9 * trial.profile.limit)
        poison = np.full((4 * page, store.spec.kv_heads, store.spec.head_dim), large, np.float32)
        session.append(0, at(0, 4 * page), poison, poison)
        session.close()
        for n in (1, 13, page - 1, page, page + 1):
            session = store.open_session()
            k, v = rows(store, 0, range(n))
            session.append(0, at(0, n), k, v)
            out[:] = np.nan
            session.attend(0, q, out, 0.5)
            require_attention(out, trial.profile, q, k, v, 0.5, what=f"{n} rows on used pages")
            session.close()


def uniform_weights(trial: Trial) -> None:
    """B8, B6: equal scores, be they 0, -1e5 or -1e6, with V = 1 give 1, as it is stored."""
    for score in (0.0, -1e5, -1e6):
        for n in (1, 5, trial.page_tokens, trial.page_tokens + 1, 100):
            k = np.zeros((n, 2, 48), np.float32)
            k[:, :, 0] = score / 1000
            q = np.zeros((4, 48), np.float32)
            q[:, 0] = 1000
            out = _attend(trial, k, np.ones_like(k), q, 1.0, what=f"{n} scores of {score}")
            off, stored = np.abs(out - 1).max(), trial.profile.storage_bound(np.ones(48))[0]
            require(off <= 1e-6 + stored, f"{n} scores of {score}: the weights are {off} off 1")


def one_row_is_itself(trial: Trial) -> None:
    """The weights of a dominant row are 1: the output is that row, wherever it stands."""
    n = 2 * trial.page_tokens + 1
    for where in (0, trial.page_tokens - 1, trial.page_tokens, n - 1):
        k = np.zeros((n, 2, 32), np.float32)
        k[where, :, 0] = 200
        v = _normal(n, 2, 32)
        q = np.zeros((6, 32), np.float32)
        q[:, 0] = 1
        _attend(trial, k, v, q, 1.0, what=f"a dominant row at {where}")


def long_sums(trial: Trial) -> None:
    """B9: 4,096 and 16,384 equal weights sum to 1, whatever the storage."""
    for n in (4096, 16384):
        k = np.ones((n, 1, 32), np.float32)
        out = _attend(trial, k, k, np.ones((2, 32), np.float32), 0.1, what=f"{n} equal scores")
        require(np.abs(out - 1).max() <= 1e-3, f"{n} equal weights sum to {out.max()}")
    k, v = _normal(16384, 1, 32), _normal(16384, 1, 32, seed=4)
    _attend(trial, k, v, _normal(2, 32, seed=5), 0.3, what="16,384 rows")


def wide_scores(trial: Trial) -> None:
    """B10: dots of 5.8e6 stay finite; rising, falling and mixed scores need every rescale."""
    n = 3 * trial.page_tokens + 2
    k = np.full((n, 2, 64), 300, np.float32)
    _attend(
        trial, k, _normal(n, 2, 64), np.full((4, 64), 300, np.float32), 1.0, what="dots of 5.8e6"
    )
    for name, scores in _courses(n).items():
        k, q = _scored(scores)
        _attend(trial, k, _normal(n, 2, 32), q, 1.0, what=f"{name} scores")


def _courses(n: int) -> dict[str, np.ndarray]:
    """Scores (n,) by how they go."""
    return {
        "rising": np.linspace(-80, 80, n),
        "falling": np.linspace(80, -80, n),
        "mixed": 60 * np.sin(np.arange(n)),
    }


def _scored(scores: np.ndarray) -> tuple[F32, F32]:
    """k (n, 2, 32) and q (4, 32) whose products are the scores; their opposite and half for some heads."""
    k = np.zeros((len(scores), 2, 32), np.float32)
    k[:, :, 3] = scores[:, None]
    q = np.zeros((4, 32), np.float32)
    q[:, 3] = [1, -1, 0.5, 1]
    return k, q


def causal_block(trial: Trial) -> None:
    """B22: a chunk of 5 after 11 rows is rows 11..15 of one 16-row prefill, and every row's own
    attention; so for chunks across page edges."""
    page = trial.page_tokens
    for before, n in ((11, 5), (0, 16), (page - 2, 5), (0, page + 3), (2 * page, 1)):
        with trial.store(layers=1, q_heads=6, kv_heads=2) as store:
            session = store.open_session()
            k, v = rows(store, 0, range(before + n))
            q = queries(store, before + n)
            fill(session, range(before))
            fill(session, range(before, before + n))
            chunk = np.full_like(q[before:], np.nan)
            session.attend_block(0, np.ascontiguousarray(q[before:]), chunk, 0.4)
            whole = np.full_like(q, np.nan)
            session.attend_block(0, q, whole, 0.4)
            for i in range(before + n):
                end = i + 1
                what = f"row {i} of a {before + n}-row block"
                require_attention(whole[i], trial.profile, q[i], k[:end], v[:end], 0.4, what=what)
                if i >= before:
                    require_attention(
                        chunk[i - before], trial.profile, q[i], k[:end], v[:end], 0.4,
                        what=f"row {i - before} of {n} after {before}",
                    )  # fmt: skip


def long_causal_block(trial: Trial) -> None:
    """A chunk far into a sequence: what was summed up to there is rescaled as scores go on to rise."""
    n, block = 700, 3
    for name, scores in _courses(n).items():
        k, q = _scored(scores)
        v = _normal(n, 2, 32)
        with trial.store(
            n // trial.page_tokens + 2, layers=1, q_heads=4, kv_heads=2, head_dim=32
        ) as store:
            session = store.open_session()
            session.append(0, at(0, n), k, v)
            out = np.full((block, *q.shape), np.nan, np.float32)
            session.attend_block(0, np.stack([q] * block), out, 1.0)
            for i, end in enumerate(range(n - block + 1, n + 1)):
                require_attention(
                    out[i], trial.profile, q, k[:end], v[:end], 1.0,
                    what=f"{name} scores, row {i} of a block after {n - block}",
                )  # fmt: skip


def attending_changes_nothing(trial: Trial) -> None:
    """Attention reads: twice gives the same bits, q and the cache are untouched."""
    with trial.store() as store:
        session = store.open_session()
        fill(session, range(trial.page_tokens + 3))
        shown = contents(session)
        q = queries(store)
        given = q.copy()
        outs = [np.full_like(q, np.nan) for _ in range(3)]
        for layer, out in ((0, outs[0]), (1, outs[1]), (0, outs[2])):
            session.attend(layer, q, out, 0.5)
        require(np.array_equal(outs[0], outs[2]), "attending twice gives other bits")
        require(not np.array_equal(outs[0], outs[1]), "two layers attend to the same")
        require(np.array_equal(q, given), "attend wrote its query")
        require(contents(session) == shown, "attend changed the cache")


def a_new_row_counts_at_once(trial: Trial) -> None:
    """Each append is seen by the next attend; nothing of the last output is kept."""
    with trial.store(layers=1) as store:
        session = store.open_session()
        q = queries(store)
        out = np.full_like(q, np.nan)
        for n in range(1, trial.page_tokens + 3):
            fill(session, [n - 1])
            session.attend(0, q, out, 0.5)
            k, v = rows(store, 0, range(n))
            require_attention(out, trial.profile, q, k, v, 0.5, what=f"after row {n}")


@needs(Capability.THREADS)
def thread_count_does_not_show(trial: Trial) -> None:
    """Results are bitwise the same for any number of threads."""
    n = 5 * trial.page_tokens + 3
    seen = {}
    for threads in (1, 2, 3):
        with trial.store(layers=1, threads=threads) as store:
            session = store.open_session()
            fill(session, range(n))
            q = queries(store, 4)
            out, block = np.full_like(q[0], np.nan), np.full_like(q, np.nan)
            session.attend(0, np.ascontiguousarray(q[0]), out, 0.5)
            session.attend_block(0, q, block, 0.5)
            seen[threads] = out.tobytes() + block.tobytes()
    require(seen[1] == seen[2] == seen[3], "attention depends on the number of threads")


def a_nan_row_shows(trial: Trial) -> None:
    """A valid row of NaN makes its own heads NaN, whatever the NaN's payload, in every way to attend."""
    if trial.profile.finite:  # which refuses it
        return
    n = trial.page_tokens + 3
    for bits in (0x7FC00000, 0x7FC00001, 0x7FC12345, 0x7FFFFFFF, 0xFFFFFFFF):
        nan = np.array([bits], np.uint32).view(np.float32)[0]
        with trial.store(layers=1) as store:
            session = store.open_session()
            k, v = (x.copy() for x in rows(store, 0, range(n)))
            k[2, 1] = nan
            session.append(0, at(0, n), k, v)
            q = queries(store, 4)
            out, block = np.zeros_like(q[0]), np.zeros_like(q)
            session.attend(0, np.ascontiguousarray(q[0]), out, 0.5)
            session.attend_block(0, q, block, 0.5)
            for what, given in (("attend", out[None]), ("attend_block", block)):
                require(np.isnan(given[:, 2:4]).all(), f"{what} hides NaN {bits:#x} in a key")
                others = np.delete(given, (2, 3), axis=1)
                require(np.isfinite(others).all(), f"{what} spreads NaN {bits:#x} to other heads")


def scores_near_the_largest_number_count(trial: Trial) -> None:
    """B6: one row weighs 1, however low its score, as long as that is finite."""
    if trial.profile.rounded is None:  # which changes the row's one
        return
    scores = (-3.2e38, -3.4028234e38, -1.0, 3.4028234e38)
    for score in (s for s in scores if abs(s) < trial.profile.limit):
        with trial.store(2, layers=1, q_heads=2, kv_heads=1, head_dim=1) as store:
            session = store.open_session()
            k, v = np.full((1, 1, 1), score, np.float32), np.ones((1, 1, 1), np.float32)
            session.append(0, at(0, 1), k, v)
            q = np.ones((1, 2, 1), np.float32)
            out, block = np.zeros_like(q[0]), np.zeros_like(q)
            session.attend(0, q[0], out, 1.0)
            session.attend_block(0, q, block, 1.0)
            require((out == 1).all(), f"attend gives {out.ravel().tolist()} at score {score}")
            require((block == 1).all(), f"attend_block gives {block.ravel().tolist()} at {score}")


def scores_of_minus_infinity_weigh_nothing(trial: Trial) -> None:
    """Alone they give zeros and an empty partial; beside a finite score they do not show."""
    if trial.profile.finite:  # which refuses such a row
        return
    n = trial.page_tokens + 3
    with trial.store(layers=1, q_heads=4, kv_heads=2, head_dim=8) as store:
        session = store.open_session()
        low, ones = np.full((n, 2, 8), -np.inf, np.float32), np.ones((n + 1, 2, 8), np.float32)
        session.append(0, at(0, n), low, ones[:n])
        q = np.ones((2, 4, 8), np.float32)
        out, block = np.full_like(q[0], np.nan), np.full_like(q, np.nan)
        session.attend(0, q[0], out, 0.5)
        session.attend_block(0, q, block, 0.5)
        require((out == 0).all(), f"attend gives {out[0, 0]} where all scores are -inf")
        require(
            (block == 0).all(), f"attend_block gives {block[0, 0, 0]} where all scores are -inf"
        )
        session.append(0, at(n, n + 1), ones[n:], 3 * ones[n:])
        session.attend(0, q[0], out, 0.5)
        session.attend_block(0, q, block, 0.5)
        require((out == 3).all(), f"attend gives {out[0, 0]}, not the one row with a weight")
        require((block[0] == 0).all(), f"attend_block gives {block[0, 0, 0]} before that row")
        require((block[1] == 3).all(), f"attend_block gives {block[1, 0, 0]} at that row")
        if not trial.has(Capability.PARTIALS):
            return
        parts = [
            session.attend_partial(0, q[0], 0.5, positions=span) for span in ((0, n), (n, n + 1))
        ]
        require((parts[0].sum == 0).all(), f"scores of -inf alone have the sum {parts[0].sum}")
        require((parts[0].output == 0).all(), "scores of -inf alone have an output")
        require(
            (merge(parts) == 3).all(), "scores of -inf in another part show in the merged output"
        )
        require((merge(parts[:1]) == 0).all(), "a part without a weight does not merge to zeros")


def stored_numbers_round_once(trial: Trial) -> None:
    """B11, B12: what is stored by itself is rounded once, as the profile says: FP16 to nearest even like
    NumPy, subnormals too; FP32 keeps each bit."""
    rounded = trial.profile.rounded
    if rounded is None:
        return
    patterns = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    near = patterns[np.isfinite(patterns) & (np.abs(patterns) < 65504)]
    edges = np.array([2.0**-24, 2.0**-25, 6.10e-5, 1e-40, -0.0, 65519.996, 65504.0], np.float32)
    values = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    values += [edges, np.nextafter(edges, np.float32(0)), -edges]
    flat = np.concatenate([*values, patterns[~np.isfinite(patterns)]])
    flat = flat[~(np.isfinite(flat) & (np.abs(flat) >= trial.profile.limit))]
    n = -(-len(flat) // 256)
    given = np.zeros(n * 256, np.float32)
    given[: len(flat)] = flat
    k = given.reshape(n, 1, 256)
    right = rounded(k)
    with trial.store(
        n // trial.page_tokens + 2, layers=1, q_heads=1, kv_heads=1, head_dim=256
    ) as store:
        session = store.open_session()
        session.append(0, at(0, n), k, k)
        for name, read in zip("kv", session.read(0, at(0, n)), strict=True):
            same = (read.view(np.uint32) == right.view(np.uint32)) | (
                np.isnan(read) & np.isnan(right)
            )
            if not same.all():
                i = int(np.flatnonzero(~same.ravel())[0])
                raise AssertionError(
                    f"{name}: {given[i]!r} came back as {read.ravel()[i]!r}, "
                    f"expected {right.ravel()[i]!r}"
                )
