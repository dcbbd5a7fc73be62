"""Append-only segment files ``segments/00000001.seg``: batches that are whole or absent.

`records` has the files' form, `recovery` what opening does. A batch is acknowledged when its one
fdatasync has returned, and the next is not begun before.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtrial.cold import disk
from kvtrial.cold._reader import ENDED, FAILED, SHORT_BYTES, SOUND, read_records
from kvtrial.cold.disk import Buffer
from kvtrial.cold.errors import (
    ColdError,
    CorruptSegment,
    DiskFull,
    ForeignStore,
    FormatMismatch,
    StorePoisoned,
    Unreadable,
    of_disk,
)
from kvtrial.cold.records import (
    FILE_HEADER_BYTES,
    HEADER_BYTES,
    FileHeader,
    Header,
    Location,
    Record,
    checksum,
    page_sums,
)
from kvtrial.contract import I64

#: A segment is sealed once it has grown past this (bytes); gc works on whole segments.
SEGMENT_BYTES = 256 << 20

#: Segment files that are kept open.
OPEN_FILES = 64

_NAME = re.compile(r"[0-9]{8,9}\.seg")  # a `Location` has 32 bits for it
_ENDS = "the file ends inside the record"


class Position(NamedTuple):
    """A place between two batches: segment number, offset in bytes, number of the batch to come, and
    the id that the file's header says."""

    segment: int
    offset: int
    batch: int
    file_id: int


START = Position(0, 0, 1, 0)


class ScannedRecord(NamedTuple):
    """A record met while scanning."""

    header: Header
    location: Location
    meta: bytes


class SegmentFile:
    """An open segment. It closes when the log and the last reader have let go of it, so a reader
    goes on while gc removes the file."""

    def __init__(self, path: Path, create: bool = False) -> None:
        # Where a new one is to be, there is none: bytes that are there were acknowledged once.
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self.fd = -1
        self.fd = os.open(path, flags, disk.FILE_MODE)
        self.path = path

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Wanted(NamedTuple):
    """A record to read: its key, its file and place, and a buffer for each of its pages."""

    key: bytes
    file: SegmentFile
    location: Location
    pages: list[memoryview]


@dataclass
class Recovered:
    """What opening had to do."""

    replayed_batches: int = 0
    truncated_bytes: int = 0
    #: The index was missing, or spoke of bytes that are gone, and was built from the segments.
    rebuilt: bool = False


@dataclass
class SegmentLog:
    """The segment files of one store. Writing is not thread-safe; the store's lock is."""

    folder: Path
    recovered: Recovered = field(default_factory=Recovered)
    #: After the last whole batch.
    end: Position = START
    #: The next batch begins a new segment.
    sealed: bool = True
    #: The last used ones; a lock, since readers open files beside the store's lock.
    _files: OrderedDict[int, SegmentFile] = field(default_factory=OrderedDict)
    _opening: threading.Lock = field(default_factory=threading.Lock)

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self.folder / f"{segment:08d}.seg"

    def numbers(self) -> list[int]:
        """Segments on disk, oldest first."""
        names = [name for name in disk.names(self.folder) if name.endswith(".seg")]
        for name in names:
            if not _NAME.fullmatch(name):
                raise ForeignStore(
                    f"{self.folder / name} is no segment of this store; move it out of its folder"
                )
        return sorted(int(name.removesuffix(".seg")) for name in names)

    def size(self, segment: int) -> int:
        """Bytes of a segment file."""
        return self.path(segment).stat().st_size

    def file(self, segment: int) -> SegmentFile:
        """The open file of a segment."""
        with self._opening:  # of two threads that open it, both go on with one
            opened = self._files.get(segment)
            if opened is None:
                try:
                    opened = SegmentFile(self.path(segment))
                except FileNotFoundError:
                    raise CorruptSegment(
                        f"{self.path(segment)} is gone and the index points into it; restore it, "
                        "or delete the index folder to go on with what is left"
                    ) from None
                except OSError as error:
                    raise of_disk(error, self.path(segment), "opened") from error
                self._keep(segment, opened)
            else:
                self._files.move_to_end(segment)
        return opened

    def _keep(self, segment: int, file: SegmentFile) -> None:
        """Invariant: so many files are open, however many there are, and those of readers under way."""
        self._files[segment] = file
        while len(self._files) > OPEN_FILES:
            self._files.popitem(last=False)

    def corrupt(self, location: Location, why: str) -> CorruptSegment:
        """The error for a damaged record."""
        return CorruptSegment(
            f"{self.path(location.segment)} at offset {location.offset}: {why}; run verify() to "
            "list all damage, delete() what it names, and spill it again"
        )

    # ---- writing

    def append(self, records: Sequence[Record]) -> list[Location]:
        """Write one batch and sync it; when this returns, it is durable.

        Raises
        ------
        DiskFull
            No space; the file is as long as before.
        StorePoisoned
            Writing, syncing or rolling back failed otherwise.
        """
        if self.sealed or self.end.offset >= SEGMENT_BYTES:
            self._begin_segment()
        segment, start, batch, _ = self.end
        buffers: list[Buffer] = []
        locations: list[Location] = []
        offset = start
        for ordinal, record in enumerate(records):
            buffers += record.frame(ordinal, len(records), batch)
            locations.append(record.location(segment, offset))
            offset += locations[-1].nbytes
        file = self.file(segment)
        self._write(file, buffers, start)
        try:
            disk.fsync(file.fd)
        except OSError as error:
            # The pages that could not be written count as clean from here on: a second fsync would
            # succeed without them. Cut them off, so that no later opener takes them for durable.
            with suppress(StorePoisoned):
                self._cut(file, start)
            raise StorePoisoned(
                f"sync of {file.path} failed ({error}); the batch is not stored; check "
                "the disk and reopen the store"
            ) from error
        self.end = self.end._replace(offset=offset, batch=batch + 1)
        return locations

    def _write(self, file: SegmentFile, buffers: Sequence[Buffer], start: int) -> None:
        try:
            disk.write_all(file.fd, buffers, start)
        except OSError as error:
            self._cut(file, start)
            raise _failed(error, file.path, start) from error

    @staticmethod
    def _cut(file: SegmentFile, offset: int) -> None:
        """Cut a batch off for good: it must not stand behind the last whole one once another segment
        has begun."""
        try:
            disk.truncate(file.fd, offset)
        except OSError as error:
            raise StorePoisoned(
                f"{file.path} could not be cut back to {offset} bytes ({error}); reopen "
                "the store, which does it again"
            ) from error

    def _begin_segment(self) -> None:
        """Create the next segment; its name is durable now, its header with the first batch."""
        number = self.end.segment + 1
        try:
            file = SegmentFile(self.path(number), create=True)
        except OSError as error:
            raise of_disk(error, self.path(number), "made") from error
        header = FileHeader.new(number, self.end.batch)
        try:
            self._write(file, [header.encode()], 0)
        except ColdError:
            with suppress(OSError):  # it would be in the way of the next attempt
                self.path(number).unlink()
            raise
        with self._opening:
            self._keep(number, file)
        try:
            disk.fsync_dir(self.folder)
        except OSError as error:
            raise StorePoisoned(
                f"sync of {self.folder} failed ({error}); check the disk and reopen the store"
            ) from error
        self.end = Position(number, FILE_HEADER_BYTES, self.end.batch, header.file_id)
        self.sealed = False

    def begin(self) -> None:
        """Begin the next segment now, durably.

        Invariant: a store that has had a segment has one. The header of the newest says where numbers
        go on, so none is used twice, and nothing said of a removed file fits another.
        """
        self._begin_segment()
        try:
            disk.fsync(self.file(self.end.segment).fd)
        except OSError as error:
            raise StorePoisoned(
                f"sync of {self.path(self.end.segment)} failed ({error}); check the disk and reopen "
                "the store"
            ) from error

    def remove(self, segment: int) -> None:
        """Delete a segment file, durably; readers that hold it go on. The newest has to stay."""
        with self._opening:
            self._files.pop(segment, None)
            self.path(segment).unlink()
        disk.fsync_dir(self.folder)

    # ---- reading

    def read(self, wanted: Sequence[Wanted], threads: int = 1) -> tuple[list[bytes], I64]:
        """Read records straight into the buffers of their pages, sums verified.

        Parameters
        ----------
        wanted : sequence of Wanted
            The buffers of one record hold ``location.payload_nbytes`` together.
        threads : int
            Each takes a part of the records.

        Returns
        -------
        list of bytes
            Each record's meta.
        int64 (2,)
            Nanoseconds of reading, and of checking and moving, over all threads.

        Raises
        ------
        CorruptSegment, Unreadable
            Buffers may be filled in part.
        """
        share = max(1, -(-len(wanted) // threads))
        parts = [wanted[at : at + share] for at in range(0, len(wanted), share)]
        if len(parts) < 2:
            done = [self._read_part(part) for part in parts]
        else:
            with ThreadPoolExecutor(len(parts), thread_name_prefix="kvtrial-cold") as pool:
                done = list(pool.map(self._read_part, parts))
        metas = [meta for part, _ in done for meta in part]
        return metas, np.array([spent for _, spent in done], np.int64).reshape(-1, 2).sum(axis=0)

    def _read_part(self, wanted: Sequence[Wanted]) -> tuple[list[bytes], tuple[int, int]]:
        """Metas of the records, and nanoseconds as `read` gives them."""
        records = []
        for _, file, location, pages in wanted:
            if len(pages) != location.pages:
                raise self.corrupt(location, f"{location.pages} pages, where meta has {len(pages)}")
            records.append((file.fd, location.offset, bytearray(location.head_nbytes), pages))
        states, read_ns, check_ns = read_records(records)
        metas = [
            self._checked(want, head, state)
            for want, (_, _, head, _), state in zip(wanted, records, states)
        ]
        return metas, (read_ns, check_ns)

    def _checked(self, wanted: Wanted, head: bytearray, state: int) -> bytes:
        """The meta of a record that was read, or what is wrong with it."""
        key, _, location, pages = wanted
        if state == ENDED:
            raise self.corrupt(location, _ENDS)
        if state <= FAILED:
            raise self._unreadable(location.segment, location.offset, FAILED - state)
        # A page's sum lies in the head, so if that is damaged the page may well be sound.
        header = Header.parse(head)
        if header is None:
            raise self.corrupt(location, "the header's checksum is wrong")
        if header.key != key:
            raise self.corrupt(location, f"it holds key {header.key.hex()[:16]}")
        meta = header.meta_of(head)
        if meta is None:
            raise self.corrupt(location, "the checksum of its meta and sums is wrong")
        if state == SOUND and pages and pages[0].nbytes <= SHORT_BYTES:
            sums = page_sums(head, len(pages))
            state = next((i for i, p in enumerate(pages) if checksum(p) != sums[i]), SOUND)
        if state >= 0:
            raise self.corrupt(location, f"the payload's checksum is wrong in page {state}")
        return meta

    def read_raw(self, segment: int, into: bytearray, offset: int) -> int:
        """Bytes of the file as they are; how many came, fewer only at its end."""
        file = self.file(segment)  # held, so that its descriptor stays open
        try:
            return disk.read_into(file.fd, [into], offset)
        except OSError as error:
            raise self._unreadable(segment, offset, error.errno or 0) from error

    def _unreadable(self, segment: int, offset: int, code: int) -> Unreadable:
        return Unreadable(
            code,
            f"{self.path(segment)} at offset {offset} can't be read ({os.strerror(code)}); "
            "nothing was changed; check the disk, then put the file back from a copy, or delete() what "
            "verify() names and spill it again",
        )

    def header(self, segment: int) -> FileHeader | None:
        """A segment's own header, None where it is damaged; `FormatMismatch` for another version's."""
        data = bytearray(FILE_HEADER_BYTES)
        if self.read_raw(segment, data, 0) < FILE_HEADER_BYTES:
            return None
        return FileHeader.parse(data, str(self.path(segment)))

    def head_at(self, segment: int, offset: int) -> ScannedRecord | None:
        """The record at ``offset``, by its head; None where that is damaged or the file too short."""
        head = bytearray(HEADER_BYTES)
        if self.read_raw(segment, head, offset) < HEADER_BYTES:
            return None
        header = Header.parse(head)
        if header is None:
            return None
        location = header.location(segment, offset)
        if offset + location.nbytes > self.size(segment):
            return None
        head = bytearray(location.head_nbytes)
        self.read_raw(segment, head, offset)
        meta = header.meta_of(head)
        return None if meta is None else ScannedRecord(header, location, meta)

    def record_at(self, segment: int, offset: int) -> ScannedRecord | None:
        """The record at ``offset``, all sums verified; None where it isn't whole."""
        record = self.head_at(segment, offset)
        if record is None:
            return None
        location = record.location
        pages = location.split(memoryview(bytearray(location.payload_nbytes)))
        try:
            self.read([Wanted(record.header.key, self.file(segment), location, pages)])
        except CorruptSegment:
            return None
        return record

    def ends(self) -> dict[int, int]:
        """Segments, and where what is in them ends (bytes): what is being added lies behind that."""
        sizes = {segment: self.size(segment) for segment in self.numbers()}
        return sizes if self.end == START else sizes | {self.end.segment: self.end.offset}

    def scan(self, segment: int, end: int) -> Iterator[ScannedRecord]:
        """Every record of a recovered segment up to an offset, by its head; `CorruptSegment` at a damaged
        one.

        Pages are not read: a damaged one that nobody needs any more is in nobody's way.
        """
        offset = FILE_HEADER_BYTES
        while offset < min(end, self.size(segment)):
            record = self.head_at(segment, offset)
            if record is None:
                raise self.corrupt(
                    Location(segment, offset, 0, 0, 0), "the record's head is damaged"
                )
            yield record
            offset += record.location.nbytes

    def is_between_batches(self, at: Position) -> bool:
        """Whether a batch ends or begins at a place; a damaged head on the way there leaves it open."""
        record = self.head_at(at.segment, at.offset)
        if record is not None and (record.header.batch, record.header.ordinal) == (at.batch, 0):
            return True
        offset = FILE_HEADER_BYTES
        while offset < at.offset:
            record = self.head_at(at.segment, offset)
            if record is None:
                return True
            offset += record.location.nbytes
        return offset == at.offset

    def damaged_heads(self, segment: int, end: int) -> list[str]:
        """What is wrong with a segment's own header, and the first damaged record head before ``end``; what
        follows that one can't be found from here."""
        damage = []
        try:
            header = self.header(segment)
            if header is None or header.segment != segment:
                damage.append(f"{self.path(segment)} at offset 0: the file header is damaged")
            for _ in self.scan(segment, end):
                pass
        except (CorruptSegment, FormatMismatch, Unreadable) as error:
            damage.append(str(error).partition("; run verify()")[0])
        return damage

    def close(self) -> None:
        """Let go of every file."""
        self._files.clear()


def _failed(error: OSError, path: Path, start: int) -> ColdError:
    """What to raise for a batch that was not written and was cut back to ``start`` bytes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            error.errno,
            f"no space for a batch in {path}; it was rolled back to {start} bytes; free space "
            "or run gc, and spill again",
        )
    return StorePoisoned(
        f"write to {path} failed ({error}); it was rolled back to {start} bytes; check the "
        "disk and reopen the store"
    )
