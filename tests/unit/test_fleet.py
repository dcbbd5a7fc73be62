"""Many verdicts in one table, and a file that is none."""

from __future__ import annotations

import json

import pytest
from shown_trial import ARMS, decided, steady

from kvtrial.show import answers, fleet
from kvtrial.tools import command

RUST = {**ARMS, "K3": 10.0}


def verdict_file(folder, step_ms, **facts):
    folder.mkdir()
    path = folder / "verdict.json"
    verdict = decided(steady(**step_ms), facts=facts)
    path.write_text(json.dumps(verdict), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path):
    return [
        verdict_file(tmp_path / "b", ARMS, machine="m-2", run_id="b"),
        verdict_file(tmp_path / "a", RUST, machine="m-1", run_id="a"),
    ]


def test_a_row_is_the_three_answers_and_by_what(files):
    first, second = fleet.table(map(fleet.load, files))
    assert (first["machine"], second["machine"]) == ("m-1", "m-2")
    # Rust is twice as fast as K1 and faster than FP16: it is the FP32 arm, and no profile passes.
    assert (first["run"]["store"], first["run"]["profile"]) == ("K3", "fp32")
    assert first["run"]["over_fp32"] is None
    assert (first["language"]["outcome"], first["language"]["adopted"]) == ("ADOPT", "K3")
    decided_by = first["language"]["decided_by"]
    assert (decided_by["challenger"], decided_by["incumbent"]) == ("K3", "K1")
    assert decided_by["ratio"] == pytest.approx(2.0, rel=0.01)
    assert (second["run"]["store"], second["run"]["fp32_store"]) == ("K2T", "K1")
    assert second["run"]["over_fp32"]["ratio"] == pytest.approx(20 / 14, rel=0.01)
    assert (second["language"]["outcome"], second["language"]["kind"]) == ("KEEP", "ruled out")
    assert second["cold"] == {"adopted": None, "z1_over_z2": None}


def test_the_comparison_is_the_one_that_the_reason_names(files):
    for path in files:
        verdict = fleet.load(path)
        decided_by = fleet.row(verdict)["language"]["decided_by"]
        if verdict["language"]["outcome"] == "KEEP":
            said = f"{decided_by['ratio']:.3f}x the speed of {decided_by['incumbent']}"
            assert said in verdict["language"]["reason"]


def test_the_command_takes_files_and_folders_and_80_columns_do(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert command.main(["fleet", str(files[0]), str(files[1].parent), "--json"]) == 0
    assert [row["run_id"] for row in json.loads(capsys.readouterr().out)] == ["a", "b"]
    assert command.main(["fleet", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "x K1 1.43 [1.42, 1.44]" in printed
    assert "K3/K1 2.00 [1.99, 2.01]" in printed
    assert max(map(len, printed.splitlines())) <= 80
    # The same for all: said once, and no column.
    assert printed.count("model: m") == 1 and "protocol: " in printed


def test_a_trial_without_a_challenger_has_no_deciding_comparison(tmp_path):
    path = verdict_file(tmp_path / "c", {name: ARMS[name] for name in ("K0", "A1", "A2", "K1")})
    (row,) = fleet.table([fleet.load(path)])
    assert row["language"]["decided_by"] is None
    assert row["run"]["store"] == "K1"


def test_a_verdict_of_an_earlier_release_says_so(tmp_path):
    path = tmp_path / "verdict.json"
    path.write_text('{"run_id": "r", "hot": {"outcome": "KEEP"}}', encoding="utf-8")
    with pytest.raises(fleet.BadVerdict, match=r"earlier release.*kvtrial decide RUN"):
        fleet.load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{not json", "Expecting property name"),
        ("[]", r"\(top level\): \[\] is not of type 'object'"),
        ('{"run_id": "r"}', "'machine' is a required property"),
        ('{"surprise": 1}', "'surprise' was unexpected"),
    ],
)
def test_a_bad_file_is_named(tmp_path, files, text, said):
    path = tmp_path / "odd.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(fleet.BadVerdict, match=rf"odd\.json: .*{said}"):
        fleet.load(path)


def test_a_damaged_file_costs_its_own_row_and_is_named(files, capsys, monkeypatch):
    files[0].write_text("{", encoding="utf-8")
    assert command.main(["fleet", *map(str, files), "--json"]) == 1
    said = capsys.readouterr()
    assert [row["run_id"] for row in json.loads(said.out)] == ["a"]
    assert said.err.startswith(f"left out: {files[0]}: Expecting property name")
    monkeypatch.setenv("KVTRIAL_RESULTS", str(files[0].parent.parent))
    assert command.main(["history", "--json"]) == 0
    said = capsys.readouterr()
    assert [row["run_id"] for row in json.loads(said.out)] == ["a"]
    assert said.err.startswith(f"left out: {files[0]}: ")
    files[1].write_text("[]", encoding="utf-8")
    with pytest.raises(fleet.BadVerdict, match=r"b.verdict\.json: .*; .*a.verdict\.json: "):
        command.main(["fleet", *map(str, files)])


def test_a_wrong_value_is_named_with_its_key(tmp_path, files):
    verdict = json.loads(files[0].read_text(encoding="utf-8"))
    verdict["language"]["outcome"] = "MAYBE"
    files[0].write_text(json.dumps(verdict), encoding="utf-8")
    with pytest.raises(fleet.BadVerdict, match=r"language\.outcome: 'MAYBE' is not one of .*ADOPT"):
        fleet.load(files[0])


def test_a_file_whose_brackets_have_no_end_is_named(tmp_path):
    (tmp_path / "verdict.json").write_text("[" * 100_000)
    with pytest.raises(fleet.BadVerdict, match=r"verdict\.json: .*recursion"):
        fleet.load(tmp_path)


def test_a_verdict_says_when_and_where_it_was_measured() -> None:
    facts = {"begun": "2026-11-30T08:05:09+00:00", "commit": "a1" * 20}
    facts |= {"host": "node-7", "kernel": "Linux 6.1"}
    verdict = decided(steady(**ARMS), facts=facts)
    assert verdict["measured"] == facts
    assert answers.where(verdict) == "m on here, 2026-11-30"
    said = "begun 2026-11-30 08:05 UTC, commit a1a1a1a1a1a1, host node-7, Linux 6.1"
    assert answers.measured(verdict) == said
    row = fleet._shown(fleet.row(verdict))
    assert (row["begun"], row["machine"]) == ("2026-11-30\na1a1a1a1", "here\nnode-7")
    unknown = decided(steady(**ARMS))
    assert (answers.where(unknown), answers.measured(unknown)) == ("m on here", "")
