"""``kvtrial cold``: a store is listed, checked, deleted from and collected at the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest
from spilling import P

from kvtrial.cold import KINDS, errors, open_cold
from kvtrial.contract import InvalidArgument
from kvtrial.measure.cold.pattern import PatternStore
from kvtrial.tools import command


@pytest.fixture(params=sorted(KINDS))
def folder(request, tmp_path):
    """A store of two sequences, of two pages and of one."""
    store = PatternStore()
    with open_cold(request.param, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(2 * P, seed=1), np.arange(2 * P))
        cold.spill(store.filled(P, seed=2), 1 + np.arange(P))
    return tmp_path / "cold"


def said(capsys, *arguments):
    """Exit code and what the command printed, as JSON."""
    code = command.main(["cold", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_it_is_listed_checked_deleted_and_collected(folder, capsys):
    code, found = said(capsys, "catalogue", folder)
    assert code == 0 and found["folder"] == str(folder) and found["kind"] in KINDS
    rows = {entry["rows"]: entry["key"] for entry in found["sequences"]}
    assert rows.keys() == {P, 2 * P}
    assert said(capsys, "verify", folder)[1]["damage"] == []
    # A beginning of a key is enough where it fits one alone.
    code, found = said(capsys, "delete", folder, rows[2 * P][:12].upper())
    assert (code, found["deleted"]) == (0, [rows[2 * P]])
    code, found = said(capsys, "gc", folder)
    assert code == 0 and (
        found["freed_bytes"] > 0 or found["kind"] == "Z1"
    )  # whose log is written out
    (left,) = said(capsys, "catalogue", folder)[1]["sequences"]
    assert left["key"] == rows[P]


def test_people_get_a_table_and_a_line(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    printed = {}
    for verb in ("catalogue", "verify", "gc"):
        assert command.main(["cold", verb, str(folder)]) == 0
        printed[verb] = capsys.readouterr().out.splitlines()
    assert len(printed["catalogue"]) == 4  # a head, two sequences, and the line
    assert printed["catalogue"][-1].startswith(f"sequences: 2; {folder} (")
    assert printed["verify"][0].startswith(f"damaged pages: 0; {folder} (")
    assert printed["gc"][0].startswith("given back: ")
    key = printed["catalogue"][1].split()[0]
    assert command.main(["cold", "delete", str(folder), key]) == 0
    assert capsys.readouterr().out.startswith(f"deleted: {key}, ")


def test_damage_is_named_with_what_to_delete_and_the_command_fails(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    pattern = PatternStore().filled(2 * P, seed=1).contents()[1][1]
    for file in folder.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        if (at := data.find(pattern)) >= 0:
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    code, found = said(capsys, "verify", folder)
    (damage,) = found["damage"]
    assert code == 1 and damage["what"]
    assert command.main(["cold", "verify", str(folder)]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"page {damage['key'][:16]}: ")
    assert second.strip() == f"delete {damage['sequences'][0][:16]} and spill again"
    assert last.startswith("damaged pages: 1; ")
    said(capsys, "delete", folder, *damage["sequences"])
    code, found = said(capsys, "verify", folder)
    assert (code, found["damage"]) == (0, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("delete",), "delete needs at least one key; `kvtrial cold catalogue .*` lists them"),
        (("gc", "ab"), "gc takes no key, and was given 'ab'"),
        (("delete", ""), "the key is empty; give the start of one key: [0-9a-f]{16}, "),
        (("delete", "xyz"), "no keys start with 'xyz'; give the start of one key: [0-9a-f]{16}, "),
    ],
)
def test_keys_that_mean_nothing_are_named(folder, arguments, message):
    verb, *keys = arguments
    with pytest.raises(InvalidArgument, match=message):
        command.main(["cold", verb, str(folder), *keys])


def test_a_folder_without_a_store_stays_as_it_is(tmp_path):
    for path in (tmp_path / "new", tmp_path):
        with pytest.raises(errors.ForeignStore, match="holds no cold store"):
            command.main(["cold", "gc", str(path)])
    assert list(tmp_path.iterdir()) == []


def test_an_empty_key_deletes_nothing(tmp_path):
    """As an unset variable of a script gives it, where one sequence alone is stored."""
    store = PatternStore()
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
    with pytest.raises(InvalidArgument, match="the key is empty; give the start of one key"):
        command.main(["cold", "delete", str(tmp_path / "cold"), ""])
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        assert cold.contains(np.arange(P)) == P


def test_damage_beside_the_pages_is_shown_and_the_command_fails(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    store = PatternStore()
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
    segment = tmp_path / "cold" / "segments" / "00000001.seg"
    segment.write_bytes(b"?" + segment.read_bytes()[1:])
    assert command.main(["cold", "verify", str(tmp_path / "cold")]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == f"{segment} at offset 0: the file header is damaged"
    assert "spill what you need into another folder" in second
    assert last.startswith("damaged pages: 0; ")
