"""The cold tier measured: one block, a fresh process in which Z1, Z2 and a plain file do the same work,
and the model computes what they restore.

``python -m kvtrial.measure.cold.restore SPEC.json OUT.json`` with a `RestoreSpec`.

All arms write the same pages in as many batches with as many syncs, and read them into the same pages
of one pool, which were written to before (no page fault is measured), each by one thread. The baseline
``plain`` is one file, without index, keys or checksums.

Restores of shorter prefixes, and prefills of the same tokens, carry their own ``context``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtrial import engine
from kvtrial.cold import Identity, disk, open_cold
from kvtrial.cold.store import ColdStore
from kvtrial.contract import I64, KVSession, KVStore
from kvtrial.measure import clock
from kvtrial.measure.child import Row, failed_row, main, no_collection
from kvtrial.measure.cold import pagecache
from kvtrial.measure.specs import RestoreSpec
from kvtrial.measure.stores import Snapshot, fill, opened

#: Of the files' pages; above it the cache counts as not dropped, and no cold time is given.
EVICTED = 0.01


def measure(spec: RestoreSpec, note: Callable[[str], None]) -> list[Row]:
    """All rows of the block."""
    snapshot = Snapshot.open(spec.snapshot)
    rows: list[Row] = []
    with opened(
        spec.store,
        spec.shape,
        tokens=spec.prefix_tokens,
        sessions=2,
        page_tokens=spec.page_tokens,
    ) as (store, (source, target)):
        for session in (source, target):  # the target too: its pages are touched from here on
            fill(session, snapshot, spec.prefix_tokens)
        target.close()
        for place, name in enumerate(n for n in spec.order if n in spec.candidates):
            note(name)
            folder = Path(spec.folder) / name
            columns = {"candidate": name, "place": place}
            shutil.rmtree(folder, ignore_errors=True)
            try:
                with no_collection():
                    if name == "recompute":
                        measured = _recompute(store, spec)
                    else:
                        arm = _PlainArm if name == "plain" else _ColdArm
                        measured = _measure_arm(arm(name, folder, store, source, spec), spec)
                rows += [{**columns, **row} for row in measured]
            except Exception as error:
                rows.append({**columns, "metric": "failed", "text": failed_row(error)})
            shutil.rmtree(folder, ignore_errors=True)
    return rows


class _ColdArm:
    """Z1 or Z2 behind the four things that an arm can do."""

    prefix = "restore"

    def __init__(
        self, kind: str, folder: Path, store: KVStore, source: KVSession, spec: RestoreSpec
    ) -> None:
        self.folder = folder
        self._kind = kind
        self._hot = store
        self._source = source
        self._batches = spec.batches
        # What the tokens are has no influence; they only have to be known again.
        self._tokens: I64 = np.arange(spec.prefix_tokens, dtype=np.int64)
        self._identity = Identity.of(
            store,
            model_sha256=spec.model_sha256,
            rope_base=1.0,
            activations=spec.activations,
        )
        self._cold: ColdStore | None = None

    def open(self) -> None:
        self._cold = open_cold(self._kind, self.folder, self._identity)

    @property
    def cold(self) -> ColdStore:
        assert self._cold is not None
        return self._cold

    def write(self) -> tuple[int, int]:
        """Payload bytes and batches written."""
        pages = -(-len(self._tokens) // self._identity.page_tokens)
        report = self.cold.spill(self._source, self._tokens, batch_pages=-(-pages // self._batches))
        return report.payload_bytes, report.batches

    def syncs(self) -> int:
        return self.cold.syncs

    def settle(self) -> None:
        """Let RocksDB write out and compact what it holds back: those bytes belong to the spill."""
        self.cold.gc()

    def read(self, rows: int) -> int:
        """Nanoseconds to restore so many rows into an empty session."""
        session = self._hot.open_session()
        try:
            start = clock.now_ns()
            restored = self.cold.restore(self._tokens[:rows], session)
            spent = clock.elapsed_ns(start, clock.now_ns(), f"restore from {self._kind}")
            if restored != rows:
                raise RuntimeError(f"{restored} of {rows} rows were restored")
        finally:
            session.close()
        return spent

    def parts(self) -> dict[str, float]:
        """Milliseconds of the parts of the last restore, and of RocksDB's binding in another."""
        times = self.cold.times
        assert times is not None
        parts_ms = {
            f"restore_{name}_ms": getattr(times, f"{name}_ns") / 1e6
            for name in ("lookup", "read", "check", "import")
        }
        if self._kind == "Z1":
            before = self.cold.rocksdb_get_us
            self.read(len(self._tokens))
            inside = (self.cold.rocksdb_get_us - before) / 1e3
            parts_ms["restore_binding_ms"] = max(self.cold.times.read_ns / 1e6 - inside, 0.0)  # type: ignore[union-attr]
        return parts_ms

    def collect(self) -> tuple[int, int]:
        """Nanoseconds of a gc with one sequence of two gone, and bytes that it gave back."""
        p = self._identity.page_tokens
        pages = max(1, len(self._tokens) // (2 * p))
        other = self._tokens[: pages * p] + 1
        half = self._hot.open_session()
        try:
            if self.cold.restore(self._tokens[: len(other)], half) != len(other):
                raise RuntimeError("the first half of the sequence is not there")
            self.cold.spill(half, other)
        finally:
            half.close()
        self.cold.delete(self._tokens)
        start = clock.now_ns()
        freed = self.cold.gc()
        return clock.elapsed_ns(start, clock.now_ns(), f"gc of {self._kind}"), freed

    def index_bytes(self) -> int | None:
        return self.cold.index_bytes()

    def close(self) -> None:
        self.cold.close()


class _PlainArm:
    """One file: the same bytes, the same syncs, the same pages, and nothing else."""

    prefix = "plain_read"

    def __init__(
        self, name: str, folder: Path, store: KVStore, source: KVSession, spec: RestoreSpec
    ) -> None:
        self.folder = folder
        self._hot = store
        self._batches = spec.batches
        layers = range(store.spec.layers)
        n = -(-spec.prefix_tokens // spec.page_tokens)
        self._pages = [
            [_present(source.page_bytes(layer, i)) for layer in layers] for i in range(n)
        ]
        self._valid = np.stack([source.valid(layer) for layer in layers])
        folder.mkdir(parents=True)
        self._fd = -1

    def open(self) -> None:
        self._fd = os.open(self.folder / "plain", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self) -> tuple[int, int]:
        """Payload bytes and batches written."""
        step = -(-len(self._pages) // self._batches)
        starts = range(0, len(self._pages), step)
        offset = 0
        for start in starts:
            views = [view for page in self._pages[start : start + step] for view in page]
            offset += disk.write_all(self._fd, views, offset)
            disk.fsync(self._fd)
        return offset, len(starts)

    def syncs(self) -> int:
        return disk.counters.fsyncs

    def settle(self) -> None:
        """Nothing is held back."""

    def read(self, rows: int) -> int:
        """Nanoseconds to read so many rows into an empty session's pages."""
        session = self._hot.open_session()
        try:
            start = clock.now_ns()
            self._restore(rows, session)
            return clock.elapsed_ns(start, clock.now_ns(), "plain read")
        finally:
            session.close()

    def _restore(self, rows: int, session: KVSession) -> None:
        """Its views go before the clock stops, as those of a store's restore do."""
        into = session.begin_restore(self._valid[:, :rows])
        disk.read_into(self._fd, [_present(view) for page in zip(*into) for view in page], 0)
        session.finish_restore()

    def index_bytes(self) -> int | None:
        return None

    def close(self) -> None:
        os.close(self._fd)


def _present(view: memoryview | None) -> memoryview:
    assert view is not None, "the snapshot has no holes"
    return view


def contexts(prefix_tokens: int, page_tokens: int) -> list[int]:
    """Prefixes that are restored: a page, four times as much, and so on, and the registered one."""
    prefixes = []
    n = page_tokens
    while n < prefix_tokens:
        prefixes.append(n)
        n *= 4
    return [*prefixes, prefix_tokens]


def _measure_arm(arm: _ColdArm | _PlainArm, spec: RestoreSpec) -> list[Row]:
    rows: list[Row] = []
    prefix = spec.prefix_tokens

    def add(metric: str, value: float | None, index: int = 0, **columns: int) -> None:
        if value is not None:
            metric = f"cold/{metric}"
            rows.append({"metric": metric, "value": float(value), "index": index, **columns})

    arm.open()
    try:
        written_before, syncs_before = _bytes_written(), arm.syncs()
        start = clock.now_ns()
        payload, batches = arm.write()
        spent = clock.elapsed_ns(start, clock.now_ns(), "spill")
        name = "plain_write" if isinstance(arm, _PlainArm) else "spill"
        add(f"{name}_mb_per_s", payload / spent * 1e3)
        add("batches", batches)
        add("fsyncs", arm.syncs() - syncs_before)
        add("payload_mb", payload / 1e6)
        arm.settle()
    finally:
        arm.close()
    if written_before is not None and (written := _bytes_written()) is not None:
        add("bytes_written_per_payload_byte", (written - written_before) / payload)

    arm.open()
    try:
        index_bytes = arm.index_bytes()
        add("index_mb", None if index_bytes is None else index_bytes / 1e6)
        arm.read(prefix)  # fills the page cache
        for index in range(spec.repetitions):
            add(f"{arm.prefix}_warm_ms", arm.read(prefix) / 1e6, index)
        if isinstance(arm, _ColdArm):
            for metric, ms in arm.parts().items():
                add(metric, ms)
        for rows_read in contexts(prefix, spec.page_tokens)[:-1]:
            add(f"{arm.prefix}_warm_ms", arm.read(rows_read) / 1e6, context=rows_read)
    finally:
        arm.close()

    for rows_read in contexts(prefix, spec.page_tokens):
        at = {} if rows_read == prefix else {"context": rows_read}
        arm.open()
        try:
            files = [path for path in arm.folder.rglob("*") if path.is_file()]
            pagecache.evict(files)
            resident = pagecache.resident_fraction(files)
            add("resident_fraction", resident, **at)
            if resident is not None and resident <= EVICTED:
                add(f"{arm.prefix}_cold_ms", arm.read(rows_read) / 1e6, **at)
        finally:
            arm.close()

    if isinstance(arm, _ColdArm):
        arm.open()
        try:
            spent, freed = arm.collect()
            add("gc_ms", spent / 1e6)
            add("gc_freed_mb", freed / 1e6)
        finally:
            arm.close()
    return rows


def _recompute(store: KVStore, spec: RestoreSpec) -> list[Row]:
    """Prefills of the snapshot's own tokens, each into an empty session; the first one warms up."""
    model = engine.load(spec.gguf)
    tokens = json.loads((Path(spec.snapshot) / "tokens.json").read_text(encoding="utf-8"))["ids"]
    rows: list[Row] = []
    lengths = contexts(spec.prefix_tokens, spec.page_tokens)
    for n in [lengths[0], *(n for n in lengths if n <= spec.recompute_tokens)]:
        session = store.open_session()
        try:
            start = clock.now_ns()
            model.prefill(session, tokens[:n])
            spent = clock.elapsed_ns(start, clock.now_ns(), f"prefill of {n} tokens")
        finally:
            session.close()
        rows.append({"metric": "cold/recompute_ms", "value": spent / 1e6, "context": n})
    return rows[1:]


def _bytes_written() -> int | None:
    """Bytes that this process had the kernel write to disks; None where it doesn't say."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    fields: dict[str, Any] = dict(line.split(": ") for line in text.splitlines())
    return int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])


if __name__ == "__main__":
    main(RestoreSpec, measure, sys.argv)
