"""Z1: a page is a RocksDB value, in blob files; the log's sync is the acknowledgement."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtrial.cold.errors import ColdError, CorruptIndex
from kvtrial.cold.index import FAMILIES, Batch, Index, SpilledSequence
from kvtrial.cold.page import Page, split
from kvtrial.cold.prefix import Stored
from kvtrial.cold.store import ColdStore, Progress, Reader


class ValueStore(ColdStore):
    """Z1. The binding takes and gives `bytes`, so a page is copied once each way."""

    kind = "Z1"

    def _open(self) -> None:
        self._index = Index(self.path / "index", blobs=True, lean=self._reserve.given_up)

    def _logged_bytes(self, pages: Sequence[Page]) -> int:
        return sum(page.meta.payload_nbytes for page in pages)

    def _write(self, pages: Sequence[Page], spilled: SpilledSequence | None) -> None:
        batch = Batch(self._index)
        for page in pages:
            batch.put("prefix", page.key, page.meta.encode())
            batch.put("pages", page.key, b"".join(page.payload))
        if spilled is not None:
            batch.put("snapshots", spilled.key, spilled.encode())
        self._index.write(batch, sync=True)

    def _reader(self, stored: Sequence[Stored]) -> Reader:
        frozen = self._index.frozen("pages")

        def read(views: Sequence[list[memoryview]], threads: int) -> tuple[int, int]:
            read_ns = 0
            for (page, meta), into in zip(stored, views):
                begun = time.perf_counter_ns()
                payload = frozen(page.key)
                read_ns += time.perf_counter_ns() - begun
                if payload is None or len(payload) != meta.payload_nbytes:
                    have = "no value" if payload is None else f"{len(payload)} bytes"
                    raise CorruptIndex(
                        f"page {page.key.hex()[:16]} has {have} instead of {meta.payload_nbytes} "
                        "bytes; delete() the sequence that holds it, and spill it again"
                    )
                split(payload, into)
            return read_ns, 0

        return read

    def _drop(self, spilled: SpilledSequence | None, page_keys: Sequence[bytes]) -> None:
        batch = Batch(self._index)
        if spilled is not None:
            batch.delete("snapshots", spilled.key)
        for key in page_keys:
            batch.delete("prefix", key)
            batch.delete("pages", key)
        self._index.write(batch, sync=True)

    def _reclaim(self, progress: Progress) -> None:
        for n, family in enumerate(FAMILIES, start=1):
            with self._using():
                self._poisoning(self._index.compact, family)
            progress(n, len(FAMILIES))

    def _uncertain(self, error: ColdError) -> bool:
        # After a failed write of its log RocksDB refuses more until it is reopened.
        return True

    def _close(self) -> None:
        self._index.close()
