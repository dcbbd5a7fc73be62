"""Files of other kinds and sizes than a store makes have a typed error, or do no harm."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from spilling import P

from kvtrial.cold import errors, open_cold, upkeep


@pytest.fixture
def folder(kind, store, tmp_path):
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
    return tmp_path / "cold"


def rows(folder, store):
    with open_cold(None, folder, store.identity()) as cold:
        return cold.restore(np.arange(P), store.open_session())


def huge(path):
    """More than anybody has memory for, and nothing on the disk."""
    os.truncate(path, 1 << 42)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def directory(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("made", [huge, pipe, directory])
def test_a_format_file_that_is_none_is_refused_at_once(folder, store, made):
    made(folder / "FORMAT.json")
    with pytest.raises((errors.ForeignStore, errors.Unreadable), match=r"FORMAT\.json"):
        rows(folder, store)


def test_a_format_file_of_many_brackets_is_refused(folder, store):
    (folder / "FORMAT.json").write_text("[" * 4096)
    with pytest.raises(errors.ForeignStore, match=r"FORMAT\.json is no JSON"):
        rows(folder, store)


@pytest.mark.parametrize("made", [huge, pipe, directory])
def test_what_names_the_manifest_is_looked_at_before_rocksdb_reads_it(folder, store, made):
    made(folder / "index" / "CURRENT")
    with pytest.raises((errors.CorruptIndex, errors.Unreadable), match="CURRENT"):
        rows(folder, store)


def test_a_manifest_that_is_no_name_is_rocksdbs_to_refuse(folder, store):
    (folder / "index" / "CURRENT").write_bytes(b"MANI\0\xff\n")
    with pytest.raises(errors.CorruptIndex, match="CURRENT file corrupted; "):
        rows(folder, store)


@pytest.mark.parametrize("name", ["index", "segments"])
def test_a_file_where_a_folder_belongs_is_named(folder, store, name):
    if not (folder / name).exists():
        pytest.skip("Z1 has no segments")
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).write_bytes(b"")
    with pytest.raises(errors.Unreadable, match=rf"{name} can't be made or opened \(File exists\)"):
        rows(folder, store)


def test_a_file_of_another_name_in_the_index_is_left_alone(folder, store):
    (folder / "index" / "mine.log").write_bytes(b"x")
    assert rows(folder, store) == P
    assert (folder / "index" / "mine.log").read_bytes() == b"x"


def test_a_log_that_no_memory_takes_is_named(folder, store, monkeypatch):
    def refused(path):
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(errors.CorruptIndex, match=r"has \d+ bytes, which don't fit into memory"):
        rows(folder, store)


@pytest.mark.parametrize("number", ["9999999999", "99999999999999999999"])
def test_a_segment_of_a_number_that_no_place_holds_is_named(store, tmp_path, number):
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
    (tmp_path / "cold" / "segments" / f"{number}.seg").write_bytes(b"")
    with pytest.raises(errors.ForeignStore, match="is no segment of this store"):
        rows(tmp_path / "cold", store)


def test_holes_and_beginnings_of_no_record_behind_the_end_are_cut_off(store, tmp_path):
    """A tail of 4 TB was read; one of nothing but magics was parsed at each of them."""
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
    segment = tmp_path / "cold" / "segments" / "00000001.seg"
    size = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b"KVR2" * (1 << 18))
    huge(segment)
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        assert cold.recovered.truncated_bytes == (1 << 42) - size
        assert cold.restore(np.arange(P), store.open_session()) == P
    assert segment.stat().st_size == size


@pytest.mark.parametrize("verb", ["gc", "verify"])
def test_a_folder_that_is_taken_away_is_a_typed_error(folder, store, verb):
    with open_cold(None, folder, store.identity()) as cold:
        folder.rename(folder.parent / "moved")
        with pytest.raises(errors.ColdError):
            cold.spill(store.filled(P, seed=1), np.arange(P) + 100)
        with contextlib.suppress(errors.ColdError):
            getattr(cold, verb)()
        (folder.parent / "moved").rename(folder)
    assert rows(folder, store) == P


@pytest.mark.parametrize("now", [math.inf, math.nan, 1e300, -1e12, 0.0])
def test_a_clock_may_say_anything(folder, store, now, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now)
        with open_cold(None, folder, store.identity()) as cold:
            cold.spill(store.filled(P, seed=1), np.arange(P) + 100)
    outcome = upkeep.look_after("catalogue", folder)
    assert len(outcome["sequences"]) == 2
    json.dumps(outcome, allow_nan=False)
    Console(width=200).print(upkeep.render(outcome))
    shown = capsys.readouterr().out
    assert "sequences: 2" in shown and ("?" in shown) == (now not in (-1e12, 0.0))
