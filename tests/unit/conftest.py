"""What unit tests share: kinds of cold stores, a hot store of plain bytes to spill, an empty MLflow store."""

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


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: that takes it seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path
