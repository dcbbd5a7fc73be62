"""Kill a writer with SIGKILL at a random moment, reopen, and compare with what it had acknowledged.

``python -m kvtrial.cold.crash KIND FOLDER FIRST`` is the writer: it spills sequences FIRST, FIRST + 1,
... of known bytes, deletes and collects some on the way, and prints a line for each acknowledgement.
`crash_once` runs and kills one, then checks the store:

- every acknowledged batch of every sequence that was not deleted is there, bitwise;
- nothing that was acknowledged as deleted is back;
- all that is there, acknowledged or not, is whole (`ColdStore.verify`).

A killed process loses nothing that the kernel already has, so this can't show a missing fsync; the
tests inject those faults at the system call.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtrial.cold import ColdStore, Identity, open_cold
from kvtrial.contract import I64, Bool, InvalidArgument, KVError, PoolExhausted, StoreSpec

PATTERN_ROWS = 37  # two whole pages of 16 and a partial one


class PatternStore:
    """Pages of plain bytes behind those verbs of the contract that the cold tier uses."""

    def __init__(self, page_tokens: int = 16, pages: int = 10_000, layers: int = 2) -> None:
        self.spec = StoreSpec(
            layers=layers,
            q_heads=1,
            kv_heads=1,
            head_dim=8,
            page_tokens=page_tokens,
            budget_bytes=1,
        )
        self.page_format = f"pattern-P{page_tokens}"
        self.page_nbytes = page_tokens * 2 * 8 * 4
        self.pages_free = pages

    def open_session(self, position_holes_allowed: bool = False) -> PatternSession:
        """An empty session."""
        return PatternSession(self, position_holes_allowed)

    def filled(self, rows: int, seed: int = 0, holes: bool = False) -> PatternSession:
        """A session of ``rows`` rows whose bytes follow from ``seed``."""
        session = self.open_session(holes)
        draw = np.random.default_rng(seed)
        session.pages = [
            [
                draw.integers(0, 256, self.page_nbytes, np.uint8)
                for _ in range(-(-rows // self.spec.page_tokens))
            ]
            for _ in range(self.spec.layers)
        ]
        session.bits = np.ones((self.spec.layers, rows), bool)
        return session

    def identity(self) -> Identity:
        """Of a model that doesn't exist."""
        return Identity.of(self, model_sha256="0" * 64, rope_base=1e4)  # type: ignore[arg-type]


class PatternSession:
    """One sequence of a `PatternStore`: bytes per layer and page, and the validity (L, rows)."""

    def __init__(self, store: PatternStore, position_holes_allowed: bool) -> None:
        self.store = store
        self.position_holes_allowed = position_holes_allowed
        self.pages: list[list[Any]] = [[] for _ in range(store.spec.layers)]
        self.bits: Bool = np.zeros((store.spec.layers, 0), bool)
        self._coming: Bool = self.bits
        self._taken = 0

    def valid(self, layer: int) -> Bool:
        """As the contract says: up to the last valid row."""
        bits = self.bits[layer]
        return bits[: bits.nonzero()[0].max(initial=-1) + 1]

    def length(self, layer: int) -> int:
        """Highest valid position + 1."""
        return len(self.valid(layer))

    def page_bytes(self, layer: int, index: int) -> memoryview | None:
        """One page, read-only."""
        page = self.pages[layer][index]
        return None if page is None else memoryview(page).toreadonly()

    def begin_restore(self, valid: Bool) -> list[list[memoryview | None]]:
        """Take pages from the pool."""
        if self.bits.size:
            raise InvalidArgument("the session is not empty; open a new one")
        p = self.store.spec.page_tokens
        starts = range(0, valid.shape[1], p)
        held = [
            [bool(valid[layer, s : s + p].any()) for s in starts] for layer in range(len(valid))
        ]
        need = sum(map(sum, held))
        if need > self.store.pages_free:
            raise PoolExhausted(f"{need} pages needed, {self.store.pages_free} free")
        self.store.pages_free -= need
        self._coming, self._taken = valid.copy(), need
        self.pages = [
            [np.zeros(self.store.page_nbytes, np.uint8) if h else None for h in layer]
            for layer in held
        ]
        return [[None if p is None else memoryview(p) for p in layer] for layer in self.pages]

    def finish_restore(self) -> None:
        """Make the rows visible."""
        self.bits = self._coming

    def cancel_restore(self) -> None:
        """Give the pages back."""
        self.pages = [[] for _ in self.pages]
        self.store.pages_free += self._taken

    def contents(self) -> list[list[bytes | None]]:
        """All bytes, to compare."""
        return [[None if p is None else bytes(p) for p in layer] for layer in self.pages]


def pattern_tokens(n: int, rows: int = PATTERN_ROWS) -> I64:
    """The tokens of sequence ``n``: the first page is shared by eight sequences."""
    tokens = np.arange(rows, dtype=np.int64)
    tokens[:16] += 1000 * (n // 8)
    tokens[16:] += 1000 * n
    return tokens


def pattern_session(store: PatternStore, n: int) -> PatternSession:
    """The rows of sequence ``n``; what tokens share, bytes share."""
    session = store.filled(PATTERN_ROWS, seed=n)
    shared = store.filled(PATTERN_ROWS, seed=-1 - n // 8 + 2**32)
    for layer, pages in enumerate(shared.pages):
        session.pages[layer][0] = pages[0]
    return session


def _say(*words: object) -> None:
    print(*words, flush=True)


def _spill_aloud(cold: ColdStore, store: PatternStore, n: int) -> None:
    def acknowledge(*_: int) -> None:
        _say("batch", n, cold.contains(pattern_tokens(n)))

    session: Any = pattern_session(store, n)
    cold.spill(session, pattern_tokens(n), batch_pages=1, progress=acknowledge)
    _say("stored", n)


def write_forever(kind: str, folder: Path, first: int) -> None:
    """The writer. Lines: ``ready``, ``batch N PAGES``, ``stored N``, ``deleting N``, ``deleted N``."""

    store = PatternStore()
    with open_cold(kind, folder, store.identity()) as cold:
        _say("ready")
        n = first
        while True:
            _spill_aloud(cold, store, n)
            if n % 3 == 2:
                _say("deleting", n - 1)
                cold.delete(pattern_tokens(n - 1))
                _say("deleted", n - 1)
            if n % 7 == 6:
                cold.gc()
            n += 1


@dataclass
class Crash:
    """What one kill left behind; ``faults`` is empty where all promises were kept."""

    acknowledged: int = 0
    recovered: int = 0
    next_sequence: int = 0
    faults: list[str] = field(default_factory=list)


def crash_once(kind: str, folder: Path, first: int, after_s: float) -> Crash:
    """Run a writer, kill it ``after_s`` seconds after it is ready, reopen and check.

    Parameters
    ----------
    kind : {"Z1", "Z2"}
    folder : Path
        The store; rounds on one folder go on where the last was killed.
    first : int
        `Crash.next_sequence` of the round before, 0 at first.
    after_s : float
        Seconds.
    """
    command = [sys.executable, "-m", "kvtrial.cold.crash", kind, str(folder), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        line = writer.stdout.readline()
        if line != "ready\n":
            raise RuntimeError(f"the writer did not start: it said {line!r}; its errors are above")
        time.sleep(after_s)
        writer.send_signal(signal.SIGKILL)
        said = [line.split() for line in writer.stdout if line.endswith("\n")]
    try:
        return _check(kind, folder, first, said)
    except KVError as error:
        return Crash(next_sequence=first, faults=[f"the store does not open: {error}"])


def _check(kind: str, folder: Path, first: int, said: list[list[str]]) -> Crash:
    rows: dict[int, int] = {}
    doubtful: set[int] = set()
    deleted: set[int] = set()
    for word, *numbers in said:
        n = int(numbers[0])
        if word == "batch":
            rows[n] = int(numbers[1])
        elif word == "stored":
            rows[n] = PATTERN_ROWS
        elif word == "deleting":
            doubtful.add(n)
        elif word == "deleted":
            deleted.add(n)
    result = Crash(next_sequence=max(rows, default=first) + 2)
    store = PatternStore()
    with open_cold(kind, folder, store.identity()) as cold:
        result.faults += [f"{fault.key[:16]}: {fault.what}" for fault in cold.verify()]
        catalogued = {entry.rows for entry in cold.catalogue()}
        if catalogued - {PATTERN_ROWS}:
            result.faults.append(f"the catalogue lists rows {catalogued}")
        for n, promised in rows.items():
            found = cold.contains(pattern_tokens(n))
            if n in deleted and found == PATTERN_ROWS:
                result.faults.append(f"sequence {n} was deleted and is back")
            if n in doubtful:
                continue
            result.acknowledged += 1
            session = store.open_session()
            cold.restore(pattern_tokens(n), session)  # type: ignore[arg-type]
            want = pattern_session(store, n).contents()
            pages = -(-found // 16)
            if found < promised:
                result.faults.append(f"sequence {n}: {promised} rows acknowledged, {found} there")
            elif session.contents() != [layer[:pages] for layer in want]:
                result.faults.append(f"sequence {n}: other bytes than were spilled")
            else:
                result.recovered += 1
    return result


def crash_rounds(kind: str, folder: Path, rounds: int, seed: int = 0) -> list[Crash]:
    """Kill ``rounds`` writers of one store, each at its own moment within 0.2 s."""
    draw = random.Random(seed)
    results: list[Crash] = []
    for _ in range(rounds):
        first = results[-1].next_sequence if results else 0
        results.append(crash_once(kind, folder, first, draw.uniform(0, 0.2)))
    return results


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        write_forever(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
