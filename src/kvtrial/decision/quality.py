"""Placeholder until the evidence is there."""

from __future__ import annotations

from typing import Any

import pandas as pd


def judge(events: pd.DataFrame, protocol: dict[str, Any]) -> dict[str, Any]:
    """x"""
    return {
        n: {"shown": False, "reasons": ["quality: not shown"], "contexts": []}
        for n in protocol["decision"]["profiles"]
    }
