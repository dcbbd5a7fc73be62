"""The cold store's verbs, and the prefix logic that Z1 and Z2 share.

=============  ==========================================================================
``spill``      store a session's pages; what another sequence stored already is shared
``restore``    fill an empty session with the longest stored prefix, whole pages
``contains``   rows of that prefix
``catalogue``  the spilled sequences
``delete``     forget one; pages that others share stay
``gc``         give the space of forgotten pages back
``verify``     read everything and name what is damaged
=============  ==========================================================================

A spilled sequence is a *snapshot*: a list of page keys. Reference counts are not stored: a page is
referenced as often as snapshots name it. Pages of a spill that was cut short belong to no snapshot;
they are served like any other (each is whole) until ``gc`` takes them.

Durability, the same in both stores: a batch is acknowledged (``progress`` is called, or ``spill``
returns) after one fsync that makes all of it durable, and becomes visible only then. A batch is
recovered whole or not at all.

One process opens a store at a time. Calls of its threads take turns, but for the reading itself: a
restore that has found its pages goes on beside others and beside ``gc``, which lets others in between
its steps.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtrial import machine
from kvtrial.cold import disk, folder, keys
from kvtrial.cold.ahead import ahead
from kvtrial.cold.errors import (
    ColdError,
    CorruptSegment,
    IdentityMismatch,
    KeyCollision,
    StoreClosed,
    StorePoisoned,
)
from kvtrial.cold.index import Index, Snapshot
from kvtrial.cold.keys import Identity, PageKey
from kvtrial.cold.page import Page, PageMeta, content_address, flat
from kvtrial.cold.reports import Entry, Fault, RestoreTimes, SpillReport
from kvtrial.contract import I64, Bool, InvalidArgument, KVSession, StepIncomplete

#: One thread alone is bound by the kernel's copy and then by its own checksums; two overlap them.
READ_THREADS = 2
#: Pages that are looked up together; a prefix that ends early costs one such step.
_LOOKUP_PAGES = 256


class Stored(NamedTuple):
    """A page of a prefix that is stored."""

    page: PageKey
    meta: PageMeta


Progress = Callable[[int, int], None]
#: Fills each stored page's views from disk, checked, with so many threads; nanoseconds of reading and
#: of checking.
Reader = Callable[[Sequence[list[memoryview]], int], tuple[int, int]]


class ColdStore(ABC):
    """What Z1 and Z2 have in common; open one with `kvtrial.cold.open_cold`.

    Parameters
    ----------
    path : Path
        The store's folder; made where it is missing. An existing one must be a store of this kind.
    identity : Identity
        Whose pages are spilled and restored. One folder may hold those of many.

    Raises
    ------
    StoreLocked, ForeignStore, FormatMismatch, NotWritable, CorruptSegment, CorruptIndex, OSError
    """

    kind: str

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.identity = identity
        #: Of the last restore that found something.
        self.times: RestoreTimes | None = None
        self._mutex = threading.RLock()
        self._collecting = threading.Lock()
        self._poison: str | None = None
        self._closed = False
        self._lock_fd = folder.claim(path, self.kind)
        try:
            self._open()
        except BaseException:
            os.close(self._lock_fd)
            raise

    # ---- what a kind of store adds

    _index: Index

    @abstractmethod
    def _open(self) -> None:
        """Open files and recover; must release what it took when it raises."""

    @abstractmethod
    def _write(self, pages: Sequence[Page], snapshot: Snapshot | None) -> None:
        """Make one batch durable (one fsync), then visible."""

    @abstractmethod
    def _reader(self, stored: Sequence[Stored]) -> Reader:
        """Take hold of the pages, so that they can be read later, whatever is deleted until then."""

    @abstractmethod
    def _drop(self, snapshot: Snapshot | None, page_keys: Sequence[bytes]) -> None:
        """Forget a snapshot and pages, durably."""

    @abstractmethod
    def _reclaim(self) -> None:
        """Give back the space of what was dropped; takes the lock itself, step by step."""

    @abstractmethod
    def _close(self) -> None:
        """Release files."""

    # ---- verbs

    def spill(
        self,
        session: KVSession,
        token_ids: Any,
        *,
        batch_pages: int = 8,
        progress: Progress | None = None,
    ) -> SpillReport:
        """Store a session's rows under its tokens.

        Parameters
        ----------
        session : KVSession
            At a step boundary.
        token_ids : int (n,)
            The tokens of all its positions from 0 on.
        batch_pages : int
            Page indexes per batch; each batch costs one fsync.
        progress : callable(pages done, pages to write), optional
            Called after each acknowledged batch.

        Raises
        ------
        IdentityMismatch, InvalidArgument, StepIncomplete, DiskFull, StorePoisoned, KeyCollision
        """
        tokens = keys.as_tokens(token_ids)
        if batch_pages < 1:
            raise InvalidArgument(f"batch_pages is {batch_pages}; it must be at least 1")
        with self._using():
            self._refuse_other(session)
            valid = _validity(session, self.identity, len(tokens))
            chain = list(keys.chain(self.identity, tokens))
            present = {stored.page.key: stored.meta for stored in self._lookup(chain)}
            missing = [i for i, page in enumerate(chain) if page.key not in present]
            self._refuse_other_holes(chain, present, valid)
            snapshot = Snapshot(valid.shape[1], time.time(), tuple(page.key for page in chain))
            known = self._index.get("snapshots", snapshot.key) is not None
            batches = [
                missing[start : start + batch_pages]
                for start in range(0, max(len(missing), not known), batch_pages)
            ]
            payload_bytes = 0

            def take(batch: list[int]) -> list[Page]:
                return [self._take(session, i, chain[i], valid) for i in batch]

            with ahead(take, batches) as taken:
                for n, pages in enumerate(taken, start=1):
                    last = n == len(batches)
                    self._poisoning(self._write, pages, snapshot if last else None)
                    payload_bytes += sum(page.meta.payload_nbytes for page in pages)
                    if progress is not None:
                        progress(min(n * batch_pages, len(missing)), len(missing))
        return SpillReport(
            valid.shape[1], len(missing), len(chain) - len(missing), payload_bytes, len(batches)
        )

    def restore(self, token_ids: Any, session: KVSession) -> int:
        """Fill an empty session with the longest stored prefix of ``token_ids``.

        Returns
        -------
        int
            Rows restored; with 0 the session is untouched.

        Raises
        ------
        IdentityMismatch, PoolExhausted, HoleNotAllowed, CorruptSegment
            The session is as it was before.
        """
        begun = time.perf_counter_ns()
        tokens = keys.as_tokens(token_ids)
        with self._using():
            self._refuse_other(session)
            stored = self._prefix(tokens)
            if not stored:
                return 0
            read = self._reader(stored)
        found = time.perf_counter_ns()
        valid = np.concatenate([meta.valid for _, meta in stored], axis=1)
        views = session.begin_restore(valid)
        try:
            columns = [
                [view for layer in views if (view := layer[i]) is not None]
                for i in range(len(stored))
            ]
            threads = min(machine.usable_cpus(), max(READ_THREADS, session.store.spec.threads))
            read_ns, check_ns = read(columns, threads)
        except BaseException:
            session.cancel_restore()
            raise
        session.finish_restore()
        rest = time.perf_counter_ns() - found - (read_ns + check_ns) // threads
        self.times = RestoreTimes(found - begun, read_ns, check_ns, max(rest, 0))
        return int(valid.shape[1])

    def contains(self, token_ids: Any) -> int:
        """Rows that `restore` would give."""
        tokens = keys.as_tokens(token_ids)
        with self._using():
            return sum(len(page.tokens) for page, _ in self._prefix(tokens))

    def catalogue(self) -> list[Entry]:
        """The spilled sequences of all identities, newest first."""
        with self._using():
            snapshots = sorted(self._snapshots(), key=lambda s: -s.created)
            return [Entry(s.key.hex(), s.rows, len(s.page_keys), s.created) for s in snapshots]

    def delete(self, token_ids: Any) -> bool:
        """Forget the sequence spilled under exactly ``token_ids``; False where there is none.

        Pages that another snapshot names stay. The space comes back with `gc`.
        """
        last = deque(keys.chain(self.identity, keys.as_tokens(token_ids)), maxlen=1)
        with self._using():
            data = self._index.get("snapshots", last[0].key) if last else None
            if data is None:
                return False
            snapshot = Snapshot.decode(data)
            kept = {k for s in self._snapshots() if s.key != snapshot.key for k in s.page_keys}
            unshared = [k for k in snapshot.page_keys if k not in kept]
            self._poisoning(self._drop, snapshot, unshared)
            return True

    def gc(self) -> int:
        """Drop pages of interrupted spills and give back space.

        Returns the bytes by which the files shrank; below zero where RocksDB's log had to be
        written out first, or where others spilled meanwhile.
        """
        with self._collecting:
            before = self.disk_bytes()
            with self._using():
                kept = {k for s in self._snapshots() for k in s.page_keys}
                orphans = [k for k, _ in self._index.items("prefix") if k not in kept]
                if orphans:
                    self._poisoning(self._drop, None, orphans)
            self._reclaim()
            return before - self.disk_bytes()

    def verify(self) -> list[Fault]:
        """Read every page and compare it with its content address; an empty list is sound."""
        faults = []
        with self._using():
            for key, data in self._index.items("prefix"):
                try:
                    meta = PageMeta.decode(data)
                    buffer = bytearray(meta.payload_nbytes)
                    page = PageKey(key, meta.parent, meta.tokens)
                    self._reader([Stored(page, meta)])([meta.split(memoryview(buffer))], 1)
                    if content_address([buffer]) != meta.address:
                        raise CorruptSegment("the content is not what its address says")
                except ColdError as error:
                    faults.append(Fault(key.hex(), str(error)))
            for snapshot in self._snapshots():
                found = self._index.get_many("prefix", snapshot.page_keys)
                faults += [
                    Fault(key.hex(), f"page of snapshot {snapshot.key.hex()[:16]} is missing")
                    for key, data in zip(snapshot.page_keys, found)
                    if data is None
                ]
        return faults

    def disk_bytes(self) -> int:
        """Bytes of the store's files."""
        return _size(self.path.rglob("*"))

    def index_bytes(self) -> int:
        """Bytes of the RocksDB folder without the blob files that hold Z1's pages."""
        return _size(p for p in self._index.path.rglob("*") if p.suffix != ".blob")

    @property
    def syncs(self) -> int:
        """Syncs so far, to be compared before and after: ours in this process and RocksDB's."""
        return disk.counters.fsyncs + self._index.syncs

    @property
    def rocksdb_get_us(self) -> int:
        """Microseconds that RocksDB itself spent in gets since the store was opened."""
        return self._index.get_us

    def close(self) -> None:
        """Release files and the lock. A second close does nothing."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                self._close()
            except ColdError:
                # A poisoned store has said so already; what it acknowledged is on the disk.
                if self._poison is None:
                    raise
            finally:
                os.close(self._lock_fd)

    def __enter__(self) -> ColdStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- shared parts

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._mutex:
            if self._closed:
                raise StoreClosed(f"{self.path} is closed; open it again with open_cold")
            if self._poison is not None:
                raise StorePoisoned(
                    f"{self.path}: {self._poison}; close and reopen it: what was acknowledged is "
                    "there"
                )
            yield

    def _poisoning(self, write: Callable[..., None], *args: Any) -> None:
        """Run something that writes; whatever leaves the disk's state unknown poisons the store."""
        try:
            write(*args)
        except ColdError as error:
            if self._uncertain(error):
                self._poison = str(error)
            raise

    def _uncertain(self, error: ColdError) -> bool:
        return isinstance(error, StorePoisoned)

    def _refuse_other(self, session: KVSession) -> None:
        theirs = Identity.of(
            session.store,
            model_sha256=self.identity.model_sha256,
            rope_base=self.identity.rope_base,
        )
        for name in ("page_format", "page_tokens", "layers", "kv_heads", "head_dim",
                     "base_position", "kv_head_range"):  # fmt: skip
            ours, given = getattr(self.identity, name), getattr(theirs, name)
            if ours != given:
                raise IdentityMismatch(
                    f"the session's {name} is {given!r}, the cold store was opened for {ours!r}; "
                    "open it with Identity.of(session.store, ...)"
                )

    @staticmethod
    def _refuse_other_holes(
        chain: Sequence[PageKey], present: dict[bytes, PageMeta], valid: Bool
    ) -> None:
        start = 0
        for i, page in enumerate(chain):
            stop = start + len(page.tokens)
            meta = present.get(page.key)
            if meta is not None and not np.array_equal(meta.valid, valid[:, start:stop]):
                raise KeyCollision(
                    f"page {i} of these tokens is stored with other holes; delete the sequence "
                    "that holds it, then spill again"
                )
            start = stop

    def _lookup(self, chain: Sequence[PageKey]) -> list[Stored]:
        """Those pages of a chain that are stored, each compared with what it is asked for."""
        found = []
        for page, data in zip(chain, self._index.get_many("prefix", [p.key for p in chain])):
            if data is None:
                continue
            meta = PageMeta.decode(data)
            if meta.parent != page.parent or meta.tokens.tobytes() != page.tokens.tobytes():
                raise KeyCollision(
                    f"key {page.key.hex()[:16]} holds another page's tokens; the stored page is "
                    "neither served nor replaced"
                )
            found.append(Stored(page, meta))
        return found

    def _prefix(self, tokens: I64) -> list[Stored]:
        """The longest stored prefix: whole pages, then the longest partial page that follows."""
        chain = keys.chain(self.identity, tokens)
        stored: list[Stored] = []
        after: PageKey | None = None  # the first page that isn't stored
        while after is None and (step := list(islice(chain, _LOOKUP_PAGES))):
            found = self._lookup(step)
            whole = sum(want.key == have.page.key for want, have in zip(step, found))
            stored += found[:whole]
            after = step[whole] if whole < len(step) else None
        if after is None:
            return stored
        tails = [
            PageKey(keys.next_key(after.parent, part), after.parent, part)
            for n in range(min(len(after.tokens), self.identity.page_tokens - 1), 0, -1)
            if (part := after.tokens[:n]) is not None
        ]
        return stored + self._lookup(tails)[:1]

    def _take(self, session: KVSession, index: int, page: PageKey, valid: Bool) -> Page:
        """One page index of a session, all layers, without a copy."""
        p = self.identity.page_tokens
        part = valid[:, index * p : index * p + len(page.tokens)]
        payload: list[disk.Buffer] = []
        for layer in np.flatnonzero(part.any(axis=1)):
            view = session.page_bytes(int(layer), index)
            if view is None:
                raise InvalidArgument(f"layer {layer} has valid rows in page {index} but no page")
            payload.append(flat(view))
        page_nbytes = session.store.page_nbytes
        meta = PageMeta(page.parent, content_address(payload), page.tokens, part, page_nbytes)
        return Page(page.key, meta, payload)

    def _snapshots(self) -> Iterator[Snapshot]:
        for _, data in self._index.items("snapshots"):
            yield Snapshot.decode(data)


def _size(paths: Iterable[Path]) -> int:
    """Bytes of those that are files; some may go while they are counted."""
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _validity(session: KVSession, identity: Identity, n_tokens: int) -> Bool:
    """bool (L, rows) of a session, where each layer's bitmap ends at its last valid row."""
    base = identity.base_position
    layers = [session.valid(layer) for layer in range(identity.layers)]
    rows = max(len(v) for v in layers)
    if not session.position_holes_allowed and any(len(v) != rows for v in layers):
        raise StepIncomplete(
            f"the layers hold {sorted({len(v) for v in layers})} rows; finish or abandon the step, "
            "then spill"
        )
    # Holes at the end shorten a session's length, so with holes there may be more tokens than rows.
    fits = n_tokens - base >= rows if session.position_holes_allowed else n_tokens - base == rows
    if not fits or n_tokens <= base:
        raise InvalidArgument(
            f"token_ids has {n_tokens} ids, the session {base + rows} positions; give the token of "
            "every position, and at least one row"
        )
    valid = np.zeros((identity.layers, n_tokens - base), bool)
    for layer, bits in enumerate(layers):
        valid[layer, : len(bits)] = bits
    return valid
