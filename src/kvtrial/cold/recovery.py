"""What opening does with segment files: yield the whole batches, cut the torn tail, sync.

A batch is not begun before the one before it was synced. So what follows the last whole batch of the
last segment was never acknowledged, and is cut off - unless a record of a *later* batch stands behind
it, which proves that it was whole once: that is `CorruptSegment`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from kvtrial.cold import disk
from kvtrial.cold.errors import CorruptSegment
from kvtrial.cold.records import FILE_HEADER_BYTES, HEADER_BYTES, MAGIC, FileHeader, Header
from kvtrial.cold.segments import START, Position, ScannedRecord, SegmentLog

_WINDOW = 1 << 20
#: A record's magic and kind.
_BEGINNING = re.compile(re.escape(MAGIC) + rb"[\x01-\x03]\0\0\0")


def recover(log: SegmentLog, start: Position | None) -> Iterator[list[ScannedRecord]]:
    """Yield the whole batches from ``start`` on (None: all), then cut the torn tail and sync.

    Exhaust it before anything is written. Raises `CorruptSegment` for damage that a crash can't have
    made, and `Unreadable` where the disk gives an error: what can't be read is never cut off.
    """
    numbers = [n for n in log.numbers() if start is None or n >= start.segment]
    log.end = start or START
    for number in numbers:
        last = number == numbers[-1]
        header = log.header(number)
        if start is not None and number == start.segment:
            log.end = start  # known to be whole up to there, whatever its header has come to
        else:
            log.end = _first_position(log, number, header, last)
        while batch := _batch_at(log, log.end):
            newest = batch[-1]
            offset = newest.location.offset + newest.location.nbytes
            log.end = log.end._replace(offset=offset, batch=newest.header.batch + 1)
            log.recovered.replayed_batches += 1
            yield batch
        _end_segment(log, last)


def _first_position(
    log: SegmentLog, number: int, header: FileHeader | None, last: bool
) -> Position:
    """Check a segment's own header; a torn one of the last segment is written again."""
    file = log.file(number)
    if header is not None:
        if header.segment != number:
            raise CorruptSegment(f"{file.path} at offset 0 says it is segment {header.segment}")
        return Position(number, FILE_HEADER_BYTES, header.first_batch, header.file_id)
    first = Position(number, FILE_HEADER_BYTES, log.end.batch, 0)
    if last and not _later_behind(log, first) and _batch_at(log, first) is None:
        log.recovered.truncated_bytes += log.size(number)
        header = FileHeader.new(number, log.end.batch)
        os.ftruncate(file.fd, 0)
        disk.write_all(file.fd, [header.encode()], 0)
        return first._replace(file_id=header.file_id)
    raise CorruptSegment(f"{file.path} at offset 0: the file header is damaged")


def _batch_at(log: SegmentLog, at: Position) -> list[ScannedRecord] | None:
    """The batch that begins there, or None where it isn't whole."""
    batch: list[ScannedRecord] = []
    offset = at.offset
    while not batch or len(batch) < batch[0].header.records:
        record = log.record_at(at.segment, offset)
        if record is None or (record.header.ordinal, record.header.batch) != (len(batch), at.batch):
            return None
        batch.append(record)
        offset += record.location.nbytes
    return batch


def _later_behind(log: SegmentLog, at: Position) -> bool:
    """Whether a sound record header of a later batch lies anywhere behind a place."""
    size, offset = log.size(at.segment), at.offset
    window = bytearray(_WINDOW + HEADER_BYTES)
    while offset < size:
        n = log.read_raw(at.segment, window, offset)
        for beginning in _BEGINNING.finditer(window, 0, n):
            header = window[beginning.start() : beginning.start() + HEADER_BYTES]
            sound = Header.parse(header) if len(header) == HEADER_BYTES else None
            if sound is not None and sound.batch > at.batch:
                return True
        offset = disk.next_data(log.file(at.segment).fd, offset + _WINDOW)
    return False


def _end_segment(log: SegmentLog, last: bool) -> None:
    """Deal with what follows ``log.end``, the last whole batch of a segment."""
    file, (number, offset, expected, _) = log.file(log.end.segment), log.end
    torn = log.size(number) - offset
    if torn and (not last or _later_behind(log, log.end)):
        raise CorruptSegment(
            f"{file.path} at offset {offset}: batch {expected} is damaged and whole ones follow, so "
            "this is no torn tail; put the file back from a copy, or delete the store to begin anew"
        )
    if last:
        os.ftruncate(file.fd, offset)
        # Also without a torn tail: replayed batches may still be in the page cache alone. So may the
        # file's name, where its maker was killed before he synced it.
        disk.fsync(file.fd)
        disk.fsync_dir(log.folder)
        log.recovered.truncated_bytes += torn
        log.sealed = False
