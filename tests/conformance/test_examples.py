"""The example packages of docs/candidates, built and installed as a reader would, then tried."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: folder -> its candidates
CANDIDATES = {
    "cython_kernel": ["TwoPass"],
    "rust_kernel": ["Lazy"],
    "row_formats": ["B16", "B4"],
    "numpy_store": ["FlatNumpy"],
}
_FLAT = ["branch", "holes", "partials", "pool", "spill"]
#: candidate -> required capabilities that it lacks, and all that it lacks
LACKS = {
    "B16": ([], ["reserve_slot"]),
    "B4": ([], ["reserve_slot"]),
    "FlatNumpy": (_FLAT, sorted([*_FLAT, "reserve_slot"])),
}


def run(*command: str, **named: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **named,  # type: ignore[call-overload]
    )


def test_every_example_is_tried():
    assert {p.name for p in EXAMPLES.iterdir() if p.is_dir()} == set(CANDIDATES)


@pytest.mark.parametrize("folder", CANDIDATES)
def test_an_example_passes_all_that_it_claims(folder: str, tmp_path: Path):
    if folder == "rust_kernel" and shutil.which("rustc") is None:
        pytest.skip("rustc was not found")
    source = tmp_path / folder  # a copy: a build leaves nothing in the tree
    shutil.copytree(EXAMPLES / folder, source)
    target = tmp_path / "site"
    built = run(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
        "--disable-pip-version-check", "--target", str(target), str(source),
    )  # fmt: skip
    assert built.returncode == 0, built.stdout

    for name in CANDIDATES[folder]:
        out = tmp_path / f"{name}.json"
        # Found by its entry point alone.
        tried = run(
            "-m", "kvtrial.conformance", name, str(out), "--page-tokens", "16,32",
            env={**os.environ, "PYTHONPATH": str(target)},
        )  # fmt: skip
        assert tried.returncode == 0, tried.stdout
        result = json.loads(out.read_text(encoding="utf-8"))
        assert result["passed"] and result["failed"] == []
        assert (result["missing_capabilities"], result["gaps"]) == LACKS.get(name, ([], []))
