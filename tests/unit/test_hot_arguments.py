"""What every arm takes for a layer and for the rows of a restore, whatever Python hands over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvtrial
from kvtrial import candidates
from kvtrial.contract import PoolExhausted


@contextlib.contextmanager
def session_of(arm: str) -> Iterator[Any]:
    if candidates.get(arm).not_built is not None:
        pytest.skip(f"{arm} is not built")
    shape = {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "budget_bytes": 1 << 20}
    with contextlib.closing(kvtrial.open_store(arm, trial=True, **shape)) as store:
        yield store.open_session()


@pytest.mark.parametrize("arm", ["K0", "A1", "K1", "K2", "K3", "K5"])
def test_a_layer_is_an_index_in_every_verb(arm: str) -> None:
    """Not an int, but what Python takes for one."""

    class Second:
        def __index__(self) -> int:
            return 1

    with session_of(arm) as session:
        rows = np.zeros((3, 2, 16), np.float32)
        for layer in (0, Second()):
            session.append(layer, [0, 1, 2], rows, rows)
        assert session.length(Second()) == 3
        assert session.valid(Second()).tolist() == [True] * 3
        assert len(session.read(Second(), [0])[0]) == 1
        if arm not in ("K0", "A1"):
            assert session.page_table(Second()).length == 3


@pytest.mark.parametrize("arm", ["K1", "K3"])
def test_a_restore_past_all_memory_is_no_room(arm: str) -> None:
    with session_of(arm) as session:
        with pytest.raises(PoolExhausted, match=f"valid has {2**45} rows"):
            session.begin_restore(np.broadcast_to(np.True_, (2, 2**45)))
        assert session.length(0) == 0
