"""Damaged and unreadable files: each is named, costs what it holds and no more."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading

import pytest
from kvtrial.cold._reader import FAILED
from spilling import P, damage, restored, spilled, tokens

from kvtrial.cold import disk, errors, index, open_cold, segments


def test_a_damaged_page_is_named_and_the_session_stays_empty(kind, folder, store):
    spilled(kind, folder, store, 0)
    pattern = store.filled(2 * P, seed=0).contents()[1][1]
    damaged = 0
    for file in folder.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        if (at := data.find(pattern)) >= 0:
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            damaged += 1
    assert damaged == 1
    error, message = {
        "Z1": (errors.CorruptIndex, "Blob CRC mismatch"),
        "Z2": (errors.CorruptSegment, r"00000001\.seg at offset \d+: the payload's checksum"),
    }[kind]
    with open_cold(kind, folder, store.identity()) as cold:
        free = store.pages_free
        with pytest.raises(error, match=message):
            cold.restore(tokens(2 * P), store.open_session())
        assert store.pages_free == free
        (fault,) = cold.verify()
        assert re.search(message, fault.what)
        # It says what to delete, by the catalogue's own keys.
        (entry,) = cold.catalogue()
        assert fault.sequences == (entry.key,)
        assert cold.delete(*fault.sequences)
        cold.spill(store.filled(2 * P, seed=0), tokens(2 * P))
        assert restored(cold, store, 0) == 2 * P


def test_gc_is_not_held_up_by_damage_that_nobody_needs(folder, store):
    spilled("Z2", folder, store, 0, 1, 2)
    segment = folder / "segments" / "00000001.seg"
    damage(segment, store.filled(2 * P, seed=1).contents()[0][1])
    with open_cold("Z2", folder, store.identity()) as cold:
        cold.delete(tokens(2 * P, 0))
        cold.delete(tokens(2 * P, 2))
        with pytest.raises(errors.CorruptSegment, match=r"00000001\.seg .* checksum"):
            cold.gc()  # what is damaged is still needed
        assert segment.exists()
        (fault,) = cold.verify()
        cold.delete(*fault.sequences)
        cold.gc()
        assert not segment.exists() and cold.verify() == []


def test_damage_of_a_page_that_nobody_needs_says_so_and_gc_takes_it(folder, store):
    spilled("Z2", folder, store, 0)
    with open_cold("Z2", folder, store.identity()) as cold:

        def interrupt(done, total):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cold.spill(
                store.filled(2 * P, seed=2), tokens(2 * P, 2), batch_pages=1, progress=interrupt
            )
        damage(folder / "segments" / "00000001.seg", store.filled(2 * P, seed=2).contents()[0][0])
        (fault,) = cold.verify()
        assert fault.sequences == ()
        cold.gc()
        assert cold.verify() == []


class WriteOnly:
    """A segment's file that does not give its bytes."""

    def __init__(self, path):
        self.path = path
        self.fd = os.open(path, os.O_WRONLY)


def test_a_disk_that_does_not_give_the_bytes_is_named(folder, store):
    spilled("Z2", folder, store, 0)
    with open_cold("Z2", folder, store.identity()) as cold:
        broken = WriteOnly(folder / "segments" / "00000001.seg")
        cold._log._files[1] = broken
        free = store.pages_free
        message = r"00000001\.seg at offset \d+ can't be read .* nothing was changed"
        with pytest.raises(errors.Unreadable, match=message) as raised:
            cold.restore(tokens(2 * P), store.open_session())
        assert raised.value.errno == errno.EBADF and isinstance(raised.value, OSError)
        assert store.pages_free == free
        assert [re.search(message, fault.what) is None for fault in cold.verify()] == [False] * 3
        del cold._log._files[1]
        os.close(broken.fd)
        assert restored(cold, store, 0) == 2 * P


def test_what_can_not_be_read_as_a_store_opens_is_not_cut_off(folder, store, monkeypatch):
    spilled("Z2", folder, store, 0)
    size = (folder / "segments" / "00000001.seg").stat().st_size
    good = 0

    def failing_after(n, real):
        def read(*args):
            nonlocal good
            good += 1
            if good > n:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args)

        return read

    def failing_pages(records):
        try:
            return failing_after(n, read_records)(records)
        except OSError as error:
            return [FAILED - error.errno], 0, 0

    read_records = segments.read_records
    # The file's header, a record's, its sums and on; then the pages.
    for owner, name, calls in ((os, "preadv", 6), (segments, "read_records", 2)):
        for n in range(calls):
            good = 0
            shutil.rmtree(folder / "index", ignore_errors=True)
            with monkeypatch.context() as patch:
                broken = failing_pages if owner is segments else failing_after(n, os.preadv)
                patch.setattr(owner, name, broken)
                with pytest.raises(errors.Unreadable, match="Input/output error"):
                    open_cold("Z2", folder, store.identity())
            assert (folder / "segments" / "00000001.seg").stat().st_size == size
    with open_cold("Z2", folder, store.identity()) as cold:
        assert restored(cold, store, 0) == 2 * P


def test_verify_compares_contents_with_their_address(folder, store, monkeypatch):
    with open_cold("Z2", folder, store.identity()) as cold:
        monkeypatch.setattr("kvtrial.cold.sessions.content_address", lambda payload: b"?" * 32)
        cold.spill(store.filled(P), tokens(P))
        monkeypatch.undo()
        (fault,) = cold.verify()
        assert "not what its address says" in fault.what


@pytest.mark.parametrize("gone", ["a byte", "the file"])
def test_bytes_that_were_there_once_are_missed(folder, store, gone):
    """A sync is older than what the index says of it, so no crash takes them away."""
    spilled("Z2", folder, store, 0, 1)
    segment = folder / "segments" / "00000001.seg"
    if gone == "a byte":
        damaged = store.filled(2 * P, seed=1).contents()[0][1]
        os.truncate(segment, segment.read_bytes().index(damaged) + 3)
    else:
        segment.unlink()
    for _ in range(2):  # it is said again
        with open_cold("Z2", folder, store.identity()) as cold:
            keys = {entry.key for entry in cold.catalogue()}
            assert len(keys) == 2
            faults = cold.verify()
            assert {fault.what for fault in faults} == {"the page is missing"}
            named = {key for fault in faults for key in fault.sequences}
            assert len(named) == (1 if gone == "a byte" else 2)
            assert [restored(cold, store, n) for n in (0, 1)] == (
                [2 * P, P] if gone == "a byte" else [0, 0]
            )
    with open_cold("Z2", folder, store.identity()) as cold:
        for key in named:
            assert cold.delete(key)
        assert cold.verify() == []


def test_a_damaged_head_of_what_nobody_needs_is_named_and_in_no_other_segments_way(
    folder, store, monkeypatch
):
    monkeypatch.setattr("kvtrial.cold.segments.SEGMENT_BYTES", 5000)
    with open_cold("Z2", folder, store.identity()) as cold:
        for first in range(6):
            cold.spill(store.filled(2 * P, seed=first), tokens(2 * P, first))
        for first in (0, 1, 2, 3):
            cold.delete(tokens(2 * P, first))
        assert cold.verify() == []
        damage(folder / "segments" / "00000001.seg", b"KVR2")
        (fault,) = cold.verify()
        assert (fault.key, fault.sequences) == ("", ())
        assert re.fullmatch(
            r".*00000001\.seg at offset 40: the record's head is damaged", fault.what
        )
        before = cold.disk_bytes()
        with pytest.raises(errors.CorruptSegment, match=r"00000001\.seg at offset 40"):
            cold.gc()
        assert cold.disk_bytes() < before
        left = [p.name for p in sorted((folder / "segments").iterdir())]
        assert "00000001.seg" in left and "00000002.seg" not in left
        assert [restored(cold, store, n) for n in range(6)] == [0] * 4 + [2 * P] * 2


def test_a_damaged_header_of_the_newest_segment_keeps_nothing_from_opening(folder, store):
    spilled("Z2", folder, store, 0)
    damage(folder / "segments" / "00000001.seg", b"KVTSEG")
    with open_cold("Z2", folder, store.identity()) as cold:
        assert restored(cold, store, 0) == 2 * P
        (fault,) = cold.verify()
        assert fault.what.endswith("00000001.seg at offset 0: the file header is damaged")
        cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1))
    with open_cold("Z2", folder, store.identity()) as cold:
        assert [restored(cold, store, n) for n in (0, 1)] == [2 * P, 2 * P]


def test_a_file_that_is_no_segment_is_named(folder, store):
    spilled("Z2", folder, store, 0)
    stray = folder / "segments" / "00000001.bak.seg"
    stray.write_bytes(b"")
    with pytest.raises(errors.ForeignStore, match=r"00000001\.bak\.seg is no segment"):
        open_cold("Z2", folder, store.identity())
    stray.unlink()
    with open_cold("Z2", folder, store.identity()) as cold:
        assert restored(cold, store, 0) == 2 * P


def test_a_format_file_that_is_no_text_is_named(kind, folder, store):
    spilled(kind, folder, store, 0)
    file = folder / "FORMAT.json"
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        with pytest.raises(errors.ForeignStore, match="is no JSON"):
            open_cold(kind, folder, store.identity())
    file.write_bytes(whole)
    with open_cold(kind, folder, store.identity()) as cold:
        assert restored(cold, store, 0) == 2 * P


@pytest.mark.parametrize(
    ("text", "writing", "error", "message"),
    [
        (
            "IO error: While pread: x.blob: Input/output error",
            False,
            "Unreadable",
            "check the disk",
        ),
        (
            "IO error: While pread: x.blob: Too many open files",
            False,
            "TooManyFiles",
            "ulimit -n",
        ),
        ("IO error: While appending: x.log: Disk quota exceeded", True, "DiskFull", "free space"),
        ("IO error: While open: x/CURRENT: Permission denied", False, "NotWritable", "may read"),
        ("IO error: While appending: x.log: Input/output error", True, "StorePoisoned", "reopen"),
        ("IO error: No such file or directory: x.sst", False, "CorruptIndex", "advice"),
        ("Corruption: Blob CRC mismatch", False, "CorruptIndex", "advice"),
        ("IO error: No space left on device: x", True, "DiskFull", "free space"),
        (
            "IO error: While lock file: x: Resource temporarily unavailable",
            False,
            "StoreLocked",
            "x",
        ),
    ],
)
def test_a_disk_that_fails_below_rocksdb_is_no_damage(folder, text, writing, error, message):
    """Following the advice for damage would destroy what is sound."""
    found = index._translate(Exception(text), folder, "advice", writing)
    assert type(found).__name__ == error
    assert message in str(found) and text in str(found)


def test_a_segment_that_gc_takes_while_verify_looks_is_no_damage(folder, store, monkeypatch):
    spilled("Z2", folder, store, 0)
    with open_cold("Z2", folder, store.identity()) as cold:
        ends = cold._log.ends()
        monkeypatch.setattr(cold._log, "ends", lambda: ends | {99: 1000})
        assert cold.verify() == []


def test_a_folder_that_can_not_be_listed_is_not_taken_for_an_empty_one(folder, store, monkeypatch):
    """It was: the index was cleared, and the next spill began segment 1 anew, over what was there."""
    spilled("Z2", folder, store, 0, 1)
    segment = folder / "segments" / "00000001.seg"
    whole = segment.read_bytes()

    def refusing(real):
        def listed(path="."):
            if os.fspath(path) == os.fspath(segment.parent):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real(path)

        return listed

    with monkeypatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        with pytest.raises(errors.NotWritable, match="segments can't be listed"):
            open_cold("Z2", folder, store.identity())
    assert segment.read_bytes() == whole
    with open_cold("Z2", folder, store.identity()) as cold:
        assert not cold.recovered.rebuilt
        assert [restored(cold, store, n) for n in (0, 1)] == [2 * P, 2 * P]


def test_verify_lists_what_is_damaged_in_the_index_too(kind, folder, store):
    """It ended with an error, and listed nothing."""
    for n in range(2):
        spilled(kind, folder, store, n)
    with open_cold(kind, folder, store.identity()) as cold:
        key = bytes.fromhex(cold.catalogue()[-1].key)
    (table,) = [p for p in folder.rglob("*.sst") if key in p.read_bytes()][-1:]
    data = bytearray(table.read_bytes())
    data[data.index(key) + 5] ^= 1
    table.write_bytes(data)
    with open_cold(kind, folder, store.identity()) as cold:
        faults = cold.verify()
        assert any("mismatch" in fault.what and table.name in fault.what for fault in faults)


def test_what_another_spills_while_verify_looks_is_no_damage(folder, store, monkeypatch):
    """A segment that is being begun has no header yet."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)  # each batch begins one
    with open_cold("Z2", folder, store.identity()) as cold:
        cold.spill(store.filled(2 * P), tokens(2 * P))
        beginning, looked = threading.Event(), threading.Event()
        numbers, write_all = cold._log.numbers, disk.write_all

        def slow(*args):
            beginning.set()
            looked.wait()
            return write_all(*args)

        spill = threading.Thread(
            target=cold.spill, args=(store.filled(2 * P, seed=1), tokens(2 * P, 1))
        )

        def meanwhile():
            if not spill.ident:
                monkeypatch.setattr(disk, "write_all", slow)
                spill.start()
                beginning.wait(0.5)  # for good, where the list is made under the store's lock
            return numbers()

        monkeypatch.setattr(cold._log, "numbers", meanwhile)
        found = cold.verify()
        looked.set()
        spill.join()
        assert found == [] and [restored(cold, store, n) for n in (0, 1)] == [2 * P, 2 * P]


@pytest.mark.parametrize("suffix", [".sst", ".blob"])
def test_damage_below_rocksdb_is_said_of_the_files_that_may_have_it(folder, store, suffix):
    """RocksDB blamed its manifest, whose every sum is right, and named no blob file."""
    spilled("Z1", folder, store, 0)
    table = next(p for p in (folder / "index").iterdir() if p.suffix == suffix)
    data = bytearray(table.read_bytes())
    data[-60 if suffix == ".sst" else len(data) // 2] ^= 4  # of a table: its footer and index
    table.write_bytes(data)
    with (
        pytest.raises(errors.CorruptIndex) as damaged,
        open_cold("Z1", folder, store.identity()) as cold,
    ):
        cold.restore(tokens(2 * P), store.open_session())
    assert table.name in str(damaged.value) and "MANIFEST" not in str(damaged.value)
    opened = suffix == ".blob"
    assert ("run verify()" if opened else "put the file back from a copy") in str(damaged.value)
