"""What a power cut would take: the system calls of the cold tier are watched in the order they come."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spilling import P

from kvtrial.cold import KINDS, disk, index, open_cold, segments
from kvtrial.cold.records import FILE_HEADER_BYTES
from kvtrial.cold.recovery import recover
from kvtrial.cold.segments import SegmentLog
from kvtrial.measure.cold.pattern import PatternStore


class Watched:
    """Files and names below ``root`` that a power cut would undo.

    A file's bytes and size last once the file was synced; a name that was made, renamed or removed
    lasts once its folder was. RocksDB's own files are not seen: it makes its calls itself.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.bytes_at_risk: set[Path] = set()
        self.names_at_risk: set[Path] = set()
        self.durable: set[Path] = set()
        self._paths: dict[int, Path] = {}
        for name in ("pwritev", "ftruncate", "fdatasync", "fsync", "mkdir", "replace", "unlink"):
            patch.setattr(os, name, self._seen(getattr(os, name), getattr(self, f"_{name}")))
        patch.setattr(os, "open", self._opened(os.open))

    @property
    def at_risk(self) -> set[Path]:
        """All but the lock file and the reserve, which mean nothing after a power cut."""
        found = self.bytes_at_risk | self.names_at_risk
        said = {path for path in found if path.name not in ("LOCK", "RESERVE")}
        return {path for path in said if path.is_relative_to(self.root)}

    @staticmethod
    def _seen(call: Callable[..., Any], effect: Callable[..., None]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            effect(*args)
            return result

        return seen

    def _opened(self, call: Callable[..., int]) -> Callable[..., int]:
        def seen(path: Any, *args: Any, **kwargs: Any) -> int:
            is_new = not Path(path).exists()
            fd = call(path, *args, **kwargs)
            self._paths[fd] = Path(path)
            if is_new:
                self.names_at_risk.add(Path(path))
            return fd

        return seen

    def _pwritev(self, fd: int, *_: Any) -> None:
        self.bytes_at_risk.add(self._paths[fd])

    _ftruncate = _pwritev

    def _fdatasync(self, fd: int) -> None:
        self.bytes_at_risk.discard(self._paths[fd])

    def _fsync(self, fd: int) -> None:
        folder = self._paths[fd]
        self.bytes_at_risk.discard(folder)
        settled = {path for path in self.names_at_risk if path.parent == folder}
        self.names_at_risk -= settled
        self.durable |= settled

    def _mkdir(self, path: Any, *_: Any) -> None:
        self.names_at_risk.add(Path(path))

    def _unlink(self, path: Any, *_: Any) -> None:
        self.bytes_at_risk.discard(Path(path))
        self.names_at_risk.add(Path(path))

    def _replace(self, path: Any, target: Any) -> None:
        self.names_at_risk |= {Path(path), Path(target)}
        if Path(path) in self.bytes_at_risk:
            self.bytes_at_risk.remove(Path(path))
            self.bytes_at_risk.add(Path(target))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_acknowledged_is_durable(kind, store, tmp_path, watched, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)  # each batch begins a segment
    folder = tmp_path / "new" / "cold"
    at_risk = []
    with open_cold(kind, folder, store.identity()) as cold:
        assert watched.at_risk == set()
        cold.spill(
            store.filled(3 * P),
            np.arange(3 * P),
            batch_pages=1,
            progress=lambda *_: at_risk.append(watched.at_risk),
        )
        assert cold.delete(np.arange(3 * P))
    assert [*at_risk, watched.at_risk] == [set()] * 4
    made = {folder.parent, folder, folder / "FORMAT.json"}
    made |= {folder / "index"} if kind == "Z1" else {folder / "segments" / "00000003.seg"}
    assert made <= watched.durable


def test_a_file_is_there_whole_once_it_was_written(tmp_path, watched):
    disk.write_file(tmp_path / "FORMAT.json", b"{}")
    assert (tmp_path / "FORMAT.json").read_bytes() == b"{}"
    assert watched.at_risk == set() and tmp_path / "FORMAT.json" in watched.durable


def test_a_collected_segment_is_gone_for_good(store, tmp_path, watched):
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(P), np.arange(P))
        cold.delete(np.arange(P))
        cold.gc()
        segment = tmp_path / "cold" / "segments" / "00000001.seg"
        assert not segment.exists() and watched.at_risk == set()


def test_what_recovery_serves_is_durable(store, tmp_path, watched, monkeypatch):
    """A batch that was whole in the page cache when its writer died is served, so it has to last."""

    def killed(fd: int) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "cold"
    with open_cold("Z2", folder, store.identity()) as cold, monkeypatch.context() as patch:
        patch.setattr(disk, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            cold.spill(store.filled(P), np.arange(P))
    assert watched.at_risk == {folder / "segments" / "00000001.seg"}
    with open_cold("Z2", folder, store.identity()) as cold:
        assert cold.contains(np.arange(P)) == P
        assert watched.at_risk == set()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_names_that_a_killed_maker_left_unsynced_are_made_durable(
    kind, store, tmp_path, watched, monkeypatch
):
    """Killed before any one of its syncs of a folder; the next one builds on what it finds there."""

    class Killed(BaseException):
        pass

    def killed(path: Path) -> None:
        calls.append(path)
        if len(calls) == n:
            raise Killed
        real(path)

    calls: list[Path] = []
    real, n, dies = disk.fsync_dir, 0, True
    while dies:
        n += 1
        calls.clear()
        folder = tmp_path / str(n) / "cold"
        with monkeypatch.context() as patch:
            patch.setattr(disk, "fsync_dir", killed)
            try:
                with open_cold(kind, folder, store.identity()) as cold:
                    cold.spill(store.filled(P), np.arange(P))
                dies = False
            except Killed:
                pass
        with open_cold(kind, folder, store.identity()) as cold:
            cold.spill(store.filled(2 * P), np.arange(2 * P))
        assert watched.at_risk == set(), f"killed at sync {n}, of {calls[-1]}"
    assert n > 5


def sequence(n: int) -> Any:
    return np.arange(2 * P) + 1000 * n


def stored_rows(folder: Path, store: PatternStore, ns: range) -> list[int]:
    """Rows of each sequence that come back bitwise."""
    found = []
    with open_cold("Z2", folder, store.identity()) as cold:
        assert cold.verify() == []
        for n in ns:
            back = store.open_session()
            found.append(cold.restore(sequence(n), back))  # type: ignore[arg-type]
            assert back.contents() == store.filled(2 * P, seed=n).contents()
    return found


def power_cut_of_index(folder: Path, durable: Path) -> None:
    """What was not synced of the index is gone."""
    shutil.rmtree(folder / "index")
    shutil.copytree(durable, folder / "index")


@pytest.mark.parametrize("collected", [range(6), range(1, 6)])
def test_what_the_index_said_of_collected_segments_is_not_believed_of_later_ones(
    store, tmp_path, collected
):
    """A store is emptied and filled again; then a power cut takes the index back to before."""
    folder, durable = tmp_path / "cold", tmp_path / "durable"
    with open_cold("Z2", folder, store.identity()) as cold:
        for n in range(6):
            cold.spill(store.filled(2 * P, seed=n), sequence(n))
        for n in collected:
            cold.delete(sequence(n))
        cold.gc()
    shutil.copytree(folder / "index", durable)
    with open_cold("Z2", folder, store.identity()) as cold:
        for n in range(20, 40):
            cold.spill(store.filled(2 * P, seed=n), sequence(n))
    power_cut_of_index(folder, durable)
    assert stored_rows(folder, store, range(20, 40)) == [2 * P] * 20


def test_an_index_that_is_built_again_is_durable_before_anything_is_added(
    store, tmp_path, monkeypatch
):
    folder, happened = tmp_path / "cold", []
    with open_cold("Z2", folder, store.identity()) as cold:
        cold.spill(store.filled(2 * P), sequence(0))
    shutil.rmtree(folder / "index")

    def seen(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            happened.append(name)
            return real(*args, **kwargs)

        return call

    for name in ("clear", "write", "sync"):
        monkeypatch.setattr(index.Index, name, seen(name, getattr(index.Index, name)))
    open_cold("Z2", folder, store.identity()).close()
    assert happened[0] == "clear" and happened[-1] == "sync" and "write" in happened


def test_an_index_that_comes_back_by_a_power_cut_cuts_no_batch_in_two(store, tmp_path):
    """Removed as the advice says, with the last batch damaged; built again, gone on with; and the removal
    of the old index was not durable."""
    folder, durable = tmp_path / "cold", tmp_path / "durable"
    with open_cold("Z2", folder, store.identity()) as cold:
        for n in (0, 1):
            cold.spill(store.filled(2 * P, seed=n), sequence(n))
    shutil.copytree(folder / "index", durable)
    shutil.rmtree(folder / "index")
    segment = folder / "segments" / "00000001.seg"
    os.truncate(segment, segment.stat().st_size - 1)
    with open_cold("Z2", folder, store.identity()) as cold:
        assert cold.recovered.rebuilt
        for n in (2, 3):
            cold.spill(store.filled(P - n, seed=n), sequence(n)[: P - n])
            cold.spill(store.filled(2 * P, seed=n), sequence(n))
    power_cut_of_index(folder, durable)
    assert stored_rows(folder, store, range(2, 4)) == [2 * P] * 2


def test_a_file_header_written_again_is_durable(tmp_path, watched):
    torn = tmp_path / "00000001.seg"
    torn.write_bytes(b"KVTS")
    log = SegmentLog(tmp_path)
    assert list(recover(log, None)) == []
    assert torn.stat().st_size == FILE_HEADER_BYTES and watched.at_risk == set()
    log.close()
