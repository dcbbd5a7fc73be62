"""What the cold-tier tests share: each kind of cold store, and a hot store of plain bytes to spill."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtrial.cold import KINDS
from kvtrial.measure.cold.pattern import PatternStore


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def store() -> PatternStore:
    return PatternStore()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a cold store may come to lie."""
    return tmp_path / "cold"
