"""The optional target on a tiny model, with the packages that are there."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from kvtrial.measure.peers import programs

SCHEMA = Path(__file__).resolve().parents[2] / "workflow" / "schemas" / "peers.json"
SMOKE = ["--cores", "2", "--profile", "profiles/smoke", "peers"]


@pytest.mark.slow
def test_what_is_installed_is_compared_and_what_is_missing_is_said(snakemake, tmp_path):
    done = snakemake(*SMOKE)
    absent = programs.missing()
    if len(absent) == len(programs.PROGRAMS):
        assert done.returncode == 1
        assert (
            "no peer is installed (llama-cpp-python, torch, onnxruntime, openvino); run `make peers`"
            in (done.stdout)
        )
        assert "Traceback" not in done.stdout
        return
    assert done.returncode == 0, done.stdout
    for package in absent.values():
        assert package in done.stdout
    (path,) = (tmp_path / "results").glob("*/peers.json")
    rows = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(rows)
    shown = {row["peer_setting"].partition(" ")[0] for row in rows}
    assert shown == {package for package, _ in programs.PROGRAMS.values()} - set(absent.values())
    assert {row["context"] for row in rows} == {64, 128, 256}
    assert (path.parent / "figures" / "peers.svg").is_file()
    assert not (path.parent / "events" / "peers.parquet").exists()  # the verdict must not see them
    assert "Nothing to be done" in snakemake(*SMOKE).stdout
