"""The cold store's verbs, and the prefix logic that Z1 and Z2 share.

=============  ==========================================================================
``spill``      store a session's pages; what another sequence stored already is shared
``restore``    fill an empty session with the longest stored prefix, whole pages
``contains``   rows of that prefix
``catalogue``  the spilled sequences
``delete``     forget one, by its tokens or its key; pages that others share stay
``gc``         give the space of forgotten pages back
``verify``     read everything, and name what is damaged and who needs it
=============  ==========================================================================

A spilled sequence is a *snapshot*: a list of page keys. Reference counts are not stored: a page is
referenced as often as snapshots name it. Pages of a spill that was cut short belong to no snapshot;
they are served like any other (each is whole) until ``gc`` takes them.

Durability, the same in both stores: a batch is acknowledged (``progress`` is called, or ``spill``
returns) after one fsync that makes all of it durable, and becomes visible only then. A batch is
recovered whole or not at all.

One process opens a store at a time, and a fork of it is another process. Calls of its threads take turns,
but for the reading itself: a restore that has found its pages goes on beside others. ``gc`` and ``verify``
let others in between their steps. There is one lock to wait for, so no two can be taken in two orders: a
``gc`` that finds another under way leaves the work to it.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvtrial.cold import disk, folder, forks, keys
from kvtrial.cold.ahead import ahead
from kvtrial.cold.errors import (
    ColdError,
    CorruptIndex,
    DiskFull,
    StoreClosed,
    StorePoisoned,
    of_disk,
)
from kvtrial.cold.index import Index, SpilledSequence
from kvtrial.cold.keys import Identity, PageKey
from kvtrial.cold.page import Page, PageMeta, content_address, valid_rows
from kvtrial.cold.prefix import Stored, longest, refuse_other_holes, stored
from kvtrial.cold.reports import Damage, Entry, RestoreTimes, SpillReport
from kvtrial.cold.reserve import Reserve, index_bytes
from kvtrial.cold.sessions import refuse_other, take, validity
from kvtrial.contract import InvalidArgument, KVSession
from kvtrial.contract.arguments import callback, integer

#: Called with what is done and what there is to do.
Progress = Callable[[int, int], None]
#: Page indexes that a restore reads between two words of its progress: a tenth of a second, about.
RESTORE_PAGES = 64
#: Fills each stored page's views from disk, checked, with so many threads; nanoseconds of reading and
#: of checking.
Reader = Callable[[Sequence[list[memoryview]], int], tuple[int, int]]


class ColdStore(ABC):
    """What Z1 and Z2 have in common; open one with `kvtrial.cold.open_cold`.

    Parameters
    ----------
    path : Path
        The store's folder; made where it is missing. An existing one must be a store of this kind.
    identity : Identity, optional
        Whose pages are spilled and restored. One folder may hold those of many. The verbs that look
        after the store (``catalogue``, ``delete`` by key, ``gc``, ``verify``) need none.

    Raises
    ------
    StoreLocked, ForeignStore, FormatMismatch, NotWritable, CorruptSegment, CorruptIndex, Unreadable,
    OSError
    """

    kind: str

    def __init__(self, path: Path, identity: Identity | None = None) -> None:
        self.path = path
        self._identity = identity
        #: Of the last restore that found something.
        self.times: RestoreTimes | None = None
        self._mutex = threading.RLock()
        self._collecting = threading.Lock()
        self._poison: str | None = None
        self._closed = False
        #: Pages of the spill that is under way: its progress may call `delete` and `gc`.
        self._in_use: set[bytes] = set()
        self._process = os.getpid()
        self._reserve = Reserve(path)
        self._lock_fd = folder.claim(path, self.kind)
        try:
            self._open_with_room()
        except BaseException:
            os.close(self._lock_fd)
            raise
        forks.hold(self)

    @property
    def identity(self) -> Identity:
        """Whose pages are spilled and restored; `InvalidArgument` where the opener did not say."""
        if self._identity is None:
            raise InvalidArgument(
                f"{self.path} was opened without an identity; open it with Identity.of(store, ...)"
            )
        return self._identity

    def _open_with_room(self) -> None:
        """On a full disk the reserve is what RocksDB opens with."""
        try:
            self._reserve.make_room(self._index_bytes())
            self._open()
        except ColdError as error:
            full = DiskFull in (type(error), type(error.__cause__))
            if not full or not self._reserve.give_up():
                raise
            self._open()
        except OSError as error:
            raise of_disk(error, error.filename or self.path, "made or opened") from error

    # ---- what a kind of store adds

    _index: Index

    @abstractmethod
    def _open(self) -> None:
        """Open files and recover; must release what it took when it raises."""

    @abstractmethod
    def _write(self, pages: Sequence[Page], snapshot: SpilledSequence | None) -> None:
        """Make one batch durable (one fsync), then visible."""

    @abstractmethod
    def _logged_bytes(self, pages: Sequence[Page]) -> int:
        """Bytes that RocksDB logs of a batch."""

    @abstractmethod
    def _reader(self, stored: Sequence[Stored]) -> Reader:
        """Take hold of the pages, so that they can be read later, whatever is deleted until then."""

    @abstractmethod
    def _drop(self, snapshot: SpilledSequence | None, page_keys: Sequence[bytes]) -> None:
        """Forget a snapshot and pages, durably."""

    @abstractmethod
    def _reclaim(self, progress: Progress) -> None:
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
        batch_pages = integer(batch_pages, "batch_pages", 1)
        callback(progress, "progress")
        progress = progress or _silent
        with self._using():
            refuse_other(session, self.identity)
            valid = validity(session, self.identity, len(tokens))
            chain = list(keys.chain(self.identity, tokens))
            present = {page.key: meta for page, meta in stored(self._index, chain)}
            missing = [i for i, page in enumerate(chain) if page.key not in present]
            refuse_other_holes(chain, present, valid)
            snapshot = SpilledSequence(
                valid.shape[1], time.time(), tuple(page.key for page in chain)
            )
            known = self._index.get("snapshots", snapshot.key) is not None
            batches = [
                missing[start : start + batch_pages]
                for start in range(0, max(len(missing), not known), batch_pages)
            ]
            payload_bytes = 0

            def take_all(batch: list[int]) -> list[Page]:
                return [take(session, i, chain[i], valid) for i in batch]

            with self._using_pages(snapshot.page_keys), ahead(take_all, batches) as taken:
                for n, pages in enumerate(taken, start=1):
                    last = n == len(batches)
                    self._reserve.hold(self._index_bytes(), self._logged_bytes(pages))
                    self._poisoning(self._write, pages, snapshot if last else None)
                    payload_bytes += sum(page.meta.payload_nbytes for page in pages)
                    progress(min(n * batch_pages, len(missing)), len(missing))
        return SpillReport(
            valid.shape[1], len(missing), len(chain) - len(missing), payload_bytes, len(batches)
        )

    def restore(
        self, token_ids: Any, session: KVSession, *, progress: Progress | None = None
    ) -> int:
        """Fill an empty session with the longest stored prefix of ``token_ids``.

        It reads with as many threads as the session's store has.

        Parameters
        ----------
        token_ids : int (n,)
        session : KVSession
            Empty, of a store that the identity fits.
        progress : callable(pages done, pages to read), optional
            Called after each `RESTORE_PAGES`; what it raises leaves the session as it was.

        Returns
        -------
        int
            Rows restored; with 0 the session is untouched.

        Raises
        ------
        IdentityMismatch, PoolExhausted, HoleNotAllowed, CorruptSegment, CorruptIndex, Unreadable
            The session is as it was before.
        """
        begun = time.perf_counter_ns()
        callback(progress, "progress")
        progress = progress or _silent
        tokens = keys.as_tokens(token_ids)
        with self._using():
            refuse_other(session, self.identity)
            pages = longest(self._index, self.identity, tokens)
            if not pages:
                return 0
            starts = range(0, len(pages), RESTORE_PAGES)
            readers = [self._reader(pages[at : at + RESTORE_PAGES]) for at in starts]
        looked_up = time.perf_counter_ns()
        valid = valid_rows([meta for _, meta in pages])
        views = session.begin_restore(valid)
        try:
            columns = [[view for view in page if view is not None] for page in zip(*views)]
            threads = session.store.spec.threads
            read_ns = check_ns = 0
            for at, read in zip(starts, readers):
                spent = read(columns[at : at + RESTORE_PAGES], threads)
                read_ns, check_ns = read_ns + spent[0], check_ns + spent[1]
                progress(min(at + RESTORE_PAGES, len(pages)), len(pages))
        except BaseException:
            session.cancel_restore()
            raise
        session.finish_restore()
        rest = time.perf_counter_ns() - looked_up - (read_ns + check_ns) // threads
        self.times = RestoreTimes(looked_up - begun, read_ns, check_ns, max(rest, 0))
        return int(valid.shape[1])

    def contains(self, token_ids: Any) -> int:
        """Rows that `restore` would give."""
        tokens = keys.as_tokens(token_ids)
        with self._using():
            return sum(len(p.tokens) for p, _ in longest(self._index, self.identity, tokens))

    def catalogue(self) -> list[Entry]:
        """The spilled sequences of all identities, newest first."""
        with self._using():
            snapshots = sorted(self._snapshots(), key=lambda s: -s.created)
            return [Entry(s.key.hex(), s.rows, len(s.page_keys), s.created) for s in snapshots]

    def delete(self, sequence: Any) -> bool:
        """Forget a spilled sequence; False where there is none.

        Pages that another sequence needs stay. The space comes back with `gc`.

        Parameters
        ----------
        sequence : int (n,) or str
            Exactly the tokens that it was spilled under, or its key in the catalogue.
        """
        if isinstance(sequence, str):
            key = _key_of(sequence)
        else:
            chain = keys.chain(self.identity, keys.as_tokens(sequence))
            key = next((page.key for page in deque(chain, maxlen=1)), b"")
        with self._using():
            data = self._index.get("snapshots", key)
            if data is None:
                return False
            snapshot = SpilledSequence.decode(data)
            self._reserve.make_room(self._index_bytes())
            kept = self._needed(but=snapshot.key)
            unshared = [k for k in snapshot.page_keys if k not in kept]
            self._poisoning(self._drop, snapshot, unshared)
            return True

    def gc(self, progress: Progress | None = None) -> int:
        """Drop pages of interrupted spills and give back space; others come in between.

        Parameters
        ----------
        progress : callable(done, to do), optional
            Called after each segment that is emptied (Z2) or family that is compacted (Z1).

        Returns
        -------
        int
            Bytes by which the files shrank; below zero where RocksDB's log had to be written out
            first, or where others spilled meanwhile. 0 at once where another gc is under way, in another
            thread or around this one's progress.

        Raises
        ------
        CorruptSegment
            A page that is still needed is damaged; `verify` names it and who needs it.
        """
        callback(progress, "progress")
        with self._using():
            pass  # closed, poisoned or forked: that is said first
        # Never waited for: who holds the store's lock here may be waited for by the other gc.
        if not self._collecting.acquire(blocking=False):
            return 0
        try:
            before = self.disk_bytes()
            self._reserve.make_room(self._index_bytes())
            with self._using():
                kept = self._needed()
                orphans = [k for k, _ in self._index.items("prefix") if k not in kept]
                if orphans:
                    self._poisoning(self._drop, None, orphans)
            self._reclaim(progress or _silent)
            self._reserve.take_again(self._index_bytes())
            return before - self.disk_bytes()
        finally:
            self._collecting.release()

    def verify(self, progress: Progress | None = None) -> list[Damage]:
        """Read every page and compare it with its content address, and look at all that stands between
        the pages; an empty list is sound.

        Others come in between the pages; what they delete is left out.

        Parameters
        ----------
        progress : callable(pages done, pages), optional
            Called after each page.
        """
        callback(progress, "progress")
        progress = progress or _silent
        beside: list[str] = []
        with self._using():
            page_keys = [key for key, _ in self._readable("prefix", beside)]
        damage: dict[bytes, str] = {}
        for n, key in enumerate(page_keys, start=1):
            if what := self._damage_of(key):
                damage[key] = what
            progress(n, len(page_keys))
        with self._using():
            snapshots = [
                SpilledSequence.decode(data) for _, data in self._readable("snapshots", beside)
            ]
            for snapshot in snapshots:
                for key in snapshot.page_keys:
                    if key not in damage and (what := self._missing(key)):
                        damage[key] = what
        pages = [
            Damage(key.hex(), what, tuple(s.key.hex() for s in snapshots if key in s.page_keys))
            for key, what in damage.items()
        ]
        return pages + [Damage("", what, ()) for what in beside + self._damage_between()]

    def _missing(self, key: bytes) -> str:
        """What keeps a page that a sequence names from being found; empty where it is there."""
        try:
            return "the page is missing" if self._index.get("prefix", key) is None else ""
        except CorruptIndex as error:
            return str(error)

    def _readable(self, family: str, beside: list[str]) -> Iterator[tuple[bytes, bytes]]:
        """Pairs of the index up to the first damage, which goes to ``beside``."""
        try:
            yield from self._index.items(family)
        except CorruptIndex as error:
            beside.append(f"{family}: {error}")

    def _damage_between(self) -> list[str]:
        """What is wrong with the files beside the pages; nothing where RocksDB keeps them all."""
        return []

    def _damage_of(self, key: bytes) -> str:
        """What is wrong with a page; empty where nothing is, or where it has been deleted."""
        try:
            with self._using():
                data = self._index.get("prefix", key)
                if data is None:
                    return ""
                meta = PageMeta.decode(data)
                read = self._reader([Stored(PageKey(key, meta.parent, meta.tokens), meta)])
            buffer = bytearray(meta.payload_nbytes)
            read([meta.split(memoryview(buffer))], 1)
            if content_address([buffer]) != meta.address:
                return "the content is not what its address says"
        except (StoreClosed, StorePoisoned):
            raise
        except ColdError as error:
            return str(error)
        return ""

    def disk_bytes(self) -> int:
        """Bytes of the store's files, without the room that it holds for a full disk."""
        return _size(p for p in self.path.rglob("*") if p != self._reserve.path)

    def _index_bytes(self) -> int:
        return index_bytes(self.path / "index")

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
        """Release files and the lock. A second close does nothing, and so does one in a forked child.

        From a spill's own progress it ends the spill: its next batch is `StoreClosed`.
        """
        if self._process != os.getpid():
            return
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            try:
                self._reserve.make_room(self._index_bytes())
                self._close()
                self._reserve.take_again(self._index_bytes())
            except ColdError:
                # A poisoned store has said so already; what it acknowledged is on the disk.
                if self._poison is None:
                    raise
            except BaseException:
                # Interrupted: the lock must not be free while RocksDB still has its own.
                with suppress(ColdError):
                    self._close()
                raise
            finally:
                os.close(self._lock_fd)

    def let_go(self) -> None:
        """In a forked child: leave everything to the parent."""
        self._mutex = threading.RLock()  # a thread that isn't here may hold it
        if not self._closed:
            os.close(self._lock_fd)
            self._index.let_go()

    def __enter__(self) -> ColdStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- shared parts

    @contextmanager
    def _using(self) -> Iterator[None]:
        forks.refuse_fork(self._process, self.path)
        with self._mutex:
            self._refuse_unusable()
            yield

    def _refuse_unusable(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.path} is closed; open it again with open_cold")
        if self._poison is not None:
            raise StorePoisoned(
                f"{self.path}: {self._poison}; close and reopen it: what was acknowledged is there"
            )

    def _poisoning(self, write: Callable[..., None], *args: Any) -> None:
        """Run something that writes; whatever leaves the disk's state unknown poisons the store.

        Whether it may is asked each time: since the verb began, its own progress may have closed the store,
        or poisoned it.
        """
        self._refuse_unusable()
        try:
            write(*args)
        except BaseException as error:
            # What is no error of ours (an interrupt, say) came from any place in between.
            if not isinstance(error, ColdError):
                self._poison = f"a write was cut short by {type(error).__name__}"
            elif self._uncertain(error):
                self._poison = str(error)
            raise

    def _uncertain(self, error: ColdError) -> bool:
        return isinstance(error, StorePoisoned)

    @contextmanager
    def _using_pages(self, page_keys: Iterable[bytes]) -> Iterator[None]:
        """Whatever is deleted or collected meanwhile, these pages stay."""
        before = self._in_use
        self._in_use = before.union(page_keys)
        try:
            yield
        finally:
            self._in_use = before

    def _needed(self, but: bytes | None = None) -> set[bytes]:
        """Pages of every sequence but one, and of the spill that is under way."""
        needed = {k for s in self._snapshots() if s.key != but for k in s.page_keys}
        return needed | self._in_use

    def _snapshots(self) -> Iterator[SpilledSequence]:
        for _, data in self._index.items("snapshots"):
            yield SpilledSequence.decode(data)


def _size(paths: Iterable[Path]) -> int:
    """Bytes of those that are files; some may go while they are counted."""
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _silent(done: int, to_do: int) -> None:
    """Progress that nobody asked for."""


def _key_of(text: str) -> bytes:
    """The key that a catalogue's text stands for."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(
            f"{text!r} is no key of a sequence; give one of catalogue(), or its tokens"
        ) from None
