"""What the contract itself computes: the ledger, the shape, and merging partials."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtrial import reference
from kvtrial.contract import (
    FP32,
    REQUIRED_CAPABILITIES,
    Candidate,
    Capability,
    InvalidArgument,
    KVError,
    MemoryLedger,
    Partial,
    PoolExhausted,
    StaleOwner,
    StoreSpec,
    merge,
)

SHAPE: dict[str, Any] = {
    "layers": 2,
    "q_heads": 6,
    "kv_heads": 3,
    "head_dim": 8,
    "budget_bytes": 1 << 20,
}


class TestMemoryLedger:
    def test_reservations_add_up_and_come_back(self) -> None:
        ledger = MemoryLedger(100)
        first, second = ledger.reserve("a", 60), ledger.reserve("b", 40)
        assert (ledger.reserved_bytes, ledger.free_bytes) == (100, 0)
        ledger.release(first)
        assert ledger.free_bytes == 60
        ledger.release(second)
        assert ledger.free_bytes == 100

    def test_the_budget_is_hard_and_the_message_says_who_holds_it(self) -> None:
        ledger = MemoryLedger(100)
        ledger.reserve("K1", 70)
        with pytest.raises(PoolExhausted, match=r"K3 asks for 31 bytes; 30 of 100 .*K1 70.*close"):
            ledger.reserve("K3", 31)
        assert ledger.reserved_bytes == 70

    def test_a_token_is_released_once(self) -> None:
        ledger = MemoryLedger(10)
        token = ledger.reserve("a", 10)
        ledger.release(token)
        other = ledger.reserve("b", 10)
        with pytest.raises(StaleOwner):
            ledger.release(token)
        assert ledger.reserved_bytes == 10
        assert other != token

    @pytest.mark.parametrize("bad", [0, -1, 1.5, "1", True, None])
    def test_a_budget_is_a_positive_integer(self, bad: Any) -> None:
        with pytest.raises(InvalidArgument, match=str(bad)):
            MemoryLedger(bad)


class TestStoreSpec:
    def test_what_follows_from_the_shape(self) -> None:
        spec = StoreSpec(**SHAPE, kv_head_range=(1, 3))
        assert (spec.group, spec.heads, spec.local_kv_heads) == (2, (1, 3), 2)
        assert StoreSpec(**SHAPE).heads == (0, 3)
        assert StoreSpec(**{**SHAPE, "layers": np.int64(2)}) == StoreSpec(**SHAPE)

    @pytest.mark.parametrize(
        "name, value",
        [
            *itertools.product(
                ["layers", "q_heads", "kv_heads", "head_dim", "budget_bytes", "threads"],
                [0, -1, 2.0, "2", None, True],
            ),
            ("head_dim", 257),
            ("page_tokens", 8),
            ("page_tokens", 33),
            ("q_heads", 7),
            ("q_heads", 51),
            ("base_position", -1),
            ("kv_head_range", (0, 4)),
            ("kv_head_range", (2, 2)),
            ("kv_head_range", (-1, 2)),
        ],
    )
    def test_unusable_shapes_name_the_field(self, name: str, value: Any) -> None:
        with pytest.raises(InvalidArgument, match=name):
            StoreSpec(**{**SHAPE, name: value})

    @pytest.mark.parametrize("ratio", [1, 2, 7, 16])
    def test_any_ratio_up_to_16(self, ratio: int) -> None:
        assert StoreSpec(**{**SHAPE, "q_heads": 3 * ratio}).group == ratio


def test_every_error_is_a_kv_error_and_a_familiar_one() -> None:
    for error, familiar in (
        (InvalidArgument, ValueError),
        (PoolExhausted, MemoryError),
    ):
        assert issubclass(error, KVError)
        assert issubclass(error, familiar)


def test_missing_capabilities_are_the_required_ones() -> None:
    candidate = Candidate(
        name="K0",
        title="flat",
        role="baseline",
        profile=FP32,
        language="cython",
        owner="cython",
        layout="flat",
        capabilities=REQUIRED_CAPABILITIES - {Capability.POOL, Capability.BRANCH},
        open=lambda spec: None,  # type: ignore[arg-type,return-value]
    )
    assert candidate.missing_capabilities == ("branch", "pool")


def _partial(q: np.ndarray, k: np.ndarray, v: np.ndarray, rows: np.ndarray) -> Partial:
    part = reference.partial(q, k, v, 0.5, rows)
    return Partial(*(x.astype(np.float32) for x in part))


class TestMerge:
    @given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 12), cuts=st.integers(1, 4))
    def test_any_split_is_the_whole(self, seed: int, n: int, cuts: int) -> None:
        random = np.random.default_rng(seed)
        q = random.standard_normal((4, 6)) * 4
        k, v = random.standard_normal((2, n, 2, 6))
        owner = random.integers(0, cuts, n)
        parts = [_partial(q, k, v, owner == part) for part in range(cuts)]
        right = reference.attention(q, k, v, 0.5)
        np.testing.assert_allclose(merge(parts), right, rtol=2e-5, atol=2e-6)
        assert merge(parts).dtype == np.float32

    def test_nothing_anywhere_is_zeros(self) -> None:
        empty = _partial(np.ones((2, 3)), np.ones((1, 1, 3)), np.ones((1, 1, 3)), np.array([False]))
        np.testing.assert_array_equal(merge([empty, empty]), np.zeros((2, 3)))

    def test_a_head_can_be_empty_beside_a_full_one(self) -> None:
        part = Partial(
            np.array([-np.inf, 1.0], np.float32),
            np.array([0.0, 2.0], np.float32),
            np.array([[0.0], [6.0]], np.float32),
        )
        np.testing.assert_array_equal(merge([part]), [[0.0], [3.0]])

    def test_far_apart_maxima_neither_overflow_nor_vanish(self) -> None:
        def one(top: float, value: float) -> Partial:
            return Partial(
                np.array([top], np.float32),
                np.ones(1, np.float32),
                np.full((1, 1), value, np.float32),
            )

        np.testing.assert_array_equal(merge([one(-1e6, 1.0), one(-1e6, 3.0)]), [[2.0]])
        np.testing.assert_array_equal(merge([one(1e6, 5.0), one(-1e6, 3.0)]), [[5.0]])

    def test_parts_must_be_alike(self) -> None:
        def of(heads: int) -> Partial:
            return Partial(
                np.zeros(heads, np.float32),
                np.ones(heads, np.float32),
                np.zeros((heads, 2), np.float32),
            )

        with pytest.raises(InvalidArgument, match=r"\(2, 2\) and \(3, 2\)"):
            merge([of(2), of(3)])
        with pytest.raises(InvalidArgument, match="at least one"):
            merge([])
