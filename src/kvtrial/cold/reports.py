"""What the cold stores' verbs tell: of a spill, a restore, the catalogue, and damage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class SpillReport:
    """What a spill did. Counts of pages are over all layers of one page index; sizes in bytes."""

    rows: int
    pages_written: int
    pages_shared: int
    payload_bytes: int
    batches: int


@dataclass(frozen=True)
class RestoreTimes:
    """Where a restore's time went, nanoseconds; reading and checking are summed over its threads.

    Attributes
    ----------
    lookup_ns : int
        Keys hashed, pages found in the index and compared with what was asked for.
    read_ns : int
        Reading the pages: system calls, or RocksDB and its binding.
    check_ns : int
        Checksums, and pages moved to their places in the same pass; 0 where RocksDB checks as it reads.
    import_ns : int
        The rest: pages taken from the pool, copied into where the binding needs it, made valid.
    """

    lookup_ns: int
    read_ns: int
    check_ns: int
    import_ns: int


class Entry(NamedTuple):
    """A line of the catalogue; `ColdStore.delete` takes ``key``. ``created``: seconds since the epoch."""

    key: str
    rows: int
    pages: int
    created: float


class Damage(NamedTuple):
    """A page that `ColdStore.verify` found damaged: its key, what is wrong, and the catalogue's keys of
    the sequences that need it. Without one, `ColdStore.gc` takes it.

    Without a key it is no page: ``what`` names a place in a file of Z2 that the index makes up for."""

    key: str
    what: str
    sequences: tuple[str, ...]
