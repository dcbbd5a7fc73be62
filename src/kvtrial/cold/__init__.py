"""The cold tier: pages leave memory and come back later, in another process, after a crash.

Two designs compete at equal durability, with a RocksDB index in both: Z1 keeps pages as RocksDB
values, Z2 in append-only segment files. Read `store` first.

=====================  =============================================================================
`store`                the verbs: spill, restore, delete, gc, verify
`values`, `segmented`  Z1 and Z2: where the bytes of a page go
`index`, `rockslog`    the RocksDB index of both; its log files looked over before it opens
                       (``_crc32c``)
`page`, `keys`         a page's bytes and content address; what a session's rows are named by
`prefix`, `sessions`   which pages of a prefix are stored; taking them from a session and giving them back
`records`, `segments`  Z2's files: their form, writing and reading (``_reader.pyx``)
`recovery`             Z2 opened after a crash; `rockslog` looks RocksDB's log over (``_crc32c.pyx``)
`folder`, `disk`       what lies in a folder; reads, writes and syncs, the last counted
`reserve`              room that is held for the day the disk is full
`forks`                what a fork makes of open stores
`ahead`                the next piece of work is done while the last one is used
`reports`, `errors`    what the verbs tell, and what they raise
`upkeep`               ``kvtrial cold``: listed, checked, deleted from, collected
=====================  =============================================================================

Another kind of store: a subclass of `ColdStore` in a module of its own and its line in `KINDS`.
How they are measured and broken is in `kvtrial.measure.cold`.
"""

from __future__ import annotations

from pathlib import Path

from kvtrial.cold.folder import kind_of
from kvtrial.cold.keys import Identity
from kvtrial.cold.reports import SpillReport
from kvtrial.cold.segmented import SegmentStore
from kvtrial.cold.store import ColdStore
from kvtrial.cold.values import ValueStore
from kvtrial.contract import InvalidArgument
from kvtrial.contract.arguments import shown

__all__ = ["KINDS", "ColdStore", "Identity", "SpillReport", "open_cold"]

KINDS: dict[str, type[ColdStore]] = {"Z1": ValueStore, "Z2": SegmentStore}


def open_cold(kind: str | None, path: Path | str, identity: Identity | None = None) -> ColdStore:
    """Open the store in the folder ``path``, or begin one there.

    Parameters
    ----------
    kind : {"Z1", "Z2"} or None
        None is what lies there, Z2 where nothing does.
    path : Path
        A folder of its own.
    identity : Identity, optional
        Whose pages are spilled and restored; `Identity.of` makes it from a hot store. Not needed to
        look after a store: ``catalogue``, ``delete`` by key, ``gc``, ``verify``.

    Raises
    ------
    InvalidArgument, StoreLocked, ForeignStore, FormatMismatch, NotWritable, CorruptSegment,
    CorruptIndex, Unreadable, DiskFull, TooManyFiles, ForkedProcess
    """
    path = _folder(path)
    if identity is not None and not isinstance(identity, Identity):
        raise InvalidArgument(
            f"identity is {shown(identity)}; give what Identity.of(store, ...) makes"
        )
    if kind is None:
        kind = kind_of(path) or "Z2"
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidArgument(f"no cold store {shown(kind)}; known: {', '.join(KINDS)}")
    return KINDS[kind](path, identity)


def _folder(path: Path | str) -> Path:
    """`InvalidArgument` for what can't name a folder, to RocksDB too: it takes UTF-8."""
    try:
        folder = Path(path)
        named = bool(folder.name) and "\0" not in str(folder)
        str(folder).encode("utf-8")
    except (TypeError, UnicodeEncodeError):
        named = False
    if not named:
        raise InvalidArgument(
            f"path is {shown(path)}; give a folder of its own, with a name in UTF-8"
        )
    return folder
