"""Runs Snakemake as a user does: a process of its own, in the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

Completed = subprocess.CompletedProcess[str]


@pytest.fixture
def snakemake(tmp_path: Path) -> Callable[..., Completed]:
    """``snakemake(*arguments)``: stdout and stderr as one text; results go below ``tmp_path``."""

    def call(*arguments: str) -> Completed:
        return subprocess.run(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=ROOT,
            env={**os.environ, "KVTRIAL_RESULTS": str(tmp_path / "results")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )

    return call
