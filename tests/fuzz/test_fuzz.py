"""Damaged model files end in typed errors: no crash, no other error, no memory that the file does not account for.

``make test-fuzz`` reads 1,000 of each tensor kind; the tests read a few.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrial.engine.kinds import TensorKind

HERE = Path(__file__).parent
#: Seeds a kind; `make test-fuzz` sets it.
FILES = int(os.environ.get("FUZZ_FILES", "0"))
FIRST = int(os.environ.get("SEED", "0"))
KINDS = [kind.name for kind in TensorKind]


def read(kinds: str, first: int, count: int) -> collections.Counter[str]:
    """What became of the files: read by a child, whose end by a signal is a fault of its own."""
    command = [sys.executable, str(HERE / "reading.py"), kinds, str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["faults"] == []
    seen = collections.Counter(said["seen"])
    assert seen.total() == count * len(kinds.split(","))
    return seen


def test_damaged_files_end_in_typed_errors() -> None:
    """Each way of damage in two families, of each kind."""
    seen = read(",".join(KINDS), 0, 16)
    assert seen["GgufTruncated"] > 10 and seen["GgufInvalid"] > 10 and seen["ran"] > 10


@pytest.mark.skipif(not FILES, reason="make test-fuzz")
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_files(kind: str) -> None:
    seen = read(kind, FIRST, FILES)
    print(kind, dict(seen))
    assert len(seen) > 3
