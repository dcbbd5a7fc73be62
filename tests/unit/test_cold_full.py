"""A full disk: what is stored stays of use, and room can be made with the store's own verbs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from spilling import P

from kvtrial.cold import KINDS, disk, errors, open_cold, reserve

IN_A_NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def free(monkeypatch):
    """What the disk says is free."""
    said = {"bytes": 1 << 30}
    monkeypatch.setattr(disk, "free_bytes", lambda path: said["bytes"])
    return said


def on_a_small_disk(code, kind, folder):
    """Run code whose ``folder`` is a filesystem of 24 MB; what it puts into ``out``."""
    head = """
    import contextlib, json, sys
    import numpy as np
    from pathlib import Path
    from kvtrial.cold import errors, open_cold
    from kvtrial.measure.cold.pattern import PatternStore
    kind, folder, out, store, P = sys.argv[1], Path(sys.argv[2]), [], PatternStore(), 16
    def fill():
        with contextlib.suppress(OSError), (folder / "other").open("ab") as file:
            while True:
                file.write(bytes(512))
                file.flush()
    def tokens(n):
        return np.arange(2 * P) + 1000 * n
    """
    whole = f"{textwrap.dedent(head)}{textwrap.dedent(code)}print(json.dumps(out))"
    folder.mkdir()
    mounted = 'mount -t tmpfs -o size=24m tmpfs "$2" && exec "$0" -c "$3" "$1" "$2"'
    command = [*IN_A_NAMESPACE, "sh", "-c", mounted, sys.executable, kind, folder, whole]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def small_disks():
    """Whether this user may mount a filesystem in a namespace of his own."""
    if shutil.which("unshare") is None:
        return False
    attempt = [*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(attempt, stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.skipif(not small_disks(), reason="no filesystem can be mounted here without root")
def test_a_store_on_a_full_disk_is_restored_from_emptied_and_filled_again(kind, tmp_path):
    code = """
    cold = open_cold(kind, folder / "cold", store.identity())
    for n in range(6):
        cold.spill(store.filled(2 * P, seed=n), tokens(n))
    fill()
    try:
        cold.spill(store.filled(2 * P, seed=9), tokens(9))
    except errors.DiskFull:
        out.append("full")
    cold.close()
    for n in range(6):
        fill()
        with open_cold(None, folder / "cold", store.identity()) as cold:
            back = store.open_session()
            out.append(cold.restore(tokens(n), back))
            out.append(back.contents() == store.filled(2 * P, seed=n).contents())
            out.append(cold.delete(tokens(n)))
            cold.gc()
            out.append(cold.verify())
    (folder / "other").unlink()
    with open_cold(None, folder / "cold", store.identity()) as cold:
        out.append(len(cold.catalogue()))
        cold.spill(store.filled(2 * P, seed=9), tokens(9))
        out.append(cold.contains(tokens(9)))
    """
    said = on_a_small_disk(code, kind, tmp_path / "small")
    assert said == ["full", *[2 * P, True, True, []] * 6, 0, 2 * P]


def test_without_its_reserve_a_store_takes_nothing_and_loses_nothing(kind, store, tmp_path, free):
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
        held = (tmp_path / "cold" / reserve.NAME).stat()
        assert held.st_size >= reserve.SPARE_BYTES <= 512 * held.st_blocks
        free["bytes"] = 0
        with pytest.raises(
            errors.DiskFull, match=r"0 bytes free, .* nothing was written"
        ) as refused:
            cold.spill(store.filled(P, seed=1), np.arange(P) + 100)
        assert refused.value.errno == errno.ENOSPC
        assert cold.delete(np.arange(P))
        assert not (tmp_path / "cold" / reserve.NAME).exists()
        free["bytes"] = 1 << 30
        cold.spill(store.filled(P, seed=1), np.arange(P) + 100)
        assert (tmp_path / "cold" / reserve.NAME).stat().st_size == held.st_size
        assert cold.contains(np.arange(P) + 100) == P


def test_what_only_reads_holds_no_room_and_takes_back_what_it_gave_up(kind, store, tmp_path, free):
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        assert cold.catalogue() == []
    assert not (tmp_path / "cold" / reserve.NAME).exists()
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
    free["bytes"] = 0
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        assert cold.contains(np.arange(P)) == P
        assert not (tmp_path / "cold" / reserve.NAME).exists()
        free["bytes"] = 1 << 30
    assert (tmp_path / "cold" / reserve.NAME).stat().st_size >= reserve.SPARE_BYTES


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_reserve_that_finds_no_room_is_a_full_disk(kind, store, tmp_path, monkeypatch, code):
    def full(fd, offset, nbytes):
        os.pwrite(fd, b"some of it", 0)
        raise OSError(code, os.strerror(code))

    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(errors.DiskFull, match=r"RESERVE can't be extended to \d+ bytes"):
                cold.spill(store.filled(P), np.arange(P))
        assert (tmp_path / "cold" / reserve.NAME).stat().st_size == 0
        cold.spill(store.filled(P), np.arange(P))
        assert cold.contains(np.arange(P)) == P


def test_a_disk_that_does_not_say_that_it_is_full_has_its_opener_use_the_reserve(
    kind, store, tmp_path, monkeypatch
):
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
    held = tmp_path / "cold" / reserve.NAME
    real, lean = KINDS[kind]._open, []

    def over_quota(cold):
        lean.append(cold._reserve.given_up)
        if held.exists():
            raise errors.DiskFull(errno.EDQUOT, "over quota")
        real(cold)

    monkeypatch.setattr(KINDS[kind], "_open", over_quota)
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        assert cold.contains(np.arange(P)) == P
    assert lean == [False, True]


def test_a_folder_in_the_reserves_place_is_in_nobodys_way_but_a_spills(kind, store, tmp_path, free):
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
    (tmp_path / "cold" / reserve.NAME).unlink()
    (tmp_path / "cold" / reserve.NAME).mkdir()
    free["bytes"] = 0
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        with pytest.raises(errors.Unreadable, match=r"RESERVE can't be extended"):
            cold.spill(store.filled(P, seed=1), np.arange(P) + 100)
        assert cold.contains(np.arange(P)) == P
        assert cold.delete(np.arange(P))
        cold.gc()


def test_gc_does_not_begin_to_move_what_there_is_no_room_for(store, tmp_path, free):
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        for n in range(3):
            cold.spill(store.filled(2 * P, seed=n), np.arange(2 * P) + 1000 * n)
        for n in range(2):
            cold.delete(np.arange(2 * P) + 1000 * n)
        free["bytes"] = 0
        with pytest.raises(errors.DiskFull, match=r"segment are still needed, and 0 are free"):
            cold.gc()
        assert [p.name for p in (tmp_path / "cold" / "segments").iterdir()] == ["00000001.seg"]
        cold.delete(np.arange(2 * P) + 2000)
        assert cold.gc() > 0  # all of it is dead, which takes no room
        free["bytes"] = 1 << 30
        assert cold.verify() == []
