"""The RocksDB index that both stores share.

Column families: ``prefix`` page key -> meta; ``pages`` page key -> payload (Z1) or location (Z2);
``snapshots``, as it is called on disk, key of a sequence's last page -> `SpilledSequence`; ``ledger``
how far the segments are indexed. All puts of a batch go in one atomic write.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import rocksdict

from kvtrial.cold import disk, forks, rockslog
from kvtrial.cold.errors import (
    CorruptIndex,
    StoreLocked,
    StorePoisoned,
    Unreadable,
    of_disk,
)

FAMILIES = ("prefix", "pages", "snapshots", "ledger")
#: Values from this size on (bytes) go to blob files: pages do, locations don't.
MIN_BLOB_BYTES = 1024
#: Files that RocksDB keeps open.
OPEN_FILES = 64
#: Bytes that are logged before they are written out, where the values are small (Z2): what is in the log is
#: written once more as a store opens, for which a full disk has to have room.
_SMALL_BUFFER_BYTES = 4 << 20
#: How long RocksDB's log may grow on a full disk. It takes the room for all of it beforehand.
_LEAN_LOG_BYTES = 1 << 20

#: Which part of the blob files, oldest first, a compaction rewrites: where RocksDB runs one by itself,
#: its default, so that a spill doesn't write pages again and again; where `gc` asks for one, all.
_AGE_CUTOFF = "blob_garbage_collection_age_cutoff"
_BY_ITSELF, _ASKED_FOR, _NONE = "0.25", "1.0", "0.0"
_BLOB_BYTES = "rocksdb.live-blob-file-size"

#: What the system says through RocksDB that is said of no bytes: the store is sound.
_OF_DISK = {
    "No space left": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "Too many open files": errno.EMFILE,
    "Permission denied": errno.EACCES,
    "Operation not permitted": errno.EPERM,
    "Read-only file system": errno.EROFS,
}
_BEGIN_ANEW = "put the file back from a copy, or delete the store to begin anew"
_NAME_AND_DELETE = "run verify(), delete() what it names, and spill that again"
#: What RocksDB adds to damage of any file. `rockslog` has found the manifest sound before.
_MANIFEST_BLAMED = re.compile(r"\s*The file \S*MANIFEST-\d+ may be corrupted\.")
_NAMED = re.compile(r"\w+\.(sst|blob|log)\b")
_WAL_SYNCED = re.compile(r"rocksdb\.wal\.synced COUNT : (\d+)")
_GET_US = re.compile(r"rocksdb\.db\.get\.micros .* SUM : (\d+)")
_SEQUENCE = struct.Struct("<QdI")


@dataclass(frozen=True)
class SpilledSequence:
    """A spilled sequence: rows, when (seconds since the epoch), and its pages' keys in order."""

    rows: int
    created: float
    page_keys: tuple[bytes, ...]

    @property
    def key(self) -> bytes:
        """The key of its last page, which names the whole sequence."""
        return self.page_keys[-1]

    def encode(self) -> bytes:
        """As it is stored, little-endian."""
        return _SEQUENCE.pack(self.rows, self.created, len(self.page_keys)) + b"".join(
            self.page_keys
        )

    @classmethod
    def decode(cls, data: bytes) -> SpilledSequence:
        """Inverse of `encode`."""
        rows, created, n = _SEQUENCE.unpack_from(data)
        if len(data) != _SEQUENCE.size + 32 * n or n == 0:
            raise CorruptIndex(f"snapshot of {len(data)} bytes that names {n} pages")
        keys = (data[i : i + 32] for i in range(_SEQUENCE.size, len(data), 32))
        return cls(rows, created, tuple(keys))


def _options(truth: bool, blobs: bool = False, lean: bool = False) -> rocksdict.Options:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    # Where the log is all there is (Z1), `rockslog` has cut a torn tail off, and any other damage is
    # refused: what follows it was acknowledged. Where the segments hold everything (Z2), the index goes
    # back to what is sound and is replayed from there.
    modes = rocksdict.DBRecoveryMode
    options.set_wal_recovery_mode(
        modes.tolerate_corrupted_tail_records() if truth else modes.point_in_time()
    )
    # Families are flushed together, so that they agree even where an unsynced log was lost.
    options.set_atomic_flush(True)
    options.set_keep_log_file_num(2)
    options.set_max_open_files(OPEN_FILES)
    # Each opening leaves a file in each family. By levels, files whose keys don't overlap are moved down
    # and never merged, so that there is one for each spilled sequence in the end; by runs they are.
    options.set_compaction_style(rocksdict.DBCompactionStyle.universal())
    if not truth:
        options.set_write_buffer_size(_SMALL_BUFFER_BYTES)
    if lean:  # nothing is written that needn't be
        options.set_max_total_wal_size(_LEAN_LOG_BYTES)
        options.set_disable_auto_compactions(True)
    if blobs:
        options.set_enable_blob_files(True)
        options.set_min_blob_size(MIN_BLOB_BYTES)
        options.set_blob_file_size(256 << 20)
        options.set_enable_blob_gc(True)
        # K and V rows are noise to a compressor.
        options.set_blob_compression_type(rocksdict.DBCompressionType.none())
    return options


def _translate(error: Exception, path: Path, advice: str, writing: bool) -> Exception:
    """RocksDB's bare exception as one of ours, by its status text."""
    text = str(error)
    if "lock hold" in text or "While lock file" in text:
        return StoreLocked(f"{path} is open elsewhere ({text}); close it or use another folder")
    for phrase, code in _OF_DISK.items():
        if phrase in text:
            return of_disk(OSError(code, text), f"{path}: {text}; it", "used")
    if text.startswith("IO error") and "No such file" not in text:
        if writing:
            return StorePoisoned(f"{path}: {text}; check the disk and reopen the store")
        return Unreadable(
            errno.EIO, f"{path}: {text}; nothing was changed; check the disk, then try again"
        )
    return CorruptIndex(f"{path}: {_with_its_file(text, path)}; {advice}")


def _with_its_file(text: str, path: Path) -> str:
    """What RocksDB says of damage, with the files that may have it where it names none."""
    text = _MANIFEST_BLAMED.sub("", text)
    if _NAMED.search(text) or "CURRENT" in text or "MANIFEST" in text:
        return text
    suffix = ".blob" if "blob" in text.lower() else ".sst"
    suspects = ", ".join(sorted(file.name for file in path.glob(f"*{suffix}")))
    return f"{text} in {suspects}" if suspects else text


class Batch:
    """Puts and deletes that become visible together, or not at all."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.writes = rocksdict.WriteBatch(raw_mode=True)

    def put(self, family: str, key: bytes, value: bytes) -> None:
        """Set ``key`` of a column family."""
        self.writes.put(key, value, self._index.handles[family])

    def delete(self, family: str, key: bytes) -> None:
        """Remove ``key`` of a column family; nothing if it isn't there."""
        self.writes.delete(key, self._index.handles[family])


class Index:
    """An open RocksDB with the four column families.

    Parameters
    ----------
    path : Path
    blobs : bool
        Keep large values of ``pages`` in blob files.
    lean : bool
        The disk is full: write as little as may be.
    """

    def __init__(self, path: Path, blobs: bool, lean: bool = False) -> None:
        self.path = path
        # RocksDB syncs its folder and not the name of it; without the name all would be lost.
        disk.make_dir(path, disk.FOLDER_MODE)
        disk.shut(path)
        again = "delete this folder and reopen the store, which rebuilds it from the segments"
        # What does not open can't be verified either.
        self._advice = _BEGIN_ANEW if blobs else again
        families = {name: _options(blobs, blobs and name == "pages", lean) for name in FAMILIES}
        self._options = _options(blobs, lean=lean)
        self._options.enable_statistics()
        forks.use_rocksdb()
        rockslog.refuse_damaged_manifest(path, self._advice)
        #: Bytes of an unacknowledged batch that were cut off.
        self.torn_bytes = rockslog.cut_torn_tail(path) if blobs else 0
        try:
            self._db = rocksdict.Rdict(str(path), self._options, column_families=families)
        except Exception as error:
            raise self._ours(error) from error
        self._advice = _NAME_AND_DELETE if blobs else again
        self._families = {name: self._db.get_column_family(name) for name in FAMILIES}
        self.handles = {name: self._db.get_column_family_handle(name) for name in FAMILIES}

    def _ours(self, error: Exception, writing: bool = False) -> Exception:
        return _translate(error, self.path, self._advice, writing)

    def get(self, family: str, key: bytes) -> bytes | None:
        """The value, or None."""
        try:
            return self._families[family].get(key)
        except Exception as error:
            raise self._ours(error) from error

    def get_many(self, family: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values in order, None for each that is missing."""
        try:
            return list(self._families[family].get(list(keys)) or []) if keys else []
        except Exception as error:
            raise self._ours(error) from error

    def items(self, family: str) -> Iterator[tuple[bytes, bytes]]:
        """All pairs, by key; damage on the way is an error, never a shorter list."""
        try:
            pairs = self._families[family].iter()
            pairs.seek_to_first()
            while pairs.valid():
                yield pairs.key(), pairs.value()
                pairs.next()
            pairs.status()
        except Exception as error:
            raise self._ours(error) from error

    def frozen(self, family: str) -> Callable[[bytes], bytes | None]:
        """A look-up in the family as it is now, whatever is written later."""
        as_it_is = self._families[family].snapshot()

        def get(key: bytes) -> bytes | None:
            try:
                value: bytes = as_it_is[key]
                return value
            except KeyError:
                return None
            except Exception as error:
                raise self._ours(error) from error

        return get

    def write(self, batch: Batch, sync: bool) -> None:
        """Apply a batch; with ``sync`` it is durable when this returns (one fsync of the log)."""
        options = rocksdict.WriteOptions()
        options.sync = sync
        try:
            self._db.write(batch.writes, options)
        except Exception as error:
            raise self._ours(error, writing=True) from error

    @property
    def get_us(self) -> int:
        """Microseconds inside RocksDB's gets since this was opened, the binding's own time left out."""
        counter = _GET_US.search(self._options.get_statistics() or "")
        return int(counter[1]) if counter else 0

    @property
    def syncs(self) -> int:
        """Syncs of the log since this was opened, as RocksDB itself counts them."""
        counter = _WAL_SYNCED.search(self._options.get_statistics() or "")
        return int(counter[1]) if counter else 0

    def clear(self) -> None:
        """Remove every entry."""
        batch = Batch(self)
        for family in FAMILIES:
            for key, _ in self.items(family):
                batch.delete(family, key)
        self.write(batch, sync=False)

    def sync(self) -> None:
        """Make all writes so far durable."""
        try:
            self._db.flush_wal(True)
        except Exception as error:
            raise self._ours(error, writing=True) from error

    def compact(self, family: str) -> None:
        """Rewrite a family, blob files too, without what was deleted.

        Blob files that nobody needs go first. The others are written again where there is room for them.
        """
        rewritten = self._families[family]
        try:
            rewritten.flush()
            rewritten.set_options({_AGE_CUTOFF: _NONE})
            rewritten.compact_range(None, None)
            blobs = rewritten.property_int_value(_BLOB_BYTES) or 0
            if 0 < blobs < disk.free_bytes(self.path):
                rewritten.set_options({_AGE_CUTOFF: _ASKED_FOR})
                rewritten.compact_range(None, None)
            rewritten.set_options({_AGE_CUTOFF: _BY_ITSELF})
        except Exception as error:
            raise self._ours(error, writing=True) from error

    def let_go(self) -> None:
        """In a forked child: no call ends what the parent's threads have to end."""
        for thing in (self._db, self._options, *self._families.values(), *self.handles.values()):
            forks.never_freed(thing)

    def close(self) -> None:
        """Close the database; unsynced writes stay in the operating system's hands."""
        self.handles.clear()
        self._families.clear()
        try:
            self._db.close()
        except Exception as error:
            raise self._ours(error) from error
