"""Append-only segment files: framed records, written in batches that are whole or absent.

``segments/00000001.seg`` is a file header and then records, little-endian, without gaps::

    file header   magic 8s · segment u64 · first batch u64 · XXH3-64 of these
    record        magic 4s · kind u32 · ordinal u32 · count u32 · batch u64 · meta bytes u32 ·
                  payload bytes u64 · key 32s · XXH3-64 of meta and payload · XXH3-64 of this header
                  then meta, then payload

A batch is ``count`` records of one batch number; batches count on by one. A batch is acknowledged
when its one fdatasync has returned, and the next is not begun before. So what follows the last
whole batch of the last segment was never acknowledged, and recovery cuts it off - unless a record
of a *later* batch stands behind it, which proves that it was whole once: that is `CorruptSegment`.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvtrial.cold import disk
from kvtrial.cold.ahead import ahead
from kvtrial.cold.disk import Buffer
from kvtrial.cold.errors import ColdError, CorruptSegment, DiskFull, FormatMismatch, StorePoisoned

PAGE, SNAPSHOT, DELETE = 1, 2, 3

#: A segment is sealed once it has grown past this (bytes); gc works on whole segments.
SEGMENT_BYTES = 256 << 20
#: Records that lie one after the other are read together up to this many bytes, which stay in the
#: cache between the read and the check.
RUN_BYTES = 4 << 20

_FILE_MAGIC = b"KVTSEG\x00\x01"
_MAGIC = b"KVR1"
_FILE = struct.Struct("<8sQQQ")
_RECORD = struct.Struct("<4sIIIQIQ32sQQ")
_CHUNK = 1 << 20


class Position(NamedTuple):
    """A place between two batches: segment number, offset in bytes, number of the batch to come."""

    segment: int
    offset: int
    batch: int


_START = Position(0, 0, 1)


@dataclass(frozen=True)
class Record:
    """One entry of a batch."""

    kind: int
    key: bytes
    meta: bytes
    payload: Sequence[Buffer] = ()


class Location(NamedTuple):
    """Where a record lies; as it is stored in the index."""

    segment: int
    offset: int
    meta_nbytes: int
    payload_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return _RECORD.size + self.meta_nbytes + self.payload_nbytes

    def encode(self) -> bytes:
        """24 bytes, little-endian."""
        return _LOCATION.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> Location:
        """Inverse of `encode`."""
        return cls(*_LOCATION.unpack(data))


#: Key, place, and buffers for the payload.
Wanted = tuple[bytes, Location, Sequence[memoryview]]

_LOCATION = struct.Struct("<IQIQ")


@dataclass(frozen=True)
class Header:
    """A record's header, checked."""

    kind: int
    ordinal: int
    count: int
    batch: int
    meta_nbytes: int
    payload_nbytes: int
    key: bytes
    body_xxh3: int

    @classmethod
    def parse(cls, data: Buffer) -> Header | None:
        """None where magic or checksum is wrong: nothing of it may be believed then."""
        magic, *fields, check = _RECORD.unpack_from(data)
        covered = memoryview(data)[: _RECORD.size - 8]
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(covered) != check:
            return None
        return cls(*fields)


class Found(NamedTuple):
    """A record met while scanning."""

    header: Header
    location: Location
    meta: bytes


@dataclass
class Recovery:
    """What opening had to do."""

    replayed_batches: int = 0
    truncated_bytes: int = 0
    #: The index was missing, or spoke of bytes that are gone, and was built from the segments.
    rebuilt: bool = False


@dataclass
class SegmentLog:
    """The segment files of one store. Not thread-safe; the store's lock is."""

    folder: Path
    recovery: Recovery = field(default_factory=Recovery)
    end: Position = _START
    _sealed: bool = True
    _fds: dict[int, int] = field(default_factory=dict)

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self.folder / f"{segment:08d}.seg"

    def numbers(self) -> list[int]:
        """Segments on disk, oldest first."""
        return sorted(int(p.stem) for p in self.folder.glob("*.seg"))

    def size(self, segment: int) -> int:
        """Bytes of a segment file."""
        return self.path(segment).stat().st_size

    def _fd(self, segment: int) -> int:
        if segment not in self._fds:
            try:
                fd = os.open(self.path(segment), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                raise CorruptSegment(
                    f"{self.path(segment)} is gone and the index points into it; restore it, "
                    "or delete the index folder to go on with what is left"
                ) from None
            self._fds[segment] = fd
        return self._fds[segment]

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
        buffers: list[Buffer] = []
        sizes: list[tuple[int, int]] = []
        for ordinal, record in enumerate(records):
            body = xxhash.xxh3_64(record.meta)
            for part in record.payload:
                body.update(part)
            meta_nbytes = len(record.meta)
            payload_nbytes = sum(memoryview(p).nbytes for p in record.payload)
            head = _RECORD.pack(
                _MAGIC, record.kind, ordinal, len(records), self.end.batch, meta_nbytes,
                payload_nbytes, record.key, body.intdigest(), 0,
            )[:-8]  # fmt: skip
            check = xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")
            buffers += [head + check, record.meta, *record.payload]
            sizes.append((meta_nbytes, payload_nbytes))
        if self._sealed or self.end.offset >= SEGMENT_BYTES:
            self._begin_segment()
        segment, start, batch = self.end
        fd = self._fd(segment)
        written = self._write(fd, segment, buffers, start)
        try:
            disk.fsync(fd)
        except OSError as error:
            # The pages that could not be written count as clean from here on: a second fsync would
            # succeed without them. Cut them off, so that no later opener takes them for durable.
            self._cut(fd, segment, start)
            raise StorePoisoned(
                f"sync of {self.path(segment)} failed ({error}); the batch is not stored; check "
                "the disk and reopen the store"
            ) from error
        locations = []
        offset = start
        for meta_nbytes, payload_nbytes in sizes:
            locations.append(Location(segment, offset, meta_nbytes, payload_nbytes))
            offset += locations[-1].nbytes
        self.end = Position(segment, start + written, batch + 1)
        return locations

    def _write(self, fd: int, segment: int, buffers: Sequence[Buffer], start: int) -> int:
        try:
            return disk.write_all(fd, buffers, start)
        except OSError as error:
            self._cut(fd, segment, start)
            raise self._failed(error, segment, start) from error

    def _failed(self, error: OSError, segment: int, start: int) -> ColdError:
        """What to raise for a batch that was not written and was cut back to ``start`` bytes."""
        path = self.path(segment)
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

    def _cut(self, fd: int, segment: int, offset: int) -> None:
        try:
            os.ftruncate(fd, offset)
        except OSError as error:
            raise StorePoisoned(
                f"{self.path(segment)} could not be cut back to {offset} bytes ({error}); reopen "
                "the store, which does it again"
            ) from error

    def _begin_segment(self) -> None:
        """Create the next segment; its name is durable now, its header with the first batch."""
        number = self.end.segment + 1
        if number not in self._fds:  # it is there where a full disk refused its header before
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            try:
                self._fds[number] = os.open(self.path(number), flags, 0o644)
            except OSError as error:
                raise self._failed(error, number, 0) from error
        self._write(self._fds[number], number, [_file_header(number, self.end.batch)], 0)
        disk.fsync_dir(self.folder)
        self.end = Position(number, _FILE.size, self.end.batch)
        self._sealed = False

    def seal(self) -> None:
        """Let the next batch begin a new segment."""
        self._sealed = True

    def remove(self, segment: int) -> None:
        """Delete a segment file, durably."""
        if (fd := self._fds.pop(segment, None)) is not None:
            os.close(fd)
        self.path(segment).unlink()
        disk.fsync_dir(self.folder)

    # ---- reading

    def read(self, wanted: Sequence[Wanted]) -> list[bytes]:
        """Read records straight into their payload buffers, checksums verified.

        Parameters
        ----------
        wanted : sequence of (key, location, buffers)
            The buffers of one record hold ``location.payload_nbytes`` together. Records that lie
            one after the other are read by one system call.

        Returns
        -------
        list of bytes
            Each record's meta.

        Raises
        ------
        CorruptSegment
            Buffers may be filled in part.
        """
        metas: list[bytes] = []
        with ahead(self._read_run, list(_runs(wanted))) as runs:
            for run, heads, end in runs:
                for head, (key, location, views) in zip(heads, run):
                    if location.offset + location.nbytes > end:
                        raise self._corrupt(location, "the file ends inside the record")
                    metas.append(self._check(key, location, head, views))
        return metas

    def _read_run(self, run: list[Wanted]) -> tuple[list[Wanted], list[bytearray], int]:
        """Read neighbouring records; the run, header and meta of each, and where reading ended."""
        first = run[0][1]
        heads = [bytearray(_RECORD.size + location.meta_nbytes) for _, location, _ in run]
        buffers: list[Buffer] = []
        for head, (_, _, views) in zip(heads, run):
            buffers += [head, *views]
        n = disk.read_into(self._fd(first.segment), buffers, first.offset)
        return run, heads, first.offset + n

    def _check(
        self, key: bytes, location: Location, head: bytearray, views: Sequence[memoryview]
    ) -> bytes:
        header = Header.parse(head)
        meta = bytes(memoryview(head)[_RECORD.size :])
        if header is None:
            raise self._corrupt(location, "the header's checksum is wrong")
        if header.key != key:
            raise self._corrupt(location, f"it holds key {header.key.hex()[:16]}")
        body = xxhash.xxh3_64(meta)
        for view in views:
            body.update(view)
        if body.intdigest() != header.body_xxh3:
            raise self._corrupt(location, "the payload's checksum is wrong")
        return meta

    def _corrupt(self, location: Location, why: str) -> CorruptSegment:
        return CorruptSegment(
            f"{self.path(location.segment)} at offset {location.offset}: {why}; run verify() to "
            "list all damage, delete() what it names, and spill it again"
        )

    # ---- recovery

    def recover(self, start: Position | None) -> Iterator[list[Found]]:
        """Yield the whole batches from ``start`` on (None: all), then cut the torn tail and sync.

        Exhaust it before anything is written. Raises `CorruptSegment` for damage that a crash can't
        have made.
        """
        numbers = [n for n in self.numbers() if start is None or n >= start.segment]
        self.end = start or _START
        for number in numbers:
            last = number == numbers[-1]
            self.end = self._first_position(number, last)
            if start is not None and number == start.segment:
                self.end = start
            while batch := self._batch_here():
                found = batch[-1]
                offset = found.location.offset + found.location.nbytes
                self.end = Position(number, offset, found.header.batch + 1)
                self.recovery.replayed_batches += 1
                yield batch
            self._end_segment(last)

    def _first_position(self, number: int, last: bool) -> Position:
        """Check a segment's own header; a torn one of the last segment is written again."""
        head = bytearray(_FILE.size)
        n = disk.read_into(self._fd(number), [head], 0)
        magic, named, batch, check = _FILE.unpack(head)
        if n == _FILE.size and xxhash.xxh3_64_intdigest(head[:-8]) == check:
            if magic != _FILE_MAGIC:
                raise FormatMismatch(
                    f"{self.path(number)} has format {magic!r}; this version reads {_FILE_MAGIC!r}"
                )
            if named != number:
                raise CorruptSegment(f"{self.path(number)} at offset 0 says it is segment {named}")
            return Position(number, _FILE.size, batch)
        if last and not self._batches_behind(number, 0):
            self.recovery.truncated_bytes += n
            fd = self._fd(number)
            os.ftruncate(fd, 0)
            disk.write_all(fd, [_file_header(number, self.end.batch)], 0)
            disk.fsync(fd)
            return Position(number, _FILE.size, self.end.batch)
        raise CorruptSegment(f"{self.path(number)} at offset 0: the file header is damaged")

    def _batch_here(self) -> list[Found] | None:
        """The batch that begins at ``end``, or None where it isn't whole."""
        number, offset, expected = self.end
        batch: list[Found] = []
        while not batch or len(batch) < batch[0].header.count:
            found = self._record_at(number, offset)
            if found is None or (found.header.ordinal, found.header.batch) != (
                len(batch),
                expected,
            ):
                return None
            batch.append(found)
            offset += found.location.nbytes
        return batch

    def _record_at(self, number: int, offset: int) -> Found | None:
        """The record at ``offset``, checked with bounded memory; None where it isn't whole."""
        fd = self._fd(number)
        head = bytearray(_RECORD.size)
        if disk.read_into(fd, [head], offset) < _RECORD.size:
            return None
        header = Header.parse(head)
        if header is None:
            return None
        location = Location(number, offset, header.meta_nbytes, header.payload_nbytes)
        if offset + location.nbytes > self.size(number):
            return None
        meta = bytearray(header.meta_nbytes)
        disk.read_into(fd, [meta], offset + _RECORD.size)
        body = xxhash.xxh3_64(meta)
        at, end = offset + _RECORD.size + header.meta_nbytes, offset + location.nbytes
        chunk = memoryview(bytearray(min(_CHUNK, max(header.payload_nbytes, 1))))
        while at < end:
            n = disk.read_into(fd, [chunk[: min(len(chunk), end - at)]], at)
            body.update(chunk[:n])
            at += n
        if body.intdigest() != header.body_xxh3:
            return None
        return Found(header, location, bytes(meta))

    def _batches_behind(self, number: int, offset: int) -> set[int]:
        """Batch numbers of the sound record headers that lie anywhere behind ``offset``."""
        found: set[int] = set()
        fd, size = self._fd(number), self.size(number)
        window = bytearray(_CHUNK + _RECORD.size)
        while offset < size:
            n = disk.read_into(fd, [window], offset)
            data = bytes(window[:n])
            at = data.find(_MAGIC)
            while 0 <= at < _CHUNK:
                if at + _RECORD.size <= n and (
                    header := Header.parse(data[at : at + _RECORD.size])
                ):
                    found.add(header.batch)
                at = data.find(_MAGIC, at + 1)
            offset += _CHUNK
        return found

    def _end_segment(self, last: bool) -> None:
        """Deal with what follows ``end``, the last whole batch of a segment."""
        number, offset, expected = self.end
        torn = self.size(number) - offset
        if torn:
            behind = self._batches_behind(number, offset)
            if not last or any(batch > expected for batch in behind):
                raise CorruptSegment(
                    f"{self.path(number)} at offset {offset}: batch {expected} is damaged and "
                    "whole ones follow, so this is no torn tail; put the file back from a copy, "
                    "or delete the store to begin anew"
                )
        if last:
            fd = self._fd(number)
            os.ftruncate(fd, offset)
            # Also without a torn tail: replayed batches may still be in the page cache alone.
            disk.fsync(fd)
            self.recovery.truncated_bytes += torn
            self._sealed = False

    def scan(self, number: int) -> Iterator[Found]:
        """Every record of a recovered segment; `CorruptSegment` at the first damaged one."""
        offset = _FILE.size
        end = self.end.offset if number == self.end.segment else self.size(number)
        while offset < min(end, self.size(number)):
            found = self._record_at(number, offset)
            if found is None:
                raise self._corrupt(Location(number, offset, 0, 0), "the record is damaged")
            yield found
            offset += found.location.nbytes

    def close(self) -> None:
        """Close every file."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def _file_header(number: int, batch: int) -> bytes:
    head = _FILE.pack(_FILE_MAGIC, number, batch, 0)[:-8]
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")


def _runs(wanted: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Cut ``wanted`` into stretches that lie one after the other in a file."""
    run: list[Wanted] = []
    nbytes = buffers = 0
    for item in wanted:
        _, location, views = item
        follows = bool(run) and (
            (run[-1][1].segment, run[-1][1].offset + run[-1][1].nbytes)
            == (location.segment, location.offset)
        )
        full = nbytes + location.nbytes > RUN_BYTES or buffers + len(views) + 1 > disk.MAX_BUFFERS
        if run and (full or not follows):
            yield run
            run, nbytes, buffers = [], 0, 0
        run.append(item)
        nbytes += location.nbytes
        buffers += len(views) + 1
    if run:
        yield run
