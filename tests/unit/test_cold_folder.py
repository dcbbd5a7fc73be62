"""Folders that are no store, or can't be one."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from spilling import P

from kvtrial.cold import errors, open_cold
from kvtrial.cold.records import FILE_HEADER_BYTES


def spilled(kind, folder, store):
    with open_cold(kind, folder, store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))


def test_a_link_that_leads_out_of_the_folder_is_refused(kind, store, tmp_path):
    spilled(kind, tmp_path / "cold", store)
    inside = tmp_path / "cold" / "index"
    inside.rename(tmp_path / "elsewhere")
    inside.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.ForeignStore, match=r"index leads to .*elsewhere"):
        open_cold(kind, tmp_path / "cold", store.identity())
    assert (tmp_path / "elsewhere" / "CURRENT").is_file()


def test_the_folder_itself_may_be_a_link_to_another_filesystem(kind, store, tmp_path):
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        memory = tmp_path  # without one the link is still followed
    real = memory / f"kvtrial-test-{os.getpid()}-{kind}"
    real.mkdir()
    try:
        (tmp_path / "cold").symlink_to(real)
        spilled(kind, tmp_path / "cold", store)
        with open_cold(kind, real, store.identity()) as cold:
            assert cold.contains(np.arange(P)) == P
    finally:
        for path in sorted(real.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        real.rmdir()


def test_a_path_through_a_file_or_to_nothing_is_named(kind, store, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file" / "cold", tmp_path / "link"):
        with pytest.raises(errors.ForeignStore, match=rf"{path} can't be made"):
            open_cold(kind, path, store.identity())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_can_not_be_written_is_named(kind, store, tmp_path, monkeypatch, code):
    spilled(kind, tmp_path / "cold", store)
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(
            errors.NotWritable, match=r"cold can't be written .* may read and write to"
        ):
            open_cold(kind, tmp_path / "cold", store.identity())
    open_cold(kind, tmp_path / "cold", store.identity()).close()


@pytest.mark.parametrize("older", [{"format": 1}, {"format": 2}, {"format": 4, "sum": "0"}])
def test_a_store_of_another_format_is_named(kind, store, tmp_path, older):
    spilled(kind, tmp_path / "cold", store)
    (tmp_path / "cold" / "FORMAT.json").write_text(json.dumps({**older, "kind": kind}))
    with pytest.raises(errors.FormatMismatch, match=rf"'format': {older['format']}.*'format': 3"):
        open_cold(kind, tmp_path / "cold", store.identity())


def test_a_format_file_that_names_the_other_kind_by_a_flipped_bit_destroys_nothing(
    kind, store, tmp_path
):
    """A Z1 store read as Z2 has no segments: its index would be cleared."""
    folder, other = tmp_path / "cold", {"Z1": "Z2", "Z2": "Z1"}[kind]
    spilled(kind, folder, store)
    file = folder / "FORMAT.json"
    whole = file.read_text()
    file.write_text(whole.replace(kind, other))
    for asked in (None, other, kind):
        with pytest.raises(errors.FormatMismatch, match=r"FORMAT\.json is damaged|was written as"):
            open_cold(asked, folder, store.identity())
    file.write_text(whole)
    with open_cold(None, folder, store.identity()) as cold:
        assert cold.contains(np.arange(2 * P)) == P and cold.verify() == []


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_format_file_that_says_nothing_is_named(kind, store, tmp_path, text):
    (tmp_path / "FORMAT.json").write_text(text)
    for asked in (kind, None):
        with pytest.raises(errors.ForeignStore, match=r"FORMAT\.json"):
            open_cold(asked, tmp_path, store.identity())


def test_without_a_kind_it_is_what_lies_there(kind, store, tmp_path):
    spilled(kind, tmp_path / "cold", store)
    with open_cold(None, tmp_path / "cold", store.identity()) as cold:
        assert cold.kind == kind
    with open_cold(None, tmp_path / "new", store.identity()) as cold:
        assert cold.kind == "Z2"


def test_a_segment_of_an_older_format_is_named(store, tmp_path):
    spilled("Z2", tmp_path / "cold", store)
    import xxhash

    path = tmp_path / "cold" / "segments" / "00000001.seg"
    data = bytearray(path.read_bytes())
    data[7] = 1
    sums = slice(FILE_HEADER_BYTES - 8, FILE_HEADER_BYTES)
    data[sums] = xxhash.xxh3_64_intdigest(bytes(data[: sums.start])).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(errors.FormatMismatch, match=r"00000001\.seg has format"):
        open_cold("Z2", tmp_path / "cold", store.identity())


def test_a_key_of_ten_megabytes_costs_no_more_than_what_is_stored(kind, store, tmp_path):
    tokens = np.arange(10_000_000 // 8)
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(2 * P), tokens[: 2 * P])
        tracemalloc.start()
        assert cold.contains(tokens) == 2 * P
        back = store.open_session()
        assert cold.restore(tokens, back) == 2 * P
        assert cold.delete(tokens) is False
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert back.contents() == store.filled(2 * P).contents()
    assert peak < 100 << 20
