"""RocksDB's own log files looked over before it opens them: what a crash tore, and what is damaged.

RocksDB forgives a last entry that the file's end cuts short. One whose blocks reached the disk in another
order is as long as it should be, and keeps it from opening; an entry whose header is zeros ends its reading,
whatever was acknowledged behind it; and some damage to its manifest it reads round and round. So the rule of
the segments is applied here too: what follows the last whole entry was never acknowledged and is cut off,
unless an entry begins behind it.

A log is blocks of 32 KiB, filled with fragments that don't cross them: masked CRC32C u32 · bytes u16 · type
u8, then the bytes. An entry is one FULL fragment, or FIRST, MIDDLE…, LAST.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from kvtrial.cold import disk
from kvtrial.cold._crc32c import crc32c
from kvtrial.cold.errors import CorruptIndex, of_disk

BLOCK_BYTES = 32 << 10
_HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
_MASK_DELTA = 0xA282EAD8
_NAME_BYTES = 256
_TYPE_AT = 6  # bytes from a fragment's beginning
_BEGINNING = re.compile(rb"[\x01\x02]")  # a type: FULL or FIRST


class Fragment(NamedTuple):
    """A sound fragment: its type and where it ends."""

    kind: int
    end: int


def fragment_at(data: memoryview, at: int) -> Fragment | None:
    """The fragment there; None where none is, or its sum is wrong."""
    left = min(BLOCK_BYTES - at % BLOCK_BYTES, len(data) - at)
    if left < _HEADER.size:
        return None
    masked, nbytes, kind = _HEADER.unpack_from(data, at)
    if not FULL <= kind <= LAST or nbytes > left - _HEADER.size:
        return None
    end = at + _HEADER.size + nbytes
    crc = crc32c(data[at + _TYPE_AT : end])
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return Fragment(kind, end) if (rotated + _MASK_DELTA) & 0xFFFFFFFF == masked else None


def whole_until(data: memoryview) -> int:
    """Where the last whole entry ends before the first that isn't one."""
    at = end = 0
    inside = False
    while at < len(data):
        if (
            BLOCK_BYTES - at % BLOCK_BYTES < _HEADER.size
        ):  # the rest of a block that no header fits in
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        fragment = fragment_at(data, at)
        if fragment is None or (fragment.kind in (MIDDLE, LAST)) != inside:
            return end
        at, inside = fragment.end, fragment.kind in (FIRST, MIDDLE)
        if not inside:
            end = at
    return end


def begins_behind(data: memoryview, at: int) -> int | None:
    """Where a sound entry begins behind ``at``; None where none does."""
    for beginning in _BEGINNING.finditer(data, at + 1 + _TYPE_AT):
        if fragment_at(data, beginning.start() - _TYPE_AT) is not None:
            return beginning.start() - _TYPE_AT
    return None


def _newest(folder: Path, suffix: str) -> Path | None:
    """The file of the highest number; RocksDB leaves others alone."""
    numbers = {
        int(stem): name
        for name in disk.names(folder)
        if name.endswith(suffix) and (stem := name.removesuffix(suffix)).isdecimal()
    }
    return folder / numbers[max(numbers)] if numbers else None


def _read(path: Path) -> memoryview:
    try:
        return memoryview(path.read_bytes())
    except MemoryError:
        raise CorruptIndex(
            f"{path} has {path.stat().st_size} bytes, which don't fit into memory; put the file back from a "
            "copy, or delete the store to begin anew"
        ) from None
    except OSError as error:
        raise of_disk(error, path, "read") from error


def cut_torn_tail(folder: Path) -> int:
    """Cut what was never acknowledged from the newest log; how many bytes that were.

    Raises
    ------
    CorruptIndex
        An entry stands behind the damage, so what is damaged was acknowledged.
    """
    path = _newest(folder, ".log")
    data = memoryview(b"") if path is None else _read(path)
    end = whole_until(data)
    if path is None or end == len(data):
        return 0
    behind = begins_behind(data, end)
    if behind is not None:
        raise CorruptIndex(
            f"{path} at offset {end}: an entry is damaged and a whole one follows at {behind}, so this is "
            "no torn tail; put the file back from a copy, or delete the store to begin anew"
        )
    torn = len(data) - end
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            disk.truncate(fd, end)
        finally:
            os.close(fd)
    except OSError as error:
        raise of_disk(error, path, "cut") from error
    return torn


def refuse_damaged_manifest(folder: Path, advice: str) -> None:
    """`CorruptIndex` where a fragment of the manifest isn't what was written; RocksDB may read such a file
    for ever. One that the file's end cuts short is RocksDB's to forgive."""
    if "CURRENT" not in disk.names(folder):
        return
    try:
        current = disk.read_short(folder / "CURRENT", _NAME_BYTES)
        if len(current) == _NAME_BYTES:  # RocksDB would take all of it into memory
            raise CorruptIndex(f"{folder / 'CURRENT'} is longer than a name; {advice}")
        path = folder / current.decode("utf-8", "replace").strip()
        if not path.is_file():
            return  # RocksDB names it
    except ValueError:
        return  # and a name that can't be one
    except OSError as error:
        raise of_disk(error, folder / "CURRENT", "read") from error
    data = _read(path)
    end = whole_until(data)
    sound = end == len(data) or not any(data[end:]) or _cut_short(data, end)
    if not sound or begins_behind(data, end) is not None:
        raise CorruptIndex(f"{path} at offset {end}: an entry is damaged; {advice}")


def _cut_short(data: memoryview, at: int) -> bool:
    """Whether sound fragments lead from a place to one that reaches past the end."""
    while (fragment := fragment_at(data, at)) is not None:
        at = fragment.end
    left = len(data) - at
    if left < _HEADER.size:
        return True
    _, nbytes, kind = _HEADER.unpack_from(data, at)
    room = BLOCK_BYTES - at % BLOCK_BYTES - _HEADER.size
    return FULL <= kind <= LAST and left - _HEADER.size < nbytes <= room
