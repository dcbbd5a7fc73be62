"""Arguments at the door: Python hands over anything, and behind it a value is of the kind that they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial.contract.errors import InvalidArgument

PAGE_TOKENS = (16, 32, 64)


def shown(value: object) -> str:
    """``value`` as a message shows it: its repr, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # of a stranger's own __repr__, or an integer of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:100]}..."


def integer(value: object, name: str, low: int | None = None, high: int | None = None) -> int:
    """``value`` as an int from ``low`` to ``high``; `InvalidArgument` for another, for 64.0 and True too."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidArgument(f"{name} is {shown(value)}; give an integer")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        raise InvalidArgument(f"{name} is {shown(number)}; allowed: {allowed}")
    return number


def integers(value: object, name: str) -> npt.NDArray[Any]:
    """Integers of any width, shape (n,), from an array or any other iterable; an empty one has none.

    A text, bytes, a set or a mapping is no row of integers, and neither are booleans or 1.0.
    """
    rows: Any = value
    if not isinstance(value, (np.ndarray, list, tuple)):
        if isinstance(value, (str, bytes, bytearray, Set, Mapping)) or not isinstance(
            value, Iterable
        ):
            raise InvalidArgument(f"{name} is {shown(value)}; give integers of shape (n,)")
        rows = list(value)
    try:
        array = np.asarray(rows)
    except (TypeError, ValueError, OverflowError):
        array = np.zeros((0, 0), object)  # rows of several lengths
    if array.ndim == 1 and array.size == 0:
        return np.zeros(0, np.int64)
    mixed = array is not rows and not {bool, np.bool_}.isdisjoint(map(type, rows))
    if array.ndim != 1 or array.dtype.kind not in "iu" or mixed:
        raise InvalidArgument(
            f"{name} is {shown(value)} (shape {array.shape}, dtype {array.dtype}); give integers of "
            "shape (n,)"
        )
    return array


def page_size(value: object) -> int:
    """``value`` as page_tokens."""
    tokens = integer(value, "page_tokens")
    if tokens not in PAGE_TOKENS:
        raise InvalidArgument(f"page_tokens is {shown(tokens)}; allowed: {PAGE_TOKENS}")
    return tokens


def flag(value: object, name: str) -> bool:
    """``value`` as a bool; `InvalidArgument` for what only has a truth, as "no" and 0 have."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} is {shown(value)}; give True or False")
    return bool(value)


def callback(value: object, name: str) -> None:
    """`InvalidArgument` for what can't be called, unless it is None."""
    if value is not None and not callable(value):
        raise InvalidArgument(f"{name} is {shown(value)}; give something to call, or None")
