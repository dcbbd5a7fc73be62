"""Attention over a part of the positions or heads, and how parts are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtrial.contract.arguments import shown
from kvtrial.contract.errors import InvalidArgument

F32 = npt.NDArray[np.float32]


class Partial(NamedTuple):
    """Attention over a part of the positions or heads; every array spans the model's H_q heads.

    A head without a valid row in the part has ``max = -inf``, ``sum = 0`` and zeros. So has one whose
    rows all score -inf, but that its max may be float32's lowest finite number.
    """

    #: float32 (H_q,): the largest score.
    max: F32
    #: float32 (H_q,): the sum of exp(score - max).
    sum: F32
    #: float32 (H_q, D): the sum of exp(score - max) * v, not divided.
    output: F32

    @classmethod
    def empty(cls, q_heads: int, head_dim: int) -> Partial:
        """The partial of nothing, of new arrays that may be written."""
        return cls(
            np.full(q_heads, -np.inf, np.float32),
            np.zeros(q_heads, np.float32),
            np.zeros((q_heads, head_dim), np.float32),
        )


def merge(parts: Sequence[Partial]) -> F32:
    """Join partials into attention output.

    Parameters
    ----------
    parts : sequence of Partial
        At least one, all of one shape; together they cover each valid row once.

    Returns
    -------
    float32 (H_q, D)
        Zeros for a head that no part has a row with a weight for.
    """
    if not isinstance(parts, Sequence) or not parts:
        raise InvalidArgument(f"merge got {shown(parts)}; give at least one Partial")
    for part in parts:
        if not _is_partial(part):
            raise InvalidArgument(
                f"merge got {shown(part)}; give what attend_partial returns: max and sum (H_q,), output "
                "(H_q, D)"
            )
    shape = parts[0].output.shape
    for part in parts:
        if part.output.shape != shape:
            raise InvalidArgument(
                f"merge got outputs of shape {shape} and {part.output.shape}; all must be alike"
            )
    peaks = np.stack([p.max for p in parts]).astype(np.float64)
    top = peaks.max(axis=0)
    # A head that is empty everywhere has top = -inf; comparing with 0 instead keeps inf - inf away.
    weights = np.exp(peaks - np.where(np.isneginf(top), 0.0, top))
    total = (weights * np.stack([p.sum for p in parts])).sum(axis=0)
    output = (weights[:, :, None] * np.stack([p.output for p in parts])).sum(axis=0)
    out = np.zeros(shape, np.float32)
    np.divide(output, total[:, None], out=out, where=total[:, None] != 0, casting="same_kind")
    return out


def _is_partial(part: object) -> bool:
    """Whether it is a `Partial`, of arrays that fit together."""
    return (
        isinstance(part, Partial)
        and all(isinstance(array, np.ndarray) and array.dtype.kind == "f" for array in part)
        and part.output.ndim == 2
        and part.max.shape == part.sum.shape == part.output.shape[:1]
    )
