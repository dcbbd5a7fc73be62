"""Z2: pages lie in append-only segment files; RocksDB holds where.

The segments are the truth and the index follows: its writes are not synced. The ledger says up to
which batch the segments are indexed; opening replays what follows, and builds the whole index again
where it is missing or speaks of bytes that are gone. So deletions are records too.
"""

from __future__ import annotations

import errno
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice

from kvtrial.cold import disk
from kvtrial.cold.errors import ColdError, CorruptIndex, CorruptSegment, DiskFull, StorePoisoned
from kvtrial.cold.index import Batch, Index, SpilledSequence
from kvtrial.cold.page import Page
from kvtrial.cold.prefix import Stored
from kvtrial.cold.records import DELETE, FILE_HEADER_BYTES, PAGE, SEQUENCE, Location, Record
from kvtrial.cold.recovery import recover
from kvtrial.cold.segments import START, Position, Recovered, ScannedRecord, SegmentLog, Wanted
from kvtrial.cold.store import ColdStore, Progress, Reader

#: gc rewrites a segment once less than this part of it is live.
LIVE_FRACTION = 0.5
#: A restore of less than this (bytes) is done sooner than another thread is started.
THREAD_BYTES = 4 << 20
#: Records that gc moves per batch.
MOVE_RECORDS = 8

_CHECKPOINT = struct.Struct("<QQQQ")
_NO_SEQUENCE = bytes(32)
_NOWHERE = Location(0, 0, 0, 0, 0)


class SegmentStore(ColdStore):
    """Z2. A restore reads from the file straight into the pool's pages."""

    kind = "Z2"

    def _open(self) -> None:
        folder = self.path / "segments"
        disk.make_dir(folder, disk.FOLDER_MODE)
        disk.shut(folder)
        self._log = SegmentLog(folder)
        self._index = Index(self.path / "index", blobs=False, lean=self._reserve.given_up)
        try:
            self._replay()
        except BaseException:
            self._close()
            raise

    @property
    def recovered(self) -> Recovered:
        """What opening had to do."""
        return self._log.recovered

    def _replay(self) -> None:
        """Index the batches that the index has not seen."""
        said = self._checkpoint()
        start = said if said is not None and self._fits(said) else None
        sequences: dict[bytes, bytes] = {}
        pages: set[bytes] = set()
        if start is None:
            sequences = dict(self._index.items("snapshots"))
            pages = {key for key, _ in self._index.items("prefix")}
            self._index.clear()
            self._log.recovered.rebuilt = bool(self._log.numbers())
        for batch in recover(self._log, start):
            self._apply((f.header.kind, f.header.key, f.meta, f.location) for f in batch)
        if start is None and said is not None and said.batch > self._log.end.batch:
            self._believe(sequences, pages)
        if start is None:
            # What the index said before must not come back by a power cut, to be believed of segments
            # that have grown since.
            self._index.sync()

    def _believe(self, sequences: dict[bytes, bytes], pages: set[bytes]) -> None:
        """Make up for batches that the index knew of and the segments no longer have.

        No crash takes synced bytes away. A sequence that is lost stays listed, so that `verify` names it; a
        deletion that is lost is done again.
        """
        back = [key for key, _ in self._index.items("snapshots") if key not in sequences]
        pages_back = [key for key, _ in self._index.items("prefix") if key not in pages]
        if back or pages_back:
            first, *others = back or [_NO_SEQUENCE]
            again = [Record(DELETE, first, b"".join(pages_back))]
            self._append(again + [Record(DELETE, key, b"") for key in others])
        self._apply((SEQUENCE, key, meta, _NOWHERE) for key, meta in sequences.items())

    def _checkpoint(self) -> Position | None:
        """How far the index says that the segments are indexed."""
        data = self._index.get("ledger", b"checkpoint")
        return None if data is None else Position(*_CHECKPOINT.unpack(data))

    def _fits(self, said: Position) -> bool:
        """Whether the index can be gone on with: its last segment is there, the same file, as long."""
        if said == START:
            return True
        if said.segment not in self._log.numbers():
            return False
        size, header = self._log.size(said.segment), self._log.header(said.segment)
        if size < said.offset or (header is not None and header.file_id != said.file_id):
            return False
        # What follows may be cut off as torn: never from the midst of a record on.
        return size == said.offset or self._log.is_between_batches(said)

    def _apply(self, records: Iterable[tuple[int, bytes, bytes, Location]]) -> None:
        """Make durable records (kind, key, meta, where) visible; one atomic, unsynced write."""
        puts = Batch(self._index)
        for kind, key, meta, location in records:
            if kind == PAGE:
                puts.put("prefix", key, meta)
                puts.put("pages", key, location.encode())
            elif kind == SEQUENCE:
                puts.put("snapshots", key, meta)
            elif kind == DELETE:
                puts.delete("snapshots", key)
                for i in range(0, len(meta), 32):
                    puts.delete("prefix", meta[i : i + 32])
                    puts.delete("pages", meta[i : i + 32])
        puts.put("ledger", b"checkpoint", _CHECKPOINT.pack(*self._log.end))
        self._reserve.make_room(self._index_bytes())  # what is durable has to be indexed
        try:
            self._index.write(puts, sync=False)
        except ColdError as error:
            raise StorePoisoned(
                f"the batch is durable but the index did not take it ({error}); reopen the store, "
                "which indexes it"
            ) from error

    def _append(self, records: Sequence[Record]) -> None:
        locations = self._log.append(records)
        self._apply((r.kind, r.key, r.meta, where) for r, where in zip(records, locations))

    def _logged_bytes(self, pages: Sequence[Page]) -> int:
        return 0  # the index has places alone

    def _write(self, pages: Sequence[Page], snapshot: SpilledSequence | None) -> None:
        records = [Record(PAGE, p.key, p.meta.encode(), p.payload) for p in pages]
        if snapshot is not None:
            records.append(Record(SEQUENCE, snapshot.key, snapshot.encode()))
        self._append(records)

    def _reader(self, stored: Sequence[Stored]) -> Reader:
        page_keys = [s.page.key for s in stored]
        places = [
            self._location(key, data)
            for key, data in zip(page_keys, self._index.get_many("pages", page_keys))
        ]
        files = [self._log.file(place.segment) for place in places]

        def read(views: Sequence[list[memoryview]], threads: int) -> tuple[int, int]:
            wanted = [Wanted(*record) for record in zip(page_keys, files, places, views)]
            most = 1 + sum(place.payload_nbytes for place in places) // THREAD_BYTES
            _, (read_ns, check_ns) = self._log.read(wanted, min(threads, most))
            return int(read_ns), int(check_ns)

        return read

    def _location(self, key: bytes, data: bytes | None) -> Location:
        if data is None:
            raise CorruptIndex(
                f"page {key.hex()[:16]} has meta and no location; delete {self._index.path} and "
                "reopen, which rebuilds it"
            )
        return Location.decode(data)

    def _drop(self, snapshot: SpilledSequence | None, page_keys: Sequence[bytes]) -> None:
        key = snapshot.key if snapshot is not None else _NO_SEQUENCE
        self._append([Record(DELETE, key, b"".join(page_keys))])

    def _reclaim(self, progress: Progress) -> None:
        """Move what is live out of mostly dead segments, those with the least first, and remove those.

        Others come in between the steps. What they add goes to the end of the log, never into a
        segment that is being emptied, and whether a record is live is asked as it is moved.
        """
        with self._using():
            live: Counter[int] = Counter()
            for _, data in self._index.items("pages"):
                location = Location.decode(data)
                live[location.segment] += location.nbytes
            dead = [
                n
                for n in self._log.numbers()
                if live[n] < LIVE_FRACTION * (self._log.size(n) - FILE_HEADER_BYTES)
            ]
            if dead and dead[-1] == self._log.end.segment:
                self._log.sealed = True
            # What needs no room gives some to the others.
            dead.sort(key=lambda number: live[number])
        stuck: ColdError | None = None
        for n, number in enumerate(dead, start=1):
            try:
                self._refuse_without_room(live[number])
                self._empty(number)
            except (CorruptSegment, DiskFull) as error:
                stuck = stuck or error  # that one stays, and is in no other's way
            progress(n, len(dead))
        if stuck is not None:
            raise stuck

    def _refuse_without_room(self, live_bytes: int) -> None:
        """`DiskFull` where what has to be moved out of a segment would fill the disk before that is gone."""
        free = disk.free_bytes(self.path)
        if live_bytes and free < live_bytes + self._index_bytes():
            raise DiskFull(
                errno.ENOSPC,
                f"{self._log.folder}: {live_bytes} bytes of a segment are still needed, and {free} are "
                "free to move them to; delete() more sequences and run gc again, or free space",
            )

    def _empty(self, number: int) -> None:
        """Write what is live in a segment again, and remove it."""
        with self._using():
            records = self._log.scan(number, self._log.ends()[number])
        while step := list(islice(records, MOVE_RECORDS)):
            with self._using():
                if moved := [record for scanned in step if (record := self._moved(scanned))]:
                    self._poisoning(self._append, moved)
        with self._using():
            self._poisoning(self._remove, number)

    def _remove(self, number: int) -> None:
        try:
            if number == self._log.end.segment:
                self._log.begin()
                self._apply(())
            # The index must not point into the file, not even after a crash that undoes its last
            # unsynced writes.
            self._index.sync()
            self._log.remove(number)
        except DiskFull:
            raise
        except (ColdError, OSError) as error:
            raise StorePoisoned(
                f"segment {number} was not removed for good ({error}); check the disk and reopen the "
                "store"
            ) from error

    def _damage_between(self) -> list[str]:
        damaged: list[str] = []
        with self._using():  # what is added from here on is not looked at
            ends = self._log.ends()
        for number, end in ends.items():
            with suppress(FileNotFoundError):  # gc took it meanwhile
                damage = self._log.damaged_heads(number, end)
                self._log.size(number)
                damaged += damage
        return damaged

    def _moved(self, scanned: ScannedRecord) -> Record | None:
        """A record as it is written again, or None where nothing needs it any more."""
        header, location, meta = scanned
        if header.kind == PAGE:
            if self._index.get("pages", header.key) != location.encode():
                return None
            pages = location.split(memoryview(bytearray(location.payload_nbytes)))
            file = self._log.file(location.segment)
            self._log.read([Wanted(header.key, file, location, pages)])
            return Record(PAGE, header.key, meta, pages)
        if header.kind == SEQUENCE:
            live = self._index.get("snapshots", header.key) == meta
            return Record(SEQUENCE, header.key, meta) if live else None
        # What it deletes may lie in an older segment that stays, and would come back when the index
        # is rebuilt; what was stored again since must not be deleted.
        gone = [meta[i : i + 32] for i in range(0, len(meta), 32)]
        meta = b"".join(k for k in gone if self._index.get("pages", k) is None)
        stays = self._index.get("snapshots", header.key) is not None
        key = _NO_SEQUENCE if stays else header.key
        if location.segment == self._log.numbers()[0] or (not meta and key == _NO_SEQUENCE):
            return None
        return Record(DELETE, key, meta)

    def _close(self) -> None:
        self._index.close()
        self._log.close()
