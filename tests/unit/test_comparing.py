"""`kvtrial compare` and `kvtrial history`: arms over the reference of their own run, from run to run."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import shown_trial
from shown_trial import ARMS, FEW, steady

from kvtrial.decision.verdict import MixedProtocol
from kvtrial.run import events
from kvtrial.run.layout import ConfigError
from kvtrial.show import fleet
from kvtrial.stages.after.provisional import decide_so_far
from kvtrial.stages.after.verdict import write_verdict
from kvtrial.tools import command, comparing


def run(results: Path, name: str, *, decided: bool = False, **given: object) -> Path:
    """A run whose step times are `ARMS` but for what is given; a fact of the run by its name."""
    facts = {"run_id": name} | {
        key: str(given.pop(key)) for key in ("begun", "machine") if key in given
    }
    table = shown_trial.trial(steady(**{**ARMS, **given}), facts=facts)  # type: ignore[arg-type]
    run_dir = results / name
    for stage, rows in table.groupby("stage"):
        events.write(rows, run_dir / "events" / f"{stage}.parquet")
    (run_dir / "protocol.json").write_text(json.dumps(FEW), encoding="utf-8")
    if decided:
        with shown_trial.evidence():
            write_verdict(run_dir)
    return run_dir


def test_an_arm_is_compared_over_its_own_runs_reference(tmp_path: Path):
    """The second day all is half as fast, and K3 alone lost 5% beside K1: that is what is said."""
    before = run(tmp_path, "before")
    slow = {name: 2 * ms for name, ms in ARMS.items()} | {"K3": 2 * 20.0 / 0.95}
    after = run(tmp_path, "after", **slow)
    found = comparing.compare(before, after)
    assert found["reference"] == "K1" and found["not_comparable"] == []
    rows = {(row["candidate"], row["context"]): row for row in found["rows"]}
    assert len(rows) == (len(ARMS) - 1) * 3
    for (name, _), row in rows.items():
        right = 0.95 if name == "K3" else 1.0
        assert row["ratio"] == pytest.approx(right, rel=1e-9), name
        assert row["ci95"][0] <= right * (1 + 1e-9) and row["ci95"][1] >= right * (1 - 1e-9)
        assert row["n_blocks"] == [4, 4]
    read = {(row["arm"], row["context"]): row["reading"] for row in comparing.compared(found)}
    assert read["K3", "4,096"] == "slower" and read["K1T", "4,096"] == "no difference shown"


def test_the_interval_is_welchs():
    """By hand: means ln 1.0 and ln 1.1, each of two blocks 0.02 apart. The variance of a mean is 0.0001, that of
    the difference 0.0002, with 2 degrees of freedom: t is 4.3027."""
    before, after = np.array([-0.01, 0.01]), math.log(1.1) + np.array([-0.01, 0.01])
    row = comparing._change(before, after, 0.95)
    half = 4.302653 * math.sqrt(0.0002)
    assert row["ratio"] == pytest.approx(1.1)
    assert row["ci95"] == pytest.approx([1.1 * math.exp(-half), 1.1 * math.exp(half)], rel=1e-6)


def test_what_is_not_in_both_is_said(tmp_path: Path):
    table = {name: ms for name, ms in ARMS.items() if name != "K5"}
    before = run(tmp_path, "before", machine="m-1")
    after = tmp_path / "after"
    rows = shown_trial.trial(steady(**table), facts={"run_id": "after", "machine": "m-2"})
    for stage, own in rows.groupby("stage"):
        events.write(own, after / "events" / f"{stage}.parquet")
    fewer = {**FEW, "cells": [cell for cell in FEW["cells"] if cell["context"] != 512]}
    sha = comparing.protocol.sha256(fewer)
    for file in (after / "events").glob("*.parquet"):
        own = pd.read_parquet(file).assign(protocol_sha256=sha)
        own.to_parquet(file)
    (after / "protocol.json").write_text(json.dumps(fewer), encoding="utf-8")
    found = comparing.compare(before, after)
    assert {row["context"] for row in found["rows"]} == {4096, 16384}
    assert "K5" not in {row["candidate"] for row in found["rows"]}
    said = "\n".join(comparing.notes(found))
    assert "512 positions, 1 session, 1 thread: a cell of before alone" in said
    assert "K5 at 4,096 positions, 1 session, 1 thread: not measured in both" in said
    assert "Two machines" in said


def test_two_models_are_not_compared(tmp_path: Path):
    before = run(tmp_path, "before")
    table = shown_trial.trial(steady(**ARMS), facts={"run_id": "after", "model": "other"})
    for stage, rows in table.groupby("stage"):
        events.write(rows, tmp_path / "after" / "events" / f"{stage}.parquet")
    (tmp_path / "after" / "protocol.json").write_text(json.dumps(FEW), encoding="utf-8")
    with pytest.raises(
        ConfigError, match="not comparable: the model is m in before and other in after"
    ):
        comparing.compare(before, tmp_path / "after")


def test_history_is_by_time_in_every_form(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path))
    run(tmp_path, "a-later", decided=True, begun="2026-12-02T08:00:00+00:00", K2T=16.0)
    run(tmp_path, "b-earlier", decided=True, begun="2026-12-01T08:00:00+00:00")
    run(tmp_path, "c-open")
    assert command.main(["history", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["begun"] for row in rows] == ["2026-12-01 08:00", "2026-12-02 08:00"]
    assert [row["run"] for row in rows] == ["K2T (FP16)"] * 2
    assert rows[0]["over the FP32 arm"].startswith("K2T 1.43 [")
    assert rows[1]["over the FP32 arm"].startswith("K2T 1.25 [")
    assert command.main(["history", "--arm", "K3", "--json"]) == 0
    first, _ = json.loads(capsys.readouterr().out)
    assert first["arms"]["K3"]["ratio"] == pytest.approx(1.0, rel=1e-3)
    assert command.main(["compare", "b-earlier", "a-later", "--markdown"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("| arm | context |")
    (row,) = [line for line in said if line.startswith("| K2T | 4,096 |")]
    assert "0.875" in row and "slower" in row  # 14 / 16


def test_events_of_another_protocol_are_not_compared(tmp_path: Path):
    before, after = run(tmp_path, "before"), run(tmp_path, "after")
    (after / "protocol.json").write_text(json.dumps({**FEW, "name": "other"}), encoding="utf-8")
    with pytest.raises(MixedProtocol, match="a run never mixes protocols"):
        comparing.compare(before, after)


def damaged(path: Path, how: str) -> None:
    whole = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "empty":
        path.touch()
    elif how == "a folder":
        path.mkdir()
    elif how == "a link to nothing":
        path.symlink_to("nowhere")
    else:
        pd.DataFrame({"a": [1]}).to_parquet(path)


@pytest.mark.parametrize("how", ["cut", "empty", "a folder", "a link to nothing", "other columns"])
def test_a_table_that_is_not_whole_is_named_by_whoever_reads_it(tmp_path: Path, how: str):
    run_dir = run(tmp_path, "before")
    damaged(run_dir / "events" / "aa.parquet", how)
    for read in (write_verdict, decide_so_far, lambda path: comparing.compare(path, path)):
        with pytest.raises(events.EventsInvalid, match=r"events/aa\.parquet: "):
            read(run_dir)


def test_a_run_s_folder_may_have_any_name(tmp_path: Path):
    for name in ("caf\udce9", "file:x"):
        folder = run(tmp_path, "before").rename(tmp_path / name)
        found = comparing.compare(folder, folder)
        assert found["rows"]


def test_an_arm_that_no_run_has_is_not_followed(tmp_path: Path):
    runs = [fleet.load(run(tmp_path, "a", decided=True))]
    assert "K3" in comparing.history(runs, ["K3"])[0]["arms"]
    with pytest.raises(ConfigError, match=r"no run has the arm 'K33'; measured: .*K3"):
        comparing.history(runs, ["K3", "K33"])
