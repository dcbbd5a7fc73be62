"""Head shapes: their names, and how much arithmetic attention over a row takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"(\d+)q(\d+)kv(?:(\d+)d)?")
#: The head_dim that a name leaves out.
_USUAL_DIM = 64


def name_of(shape: Mapping[str, Any]) -> str:
    """``9q3kv``: query and KV heads; ``9q3kv80d`` where head_dim is not 64."""
    name = f"{shape['q_heads']}q{shape['kv_heads']}kv"
    return name if shape["head_dim"] == _USUAL_DIM else f"{name}{shape['head_dim']}d"


def of_name(name: str) -> dict[str, int] | None:
    """q_heads, kv_heads and head_dim of a name; None for what is no name."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return None
    q_heads, kv_heads, head_dim = map(int, parts.groups(default=str(_USUAL_DIM)))
    return {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}


def operations_a_row(q_heads: int, head_dim: int) -> int:
    """A multiply-add for q.k and one for p.v, each two operations, for every query head."""
    return 4 * q_heads * head_dim
