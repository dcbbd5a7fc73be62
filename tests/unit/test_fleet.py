"""Many verdicts in one table, and a file that is none."""

from __future__ import annotations

import json

import pytest
from trial_events import REGISTERED, flat, trial

from kvtrial.decision.verdict import decide
from kvtrial.show import fleet
from kvtrial.tools import command

WINS = {"K0": 100.0, "A1": 80.0, "A2": 70.0, "K1": 50.0, "K2": 40.0, "K3": 40.0}
TIES = {**WINS, "K3": 50.0}


def verdict_file(folder, step_ms, **facts):
    table = trial(flat(**step_ms))
    for key, text in facts.items():
        table.loc[table["metric"] == f"run/{key}", "text"] = text
    folder.mkdir()
    path = folder / "verdict.json"
    path.write_text(decide(table, REGISTERED).to_json(), encoding="utf-8")
    return path


@pytest.fixture
def files(tmp_path):
    return [
        verdict_file(tmp_path / "b", TIES, machine="m-2", run_id="b"),
        verdict_file(tmp_path / "a", WINS, machine="m-1", run_id="a"),
    ]


def test_a_row_is_what_was_decided_and_by_what(files):
    first, second = fleet.table(files)
    assert (first["machine"], first["outcome"], first["adopted"]) == ("m-1", "ADOPT", "K3")
    # 50 ms over 40 ms against K1, the incumbent that K3 beats by least; constant ratios: [x, x].
    assert first["primary"] == {
        "challenger": "K3",
        "incumbent": "K1",
        "context": 4096,
        "layouts_differ": False,
        "ratio": 1.25,
        "ci95": [1.25, 1.25],
        "n_blocks": 12,
    }
    assert (second["machine"], second["outcome"], second["adopted"]) == ("m-2", "KEEP", "K1")
    assert second["primary"]["ratio"] == 1.0
    assert second["cold"] == {"adopted": None, "z1_over_z2": None}


def test_the_command_takes_files_and_folders(files, capsys):
    assert command.main(["fleet", str(files[0]), str(files[1].parent), "--json"]) == 0
    assert [row["run_id"] for row in json.loads(capsys.readouterr().out)] == ["a", "b"]
    assert command.main(["fleet", *map(str, files)]) == 0
    assert "1.250 [1.250, 1.250]" in " ".join(capsys.readouterr().out.split())


def test_a_trial_without_a_challenger_has_no_primary_ratio(tmp_path):
    path = verdict_file(tmp_path / "c", {name: WINS[name] for name in ("K0", "A1", "A2", "K1")})
    assert fleet.table([path])[0]["primary"] is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("{not json", "Expecting property name"),
        ("[]", r"\(top level\): \[\] is not of type 'object'"),
        ('{"run_id": "r"}', "'machine' is a required property"),
    ],
)
def test_a_bad_file_is_named(tmp_path, files, text, said):
    path = tmp_path / "odd.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(fleet.BadVerdict, match=rf"odd\.json: .*{said}"):
        fleet.table([*files, path])


def test_a_wrong_value_is_named_with_its_key(tmp_path, files):
    verdict = json.loads(files[0].read_text(encoding="utf-8"))
    verdict["hot"]["outcome"] = "MAYBE"
    files[0].write_text(json.dumps(verdict), encoding="utf-8")
    with pytest.raises(fleet.BadVerdict, match=r"hot\.outcome: 'MAYBE' is not one of .*ADOPT"):
        fleet.load(files[0])
