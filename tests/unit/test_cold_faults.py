"""The stores under faults: lost indexes, full disks, failed syncs, other processes."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys

import numpy as np
import psutil
import pytest
from spilling import P, restored, spilled, tokens

from kvtrial.cold import disk, errors, index, open_cold, segments
from kvtrial.cold.records import FILE_HEADER_BYTES
from kvtrial.cold.segments import SegmentLog
from kvtrial.contract import InvalidArgument


def test_a_deleted_index_is_built_again_from_the_segments(folder, store):
    with open_cold("Z2", folder, store.identity()) as cold:
        for first in range(3):
            cold.spill(store.filled(2 * P, seed=first), tokens(2 * P, first))
        cold.delete(tokens(2 * P, 1))
    shutil.rmtree(folder / "index")
    with open_cold("Z2", folder, store.identity()) as cold:
        assert cold.recovered.rebuilt
        assert [restored(cold, store, first) for first in range(3)] == [2 * P, 0, 2 * P]
        assert len(cold.catalogue()) == 2
        assert cold.verify() == []


def test_an_index_that_lost_its_last_writes_is_brought_up_to_date(folder, store):
    spilled("Z2", folder, store, 0)
    shutil.copytree(folder / "index", folder.parent / "older")
    spilled("Z2", folder, store, 1)
    shutil.rmtree(folder / "index")
    shutil.move(folder.parent / "older", folder / "index")
    with open_cold("Z2", folder, store.identity()) as cold:
        assert not cold.recovered.rebuilt and cold.recovered.replayed_batches == 2
        assert [restored(cold, store, first) for first in range(2)] == [2 * P, 2 * P]


def test_deleted_pages_stay_away_after_gc_and_a_rebuild(folder, store, monkeypatch):
    monkeypatch.setattr("kvtrial.cold.segments.SEGMENT_BYTES", 9000)
    with open_cold("Z2", folder, store.identity()) as cold:
        for first in range(8):
            cold.spill(store.filled(2 * P, seed=first), tokens(2 * P, first))
        for first in (0, 1, 2, 4, 5):
            cold.delete(tokens(2 * P, first))
        cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1))  # and one is back
        segments_before = len(list((folder / "segments").iterdir()))
        assert cold.gc() > 0
        assert len(list((folder / "segments").iterdir())) < segments_before
    expected = [0, 2 * P, 0, 2 * P, 0, 0, 2 * P, 2 * P]
    for _ in range(2):
        with open_cold("Z2", folder, store.identity()) as cold:
            assert [restored(cold, store, first) for first in range(8)] == expected
            assert cold.verify() == []
            cold.gc()
        shutil.rmtree(folder / "index")


def test_pages_of_an_interrupted_spill_are_whole_and_gc_takes_them(kind, folder, store):
    class Interrupted(Exception):
        pass

    def interrupt(done, total):
        raise Interrupted

    with open_cold(kind, folder, store.identity()) as cold:
        with pytest.raises(Interrupted):
            cold.spill(
                store.filled(2 * P, seed=3), tokens(2 * P, 3), batch_pages=1, progress=interrupt
            )
        assert restored(cold, store, 3) == P
        assert cold.catalogue() == []
        cold.gc()
        assert restored(cold, store, 3) == 0


def test_a_full_disk_costs_the_batch_and_no_more(folder, store, monkeypatch):
    with open_cold("Z2", folder, store.identity()) as cold:
        cold.spill(store.filled(2 * P, seed=0), tokens(2 * P, 0))

        def full(fd, buffers, offset):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            with pytest.raises(errors.DiskFull, match="free space"):
                cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1))
        assert restored(cold, store, 1) == 0
        cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1))
    with open_cold("Z2", folder, store.identity()) as cold:
        assert [restored(cold, store, first) for first in range(2)] == [2 * P, 2 * P]


def test_a_failed_sync_poisons_the_store_until_it_is_reopened(folder, store, monkeypatch):
    with open_cold("Z2", folder, store.identity()) as cold:
        cold.spill(store.filled(2 * P, seed=0), tokens(2 * P, 0))

        def failing(fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            with pytest.raises(errors.StorePoisoned):
                cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1))
        for verb in (cold.gc, cold.verify, cold.catalogue, lambda: cold.contains(tokens(2 * P))):
            with pytest.raises(errors.StorePoisoned, match="reopen"):
                verb()
    with open_cold("Z2", folder, store.identity()) as cold:
        assert [restored(cold, store, first) for first in range(2)] == [2 * P, 0]


def test_the_payload_is_durable_before_the_index_hears_of_it(folder, store, monkeypatch):
    happened = []

    def spy(owner, name):
        real = getattr(owner, name)

        def seen(*args, **kwargs):
            happened.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, seen)

    with open_cold("Z2", folder, store.identity()) as cold:
        spy(os, "pwritev")
        spy(disk, "fsync")
        spy(disk, "fsync_dir")
        spy(index.Index, "write")
        cold.spill(store.filled(2 * P, seed=0), tokens(2 * P, 0), batch_pages=1)
    assert happened == [
        *("pwritev", "fsync_dir"),  # the first segment comes to be
        *("pwritev", "fsync", "write"),
        *("pwritev", "fsync", "write"),
    ]


def test_a_new_store_is_durable_in_its_folder_too(folder, store, monkeypatch):
    synced = []
    real = disk.fsync_dir
    monkeypatch.setattr(disk, "fsync_dir", lambda path: (synced.append(path), real(path)))
    with open_cold("Z2", folder / "deeper", store.identity()) as cold:
        cold.spill(store.filled(P), tokens(P))
    assert synced == [
        folder.parent.parent,  # whoever made what is there may not have come to it
        folder.parent,  # for cold/
        folder,  # for deeper/
        folder / "deeper",  # for FORMAT.json
        folder,  # for deeper/, which is there by now
        folder / "deeper",  # for segments/
        folder,
        folder / "deeper",  # for index/
        folder / "deeper" / "segments",  # for the first segment
    ]


def test_another_process_is_refused_and_a_killed_one_leaves_no_lock(kind, folder, store):
    code = (
        "import sys; from kvtrial.cold import open_cold, errors\n"
        "from kvtrial.measure.cold.pattern import PatternStore\n"
        "try:\n    c = open_cold(sys.argv[1], sys.argv[2], PatternStore().identity())\n"
        "except errors.StoreLocked:\n    sys.exit(3)\n"
        "print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, kind, str(folder)]
    with open_cold(kind, folder, store.identity()):
        with pytest.raises(errors.StoreLocked):  # the refusal of our own does not let go of it
            open_cold(kind, folder, store.identity())
        assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 3
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(errors.StoreLocked):
            open_cold(kind, folder, store.identity())
        holder.kill()
    open_cold(kind, folder, store.identity()).close()


def test_gc_makes_the_index_durable_before_it_removes_a_segment(folder, store, monkeypatch):
    happened = []

    def spy(owner, name):
        real = getattr(owner, name)

        def seen(*args):
            happened.append(name)
            return real(*args)

        monkeypatch.setattr(owner, name, seen)

    with open_cold("Z2", folder, store.identity()) as cold:
        cold.spill(store.filled(P), tokens(P))
        cold.delete(tokens(P))
        spy(index.Index, "sync")
        spy(SegmentLog, "remove")
        cold.gc()
    assert happened == ["sync", "remove"]


def test_a_store_emptied_by_gc_goes_on(folder, store):
    for _ in range(2):
        with open_cold("Z2", folder, store.identity()) as cold:
            cold.spill(store.filled(2 * P, seed=0), tokens(2 * P, 0))
            assert restored(cold, store, 0) == 2 * P
            cold.delete(tokens(2 * P, 0))
            cold.gc()
            (left,) = (folder / "segments").iterdir()  # which says where numbers go on
            assert left.stat().st_size == FILE_HEADER_BYTES
            assert cold.gc() == 0 and list((folder / "segments").iterdir()) == [left]


def test_an_interrupted_write_poisons_until_what_is_durable_is_known(folder, store, monkeypatch):
    """The batch is in the file and not in the index: what came next would build on neither."""
    with open_cold("Z2", folder, store.identity()) as cold:
        cold.spill(store.filled(2 * P, seed=0), tokens(2 * P, 0))

        def interrupt(fd):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(disk, "fsync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                cold.delete(tokens(2 * P, 0))
        with pytest.raises(errors.StorePoisoned, match="cut short by KeyboardInterrupt"):
            cold.spill(store.filled(2 * P, seed=0), tokens(2 * P, 0))
    with open_cold("Z2", folder, store.identity()) as cold:
        assert restored(cold, store, 0) == 0  # the deletion was whole
        cold.spill(store.filled(2 * P, seed=0), tokens(2 * P, 0))
    with open_cold("Z2", folder, store.identity()) as cold:
        assert restored(cold, store, 0) == 2 * P


@pytest.mark.parametrize("owner", ["index", "folder"])
def test_a_segment_that_may_not_be_gone_for_good_poisons(folder, store, monkeypatch, owner):
    def failing(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with open_cold("Z2", folder, store.identity()) as cold:
        cold.spill(store.filled(2 * P), tokens(2 * P))
        cold.delete(tokens(2 * P))
        with monkeypatch.context() as patch:
            if owner == "index":
                patch.setattr(index.Index, "sync", failing)
            else:
                patch.setattr(disk, "fsync_dir", failing)
            with pytest.raises(errors.StorePoisoned, match="segment 1 was not removed for good"):
                cold.gc()
        with pytest.raises(errors.StorePoisoned, match="reopen"):
            cold.catalogue()


def test_what_a_spills_own_progress_deletes_or_collects_costs_it_nothing(kind, folder, store):
    """Making room while pages come in is what progress is for."""
    with open_cold(kind, folder, store.identity()) as cold:
        shared = np.concatenate([tokens(P), 5000 + np.arange(P)])
        cold.spill(store.filled(2 * P, seed=0), tokens(2 * P))

        def make_room(done, to_do):
            cold.delete(tokens(2 * P))
            cold.gc()

        cold.spill(store.filled(2 * P, seed=0), shared, batch_pages=1, progress=make_room)
        assert cold.contains(shared) == 2 * P
        assert cold.contains(tokens(2 * P)) == P  # what they share
        cold.gc()
        assert cold.contains(shared) == 2 * P and cold.verify() == []


@pytest.mark.parametrize("kept", [0, 1])
def test_a_deletion_that_was_cut_off_is_done_again(folder, store, kept):
    """The index had heard of it, so it was durable once."""
    spilled("Z2", folder, store, *range(1 + kept))
    segment = folder / "segments" / "00000001.seg"
    with open_cold("Z2", folder, store.identity()) as cold:
        assert cold.delete(tokens(2 * P, kept))
    os.truncate(segment, segment.stat().st_size - 1)
    for again in (False, True):
        with open_cold("Z2", folder, store.identity()) as cold:
            assert cold.recovered.rebuilt
            assert [restored(cold, store, n) for n in range(1 + kept)] == [2 * P] * kept + [0]
            assert len(cold.catalogue()) == kept and cold.verify() == []
        if not again:
            shutil.rmtree(folder / "index")  # the segments say so too


def test_a_folder_that_another_makes_at_the_same_time_is_no_foreign_one(
    kind, folder, store, monkeypatch
):
    real = disk.fsync_dir

    def meanwhile(path):
        folder.mkdir(exist_ok=True)
        real(path)

    deeper = folder.parent  # it is there; what syncs it comes before the new folder is made
    monkeypatch.setattr(disk, "fsync_dir", meanwhile)
    with open_cold(kind, folder, store.identity()) as cold:
        assert deeper.is_dir() and cold.catalogue() == []


def test_a_new_segment_is_never_made_where_one_is(folder, store, monkeypatch):
    with open_cold("Z2", folder, store.identity()) as cold:
        stranger = folder / "segments" / "00000001.seg"
        stranger.write_bytes(b"acknowledged once")
        with pytest.raises(errors.Unreadable, match=r"00000001\.seg can't be made \(File exists\)"):
            cold.spill(store.filled(P), tokens(P))
        assert stranger.read_bytes() == b"acknowledged once"


@pytest.mark.parametrize("after", range(3))
def test_a_write_that_takes_no_bytes_is_not_acknowledged(folder, store, monkeypatch, after):
    """Some filesystems in user space answer 0 instead of an error."""
    spilled("Z2", folder, store, 0)
    real, calls = os.pwritev, []

    def nothing(fd, buffers, offset):
        calls.append(offset)
        return real(fd, [bytes(buffers[0])[:7]], offset) if len(calls) <= after else 0

    with open_cold("Z2", folder, store.identity()) as cold, monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", nothing)
        with pytest.raises(errors.StorePoisoned, match="took none of its bytes"):
            cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1))
    with open_cold("Z2", folder, store.identity()) as cold:
        assert [restored(cold, store, n) for n in (0, 1)] == [2 * P, 0] and cold.verify() == []


def test_a_format_file_that_takes_no_bytes_makes_no_store(folder, store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 0)
        with pytest.raises(errors.Unreadable, match="can't be written"):
            open_cold("Z2", folder, store.identity())
    open_cold("Z2", folder, store.identity()).close()


def test_so_many_files_are_open_whatever_the_store_holds(folder, store, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    monkeypatch.setattr(segments, "OPEN_FILES", 3, raising=False)

    def open_segments():
        return sum(file.path.endswith(".seg") for file in psutil.Process().open_files())

    for rebuilt in (False, True):
        if rebuilt:
            shutil.rmtree(folder / "index")
        with open_cold("Z2", folder, store.identity()) as cold:
            if not rebuilt:
                for n in range(8):
                    cold.spill(store.filled(2 * P, seed=n), tokens(2 * P, n))
            assert [restored(cold, store, n) for n in range(8)] == [2 * P] * 8
            assert cold.verify() == [] and len(cold._log.numbers()) == 8
            assert 1 <= open_segments() <= 3


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_is_said_and_costs_nothing(folder, store, monkeypatch, code):
    spilled("Z2", folder, store, 0)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    real = os.open

    def refused(path, *args, **kwargs):
        if os.fspath(path).endswith(".seg"):
            raise OSError(code, os.strerror(code), path)
        return real(path, *args, **kwargs)

    with open_cold("Z2", folder, store.identity()) as cold:
        cold._log._files.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refused)
            for verb in (
                lambda: cold.restore(tokens(2 * P), store.open_session()),
                lambda: cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1)),
            ):
                with pytest.raises(
                    errors.TooManyFiles, match=r"may have \d+ files open.*ulimit -n"
                ):
                    verb()
        cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1))
        assert [restored(cold, store, n) for n in (0, 1)] == [2 * P, 2 * P]


def test_what_is_said_to_a_model_can_be_read_by_its_owner_alone(kind, folder, store):
    inside = ["index", "segments"] if kind == "Z2" else ["index"]
    before = os.umask(0o022)
    try:
        spilled(kind, folder, store, 0)
        assert folder.stat().st_mode & 0o777 == 0o700
        # A folder that was there, or was made by a version that left it open.
        for path in (folder, *(folder / name for name in inside)):
            path.chmod(0o755)
        spilled(kind, folder, store, 1)
    finally:
        os.umask(before)
    assert {(folder / name).stat().st_mode & 0o777 for name in inside} == {0o700}
    # RocksDB's files are what the umask says, behind a folder that nobody else may enter.
    ours = {path for path in folder.iterdir() if path.is_file()} | {*folder.rglob("*.seg")}
    assert {path.stat().st_mode & 0o777 for path in ours} == {0o600}


@pytest.mark.parametrize("path", [5, None, b"cold", "a\0b", "a\udcff", ""])
def test_what_can_not_name_a_folder_is_refused_at_the_door(
    kind, store, path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"path is .*; give a folder of its own"):
        open_cold(kind, path, store.identity())
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_identity_is_refused_at_the_door(kind, folder):
    with pytest.raises(InvalidArgument, match=r"identity is 'x'; give what Identity\.of"):
        open_cold(kind, folder, "x")
    assert not folder.exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_in_close_leaves_no_lock(kind, folder, store, monkeypatch, when):
    cold = open_cold(kind, folder, store.identity())
    cold.spill(store.filled(2 * P), tokens(2 * P))
    close, calls = cold._index.close, []

    def interrupted():
        calls.append(when)
        if len(calls) == 1 and when == "before":
            raise KeyboardInterrupt
        close()
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(cold._index, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cold.close()
    cold.close()
    with open_cold(kind, folder, store.identity()) as again:
        assert restored(again, store, 0) == 2 * P
