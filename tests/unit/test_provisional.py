"""What a run says before it has finished: from tables and journals, marked, and never written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest
import shown_trial
from shown_trial import ARMS, CONTEXTS, FEW, steady

from kvtrial.decision.verdict import MixedProtocol
from kvtrial.run import events
from kvtrial.run.journal import Journal
from kvtrial.stages.after import provisional
from kvtrial.tools import command, verbs


def unfinished(folder: Path, blocks: dict[int, int], without: tuple[str, ...] = ()) -> Path:
    """A run whose m2 is at work: so many blocks by context, in the journal as the stage puts them."""
    run_dir = folder / "run-a"
    steps = {
        name: {context: of[context][: blocks.get(context, 0)] for context in CONTEXTS}
        for name, of in steady(**ARMS).items()
    }
    table = shown_trial.trial(steps)
    for stage, rows in table.groupby("stage"):
        if stage in without:
            continue
        if stage != "m2":
            events.write(rows, run_dir / "events" / f"{stage}.parquet")
            continue
        attempt = Journal(run_dir, "m2").attempt()
        own = rows[rows["metric"] != "attempt/complete"].drop(columns="attempt")
        for (context, block), unit in own.groupby(["context", "block"]):
            attempt.put(f"{context}x1x1-block{block:02d}-trial0", unit.to_dict("records"))
    (run_dir / "protocol.json").write_text(json.dumps(FEW), encoding="utf-8")
    return run_dir


def decide(run_dir: Path) -> provisional.SoFar:
    with shown_trial.evidence():
        return provisional.decide_so_far(run_dir)


def test_blocks_of_a_stage_at_work_count_and_what_is_missing_is_said(tmp_path):
    found = decide(unfinished(tmp_path, {4096: 3}))
    assert found.missing == [
        "stage m2 is not finished",
        "3 of 4 blocks at 4,096 positions",
        "0 of 4 blocks at 512 positions",
        "0 of 4 blocks at 16,384 positions",
    ]
    data = found.verdict.data
    assert data["run"]["store"] == "K2T"
    (row,) = [r for r in data["run"]["profiles"] if r["candidate"] == "K2T"]
    assert row["against_fp32"]["4096"]["n_blocks"] == 3
    assert row["against_fp32"]["4096"]["ratio"] == pytest.approx(20 / 14, rel=0.01)
    assert data["language"]["outcome"] == "KEEP"


def test_a_cell_that_has_too_few_blocks_has_no_say_and_is_shown(tmp_path):
    found = decide(unfinished(tmp_path, {4096: 4, 512: 2}))
    data = found.verdict.data
    assert {a["context"]: a["role"] for a in data["arms"]} == {4096: "primary", 512: "veto"}
    assert "2 of 4 blocks at 512 positions" in found.missing
    assert set(data["run"]["profiles"][0]["tokens_per_s"]) == {"4096"}
    # The interval of the cell that is whole is that of a finished run.
    with shown_trial.evidence():
        whole = shown_trial.decided()
    (mine,) = [a for a in data["language"]["against"] if a["incumbent"] == "K1"]
    (theirs,) = [a for a in whole["language"]["against"] if a["incumbent"] == "K1"]
    assert mine == theirs


def test_too_little_is_said_with_what_is_missing(tmp_path):
    with pytest.raises(
        provisional.NothingYet, match=r"1 of 4 blocks at 4,096.* 2 blocks of the prim"
    ):
        decide(unfinished(tmp_path, {4096: 1}))
    with pytest.raises(provisional.NothingYet, match=r"stage m2 is not finished; 0 of 4 blocks"):
        decide(unfinished(tmp_path / "b", {4096: 1}, without=("m2",)))


def test_a_stage_that_has_not_begun_leaves_the_others_to_say_what_they_say(tmp_path):
    found = decide(unfinished(tmp_path, {4096: 4}, without=("aa", "m1")))
    assert found.missing[:3] == [
        "stage m1 is not finished",
        "stage aa is not finished",
        "stage m2 is not finished",
    ]
    run = found.verdict.data["run"]
    # Without the known answers the method is not shown to work; what was measured is shown all the same.
    assert run["store"] is None and "known answer" in run["reason"]
    assert {row["candidate"]: row["passes"] for row in run["profiles"]}["K2T"]


def test_two_protocols_are_never_one_run(tmp_path):
    run_dir = unfinished(tmp_path, {4096: 4})
    path = run_dir / "events" / "aa.parquet"
    rows = pd.read_parquet(path)
    events.write(rows.assign(protocol_sha256="0" * 64), path)
    with pytest.raises(MixedProtocol):
        decide(run_dir)


def test_the_command_shows_it_marked_and_writes_nothing(tmp_path, monkeypatch, capsys):
    run_dir = unfinished(tmp_path, {4096: 4})
    before = sorted(run_dir.rglob("*"))
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    with shown_trial.evidence():
        assert command.main(["verdict"]) == 4
        printed = capsys.readouterr().out
        assert printed.startswith("PROVISIONAL: tokens/s by filled positions")
        assert "What to run: K2T (FP16)" in printed
        assert "Missing: stage m2 is not finished" in " ".join(printed.replace("│", "").split())
        assert command.main(["verdict", "--json"]) == 4
        document = json.loads(capsys.readouterr().out)
    assert document["provisional"][0] == "stage m2 is not finished"
    assert document["protocol_sha256"] == shown_trial.protocol.sha256(FEW)
    assert sorted(run_dir.rglob("*")) == before


def test_the_newest_of_a_verdict_and_a_run_at_work_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path))
    for name in ("old", "new"):
        (tmp_path / name / "journal" / "m2" / "attempt-1").mkdir(parents=True)
        (tmp_path / name / "protocol.json").write_text("{}", encoding="utf-8")
    (tmp_path / "old" / "verdict.json").write_text("{}", encoding="utf-8")

    def touch(path: Path, second: int) -> None:
        os.utime(path, (second, second))

    for path in tmp_path.rglob("*"):
        touch(path, 100)
    touch(tmp_path / "new" / "journal" / "m2" / "attempt-1", 300)
    touch(tmp_path / "old" / "verdict.json", 200)
    assert verbs._newest_run().name == "new"
    touch(tmp_path / "old" / "verdict.json", 400)
    assert verbs._newest_run().name == "old"
