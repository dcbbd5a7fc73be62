"""K5T, K6, K6N and K7 beside a NumPy model of their integers, which reads the pages' own bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from kvtrial.contract import Candidate, NumericRange, StoreSpec
from kvtrial.hot import paged
from kvtrial.hot.formats.int_panels import hadamard

ARMS = {"K5T": (8, 8, "K"), "K6": (4, 4, "KV"), "K6N": (4, 4, ""), "K7": (8, 4, "KV")}
every = pytest.mark.parametrize("name", ARMS)
shapes = pytest.mark.parametrize(
    ("tokens", "head_dim", "group"),
    [(16, 64, 3), (32, 64, 7), (64, 128, 8), (32, 80, 5), (16, 33, 1), (64, 1, 2), (32, 256, 16)],
)


class Tile(NamedTuple):
    """Codes (tokens, blocks, 32) and their steps (tokens, blocks) of K or V of one head."""

    codes: Any
    steps: Any

    @property
    def rows(self) -> Any:
        return (self.codes * self.steps[..., None]).reshape(len(self.codes), -1)


def tile(data: Any, tokens: int, head_dim: int, bits: int, keys: bool) -> tuple[Tile, int]:
    """A tile of a page's bytes, and its length."""
    blocks = -(-head_dim // 32)
    depth, columns = (32 * blocks, tokens) if keys else (tokens, 32 * blocks)
    held = depth * columns * bits // 8
    panel = data[:held]
    if bits == 8:
        codes = panel.view(np.int8).reshape(depth // 2, columns, 2).swapaxes(1, 2)
    else:
        four = panel.reshape(depth // 8, columns, 4)
        nibbles = np.stack([four & 15, four >> 4], axis=1)  # group, half, column, byte
        codes = nibbles.swapaxes(2, 3).astype(np.int64) - 8
    codes = codes.reshape(depth, columns).astype(np.int64)
    steps = data[held : held + 2 * tokens * blocks].view(np.float16).reshape(blocks, tokens)
    rows = codes.T if keys else codes
    return Tile(rows.reshape(tokens, blocks, 32), steps.T.astype(np.float64)), held + steps.nbytes


def turned(x: Any) -> Any:
    """Rotated over the largest power of two that divides the last axis; and back."""
    size = x.shape[-1] & -x.shape[-1]
    return (x.reshape(*x.shape[:-1], -1, size) @ hadamard(size)).reshape(x.shape)


def rounded(x: Any, levels: int) -> tuple[Any, Any]:
    """(..., n) in integers, and their step, as FP32 has it."""
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-30).astype(np.float32)
    whole = np.rint(x.astype(np.float32) * (np.float32(levels) / largest)).astype(np.int64)
    return whole, (largest / np.float32(levels)).astype(np.float64)


class Page:
    """One page of one KV head: a store that holds it, and what the model reads in it."""

    def __init__(self, name: str, tokens: int, head_dim: int, group: int, seed: int = 5) -> None:
        self.arm: Candidate = getattr(paged, name)
        self.key_bits, self.value_bits, self.turned = ARMS[name]
        spec = StoreSpec(1, group, 1, head_dim, page_tokens=tokens, budget_bytes=1 << 20)
        self.session: Any = self.arm.open(spec).open_session()
        draw = np.random.default_rng(seed)
        self.k, self.v = draw.standard_normal((2, tokens, 1, head_dim), np.float32)
        self.q = draw.standard_normal((group, head_dim), np.float32)
        self.session.append(0, np.arange(tokens), self.k, self.v)
        data = np.frombuffer(bytes(self.session.page_bytes(0, 0)), np.uint8)
        self.keys, at = tile(data, tokens, head_dim, self.key_bits, True)
        self.values, more = tile(data[at:], tokens, head_dim, self.value_bits, False)
        assert at + more == len(data) == self.session.store.row_bytes * tokens


@every
@shapes
def test_rows_read_as_the_codes_in_the_page(
    name: str, tokens: int, head_dim: int, group: int
) -> None:
    page = Page(name, tokens, head_dim, group)
    k, v = page.session.read(0, np.arange(tokens))
    keys, values = page.keys.rows[:, :head_dim], page.values.rows[:, :head_dim]
    keys = turned(keys) if "K" in page.turned else keys
    values = turned(values) if "V" in page.turned else values
    np.testing.assert_allclose(k[:, 0], keys, rtol=0, atol=2e-6)
    np.testing.assert_allclose(v[:, 0], values, rtol=0, atol=2e-6)
    # What lies behind head_dim is zeros.
    for side in (page.keys, page.values):
        assert not side.codes.reshape(tokens, -1)[:, head_dim:].any()


@every
@shapes
def test_a_score_is_the_sum_of_its_integer_products(
    name: str, tokens: int, head_dim: int, group: int
) -> None:
    page = Page(name, tokens, head_dim, group)
    q = turned(page.q.astype(np.float64)) if "K" in page.turned else page.q
    blocks = page.keys.codes.shape[1]
    q = np.pad(q, ((0, 0), (0, 32 * blocks - head_dim))).reshape(group, blocks, 32)
    whole, step = rounded(q, 32767 if page.key_bits == 8 else 127)
    products = np.einsum("gbi,tbi->gtb", whole, page.keys.codes)
    parts = products * page.keys.steps * step.swapaxes(1, 2) * 0.25
    # One unit of a rounded query that lay half-way, and FP32.
    unit = step.max() * 2 ** (page.key_bits - 1) * page.keys.steps.max()
    slack = unit if "K" in page.turned else 0
    for row in range(tokens):
        score = page.session.attend_partial(0, page.q, 0.25, positions=(row, row + 1)).max
        allowed = 1e-6 * np.abs(parts[:, row]).sum(axis=-1) + 1e-30 + slack
        assert (np.abs(score - parts[:, row].sum(axis=-1)) <= allowed).all()


@every
@shapes
def test_values_are_sums_of_integer_products(
    name: str, tokens: int, head_dim: int, group: int
) -> None:
    """A query of zeros weighs each row alike, so that a weight is 1 times its row's step."""
    page = Page(name, tokens, head_dim, group)
    seen = page.session.attend_partial(0, np.zeros_like(page.q), 1.0)
    assert (seen.max == 0).all()
    assert (seen.sum == tokens).all()
    right = np.zeros(page.values.codes.shape[1] * 32).reshape(-1, 32)
    for first in range(0, tokens, 32):
        steps = page.values.steps[first : first + 32].T
        levels = 32767 if page.value_bits == 8 else 127
        largest = np.maximum(np.abs(steps).max(axis=-1, keepdims=True), 1e-30).astype(np.float32)
        shares = steps.astype(np.float32) * (np.float32(1) / largest)
        whole, step = np.rint(np.float32(levels) * shares).astype(np.int64), largest / levels
        products = np.einsum("bt,tbi->bi", whole, page.values.codes[first : first + 32])
        right += products * step
    output = right.reshape(-1)[:head_dim]
    output = turned(output) if "V" in page.turned else output
    np.testing.assert_allclose(seen.output, np.tile(output, (group, 1)), rtol=0, atol=3e-5)


def test_int8_panels_hold_the_values_that_q8_0_does_and_rotated_keys() -> None:
    rows = np.random.default_rng(1).standard_normal((2, 40, 2, 64), np.float32)
    rows[0, ..., 5] *= 30
    read = []
    for arm in (paged.K5, paged.K5T):
        store = arm.open(StoreSpec(1, 4, 2, 64, page_tokens=32, budget_bytes=1 << 20))
        session = store.open_session()
        session.append(0, np.arange(40), *rows)
        read.append(np.stack(session.read(0, np.arange(40))))
    assert read[0][1].tobytes() == read[1][1].tobytes()
    # An outlier of 30 widens its block's step, and all neighbours' errors, but for the rotation.
    plain, rotated = (((k - rows[0]) ** 2).mean() for k, _ in read)
    assert rotated < 0.5 * plain


def test_rotation_spreads_an_outlier() -> None:
    """One element of 40 among 63 of size 1: in a block with it, 4 bits know steps of 40 / 7."""
    k = np.tile(np.where(np.arange(64) % 2, 1.0, -1.0), (16, 1, 1)).astype(np.float32)
    k[..., 5] = 40
    error = {}
    for name in ("K6", "K6N"):
        store = getattr(paged, name).open(StoreSpec(1, 1, 1, 64, budget_bytes=1 << 20))
        session = store.open_session()
        session.append(0, np.arange(16), k, k)
        error[name] = np.sqrt(((session.read(0, np.arange(16))[0] - k) ** 2).mean())
    # The 31 neighbours are lost to it: an error of 1 each.
    assert error["K6N"] > 0.65
    assert error["K6"] < 0.3


@every
def test_rows_without_content_are_zeros_where_a_page_leaves_the_pool(name: str) -> None:
    """Equal rows have equal bytes, whatever a page held before."""
    store = getattr(paged, name).open(StoreSpec(1, 2, 1, 40, page_tokens=32, budget_bytes=1 << 14))
    draw = np.random.default_rng(2)
    once, other = draw.standard_normal((2, 2, 32, 1, 40), np.float32)
    pages = []
    for before in (once, other):
        session: Any = store.open_session()
        session.append(0, np.arange(32), *before)
        session.rollback_tail(32)
        session.append(0, np.arange(3), *once[:, :3])
        pages.append(bytes(session.page_bytes(0, 0)))
        session.close()
    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("name", "limit"),
    [("K5T", 510000.0), ("K6N", 7 * 65520.0), ("K6", 28000.0), ("K7", 28000.0)],
)
def test_a_row_whose_step_no_half_holds_is_refused(name: str, limit: float) -> None:
    store = getattr(paged, name).open(StoreSpec(1, 1, 1, 256, budget_bytes=1 << 20))
    session = store.open_session()
    fits = np.full((1, 1, 256), np.nextafter(np.float32(limit), np.float32(0)), np.float32)
    session.append(0, [0], fits, fits)
    k, v = session.read(0, [0])
    np.testing.assert_allclose(np.stack([k, v]), np.stack([fits, fits]), rtol=0.08)
    for value in (limit, np.inf, np.nan):
        fits[0, 0, 200] = value
        with pytest.raises(NumericRange):
            session.append(0, [1], fits, fits)


@every
def test_a_query_that_is_not_finite_shows(name: str) -> None:
    page = Page(name, 32, 64, 3)
    page.q[1, 40] = np.inf
    out = np.empty_like(page.q)
    page.session.attend(0, page.q, out, 0.125)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_what_rounded_weights_may_move() -> None:
    """Of int8: codes of up to 128 times half a step of 1 / 32767 of the largest weight times V's step."""
    v = np.zeros((1, 64))
    v[0, 3], v[0, 40] = 127.0, 12.7
    moved = paged.K5T.profile.weights(v)
    assert moved.shape == v.shape
    half_step = 128 * 0.5 / 32767
    assert half_step < moved[0, 0] < 1.04 * half_step
    assert 0.1 * half_step < moved[0, 63] < 0.104 * half_step
