"""The form of a segment file: a file header, then framed records, little-endian, without gaps.

::

    file header   magic 8s · segment u64 · first batch u64 · id u64 · XXH3-64 of these
    record        magic 4s · kind u32 · ordinal u32 · count u32 · batch u64 · meta bytes u32 ·
                  pages u32 · payload bytes u64 · key 32s · XXH3-64 of meta and sums ·
                  XXH3-64 of this header
                  then meta, then a sum (XXH3-64) for each page, then the pages, all of one size

``id`` is drawn by chance for each file, so that nothing said of one is ever believed of another. A
batch is ``count`` records of one batch number; batches count on by one. Every byte is under one of
the sums, and each page has its own, so that a reader checks it while it still is in cache.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvtrial.cold.disk import Buffer
from kvtrial.cold.errors import FormatMismatch

PAGE, SEQUENCE, DELETE = 1, 2, 3

MAGIC = b"KVR2"
_FILE_MAGIC = b"KVTSEG\x00\x03"
_FILE = struct.Struct("<8sQQQQ")
_RECORD = struct.Struct("<4sIIIQIIQ32sQQ")
_LOCATION = struct.Struct("<IQIIQ")
_SUM = 8

FILE_HEADER_BYTES = _FILE.size
HEADER_BYTES = _RECORD.size


def checksum(data: Buffer) -> int:
    """XXH3-64."""
    return xxhash.xxh3_64_intdigest(data)


def _sealed(data: bytes) -> bytes:
    """``data``, a packed struct, with its last field set to the sum of the others."""
    covered = data[:-_SUM]
    return covered + checksum(covered).to_bytes(_SUM, "little")


# --------------------------------------------------------------------------------------------------
# The file's header


class FileHeader(NamedTuple):
    """What a segment file says of itself."""

    segment: int
    first_batch: int
    file_id: int

    @classmethod
    def new(cls, segment: int, first_batch: int) -> FileHeader:
        """That of a file that begins now."""
        return cls(segment, first_batch, int.from_bytes(os.urandom(8), "little"))

    def encode(self) -> bytes:
        """As it is written."""
        return _sealed(_FILE.pack(_FILE_MAGIC, *self, 0))

    @classmethod
    def parse(cls, data: Buffer, name: str) -> FileHeader | None:
        """None where the sum is wrong; `FormatMismatch` where another version wrote the file."""
        magic, *fields, check = _FILE.unpack(data)
        if checksum(memoryview(data)[:-_SUM]) != check:
            return None
        if magic != _FILE_MAGIC:
            raise FormatMismatch(
                f"{name} has format {magic!r}; this version reads {_FILE_MAGIC!r}: use the version "
                "that wrote it, or another folder"
            )
        return cls(*fields)


# --------------------------------------------------------------------------------------------------
# Records


class Location(NamedTuple):
    """Where a record lies; as it is stored in the index."""

    segment: int
    offset: int
    meta_nbytes: int
    pages: int
    payload_nbytes: int

    @property
    def head_nbytes(self) -> int:
        """Bytes before the pages: header, meta and sums."""
        return HEADER_BYTES + self.meta_nbytes + _SUM * self.pages

    @property
    def nbytes(self) -> int:
        """Bytes of the whole record."""
        return self.head_nbytes + self.payload_nbytes

    def encode(self) -> bytes:
        """28 bytes, little-endian."""
        return _LOCATION.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> Location:
        """Inverse of `encode`."""
        return cls(*_LOCATION.unpack(data))

    def split(self, payload: memoryview) -> list[memoryview]:
        """Views of the pages in a buffer of ``payload_nbytes``."""
        step = self.payload_nbytes // self.pages if self.pages else 1
        return [payload[at : at + step] for at in range(0, self.payload_nbytes, step)]


@dataclass(frozen=True)
class Record:
    """One entry of a batch; its pages are of one size."""

    kind: int
    key: bytes
    meta: bytes
    pages: Sequence[Buffer] = ()

    def location(self, segment: int, offset: int) -> Location:
        """Where it lies once it is written at ``offset``."""
        page_nbytes = memoryview(self.pages[0]).nbytes if self.pages else 0
        count = len(self.pages)
        return Location(segment, offset, len(self.meta), count, count * page_nbytes)

    def frame(self, ordinal: int, count: int, batch: int) -> list[Buffer]:
        """What is written, as record ``ordinal`` of the ``count`` of a batch."""
        at = self.location(0, 0)
        sums = b"".join(checksum(page).to_bytes(_SUM, "little") for page in self.pages)
        header = _sealed(
            _RECORD.pack(
                MAGIC, self.kind, ordinal, count, batch, at.meta_nbytes, at.pages,
                at.payload_nbytes, self.key, checksum(self.meta + sums), 0,
            )
        )  # fmt: skip
        return [header + self.meta + sums, *self.pages]


class Header(NamedTuple):
    """A record's header, checked; ``records`` is the count of its batch's."""

    kind: int
    ordinal: int
    records: int
    batch: int
    meta_nbytes: int
    pages: int
    payload_nbytes: int
    key: bytes
    head_sum: int

    @classmethod
    def parse(cls, data: Buffer) -> Header | None:
        """None where magic or sum is wrong, or pages and bytes don't fit: nothing of it may be believed
        then."""
        magic, *fields, check = _RECORD.unpack_from(data)
        if magic != MAGIC or checksum(memoryview(data)[: HEADER_BYTES - _SUM]) != check:
            return None
        header = cls(*fields)
        # Pages are of one size, and none is empty.
        fits = (
            divmod(header.payload_nbytes, header.pages)
            if header.pages
            else (1, header.payload_nbytes)
        )
        return header if fits[0] > 0 and fits[1] == 0 else None

    def location(self, segment: int, offset: int) -> Location:
        """Where the record lies whose header this is."""
        return Location(segment, offset, self.meta_nbytes, self.pages, self.payload_nbytes)

    def meta_of(self, head: Buffer) -> bytes | None:
        """The meta of a head (header, meta, sums); None where meta or sums are damaged."""
        body = memoryview(head)[HEADER_BYTES:]
        if checksum(body) != self.head_sum:
            return None
        return bytes(body[: self.meta_nbytes])


def page_sums(head: Buffer, pages: int) -> list[int]:
    """The pages' sums in a head."""
    return list(struct.unpack(f"<{pages}Q", memoryview(head)[len(head) - _SUM * pages :]))
