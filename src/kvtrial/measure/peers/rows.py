"""Rows as other engines lay them out."""

from __future__ import annotations

import numpy as np

from kvtrial.contract import F32


def swapped(rows: F32) -> F32:
    """(N, H_kv, D) as a contiguous (H_kv, N, D), and back."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2))
