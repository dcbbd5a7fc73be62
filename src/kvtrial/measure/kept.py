"""What was timed did the right work: real calls are kept while the clock runs, and checked when it has stopped.

At steps and layers that the seed draws, a session is stood in for by `Kept`: it hands every call on, and keeps
the query and the output of one layer's attention and the rows that were handed in there. Afterwards the output
is held against the float64 oracle over all rows of the layer, and the rows against what the store gives back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtrial import reference
from kvtrial.contract import F32, KVSession, Profile
from kvtrial.measure.stores import Snapshot


@dataclass(frozen=True)
class Call:
    """One kept call: float32 q and out (H_q, D), k and v (1, H_kv, D) as they were handed in.

    ``by_slot``: they were written into a reserved slot, not appended.
    """

    layer: int
    position: int
    scale: float
    q: F32
    out: F32
    k: F32
    v: F32
    by_slot: bool


class Kept:
    """A session that hands everything on and keeps one layer's rows and attention."""

    def __init__(self, session: KVSession, layer: int) -> None:
        self._session = session
        self._layer = layer
        self._rows: tuple[F32, F32] | None = None
        self._views: tuple[F32, F32] | None = None
        self.call: Call | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def append(self, layer: int, positions: Any, k: F32, v: F32) -> None:
        """Append, and keep the rows."""
        if layer == self._layer:
            self._rows = k.copy(), v.copy()
        self._session.append(layer, positions, k, v)

    def reserve_slot(self, layer: int, positions: Any) -> tuple[F32, F32] | None:
        """The session's slot; what is written into it is kept when it is committed."""
        views = self._session.reserve_slot(layer, positions)
        if layer == self._layer:
            self._views = views
        return views

    def commit_slot(self, layer: int, positions: Any) -> None:
        """Commit, and keep the rows."""
        if layer == self._layer and self._views is not None:
            self._rows = self._views[0].copy(), self._views[1].copy()
        self._session.commit_slot(layer, positions)

    def attend(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """Attend, and keep what went in and came out."""
        self._session.attend(layer, q, out, scale)
        if layer == self._layer and self._rows is not None:
            position = self._session.length(layer) - 1
            self.call = Call(
                layer, position, scale, q.copy(), out.copy(), *self._rows, self._views is not None
            )


def output_error(call: Call, session: KVSession, snapshot: Snapshot, profile: Profile) -> float:
    """How far the kept output is off the oracle, in units of the bound: at most 1 is right.

    The oracle sees the rows that the session was filled with and, behind them, those that it gives back:
    what an attention over lost or stale rows gives is far outside.
    """
    appended = session.read(call.layer, np.arange(snapshot.tokens, call.position + 1))
    filled = snapshot.k[call.layer], snapshot.v[call.layer]
    k, v = (np.concatenate(rows) for rows in zip(filled, appended))
    right = reference.attention(call.q, k, v, call.scale)
    bound = reference.tolerance(profile, call.q, k, v, call.scale)
    return _in_bounds(np.abs(call.out - right), bound)


def row_error(call: Call, session: KVSession, profile: Profile) -> float:
    """How far the stored row is off the one that was handed in, in units of the storage bound.

    At most 1 is right; of FP32, whose bound is 0, 0 is.
    """
    stored = session.read(call.layer, np.array([call.position]))
    errors = [
        _in_bounds(
            np.abs(np.subtract(own, given, dtype=np.float64)),
            profile.storage_bound(given),
        )
        for own, given in zip(stored, (call.k, call.v))
    ]
    return max(errors)


def _in_bounds(error: np.ndarray, bound: np.ndarray) -> float:
    """The largest error over its bound; infinite where there is an error and no room for one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(error == 0, 0.0, error / bound)
    return float(np.max(shares))
