"""Writers in processes of their own, and a look at what they leave.

Every store is opened in a forked process, so that nothing of RocksDB lives on from one to the next; the
process that forks must never have opened one.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtrial.cold import ColdStore, keys, open_cold
from kvtrial.cold.errors import ColdError
from kvtrial.measure.cold.pattern import (
    PATTERN_ROWS,
    SHARED_ROWS,
    PatternStore,
    pattern_session,
    pattern_tokens,
)

Say = Callable[..., object]
Said = list[list[str]]


@dataclass
class Crash:
    """What one round left behind; ``problems`` is empty where all promises were kept."""

    acknowledged: int = 0
    recovered: int = 0
    next_sequence: int = 0
    problems: list[str] = field(default_factory=list)


# --------------------------------------------------------------------------------------------------
# Processes


def forked(work: Callable[[Say], None], meanwhile: Callable[[int], None] | None = None) -> Said:
    """Run ``work(say)`` in a forked process and return the words of each line that it said.

    ``meanwhile`` is called with the process id after the first line. A process that ends by itself in
    any other way than returning says ``died``.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            work(lambda *words: os.write(writing, (" ".join(map(str, words)) + "\n").encode()))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    said: Said = []
    with os.fdopen(reading, encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                said.append(line.split())
            if meanwhile is not None and len(said) == 1:
                meanwhile(pid)
                meanwhile = None
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said if code in (0, -signal.SIGKILL) else [*said, ["died", str(code)]]


def spill_aloud(cold: ColdStore, store: PatternStore, n: int, say: Say) -> None:
    """Spill sequence ``n`` and say each acknowledgement, with the file it lies in and its size."""

    def acknowledge(*_: int) -> None:
        say("batch", n, cold.contains(pattern_tokens(n)), *_newest(cold.path))

    session: Any = pattern_session(store, n)
    cold.spill(session, pattern_tokens(n), batch_pages=1, progress=acknowledge)
    say("stored", n, PATTERN_ROWS, *_newest(cold.path))


def delete_aloud(cold: ColdStore, n: int, say: Say) -> None:
    say("deleting", n)
    cold.delete(pattern_tokens(n))
    say("deleted", n, *_newest(cold.path))


def _newest(store: Path) -> tuple[str, int]:
    """The file that was appended to last, and its size in bytes."""
    files = [*store.rglob("*.seg")] or [*store.rglob("*.log")]
    newest = max(files, key=lambda path: path.stem)
    return newest.name, newest.stat().st_size


def write_forever(kind: str, folder: Path, first: int, say: Say) -> None:
    """Spill sequences ``first``, ``first`` + 1, …; delete and collect some on the way."""
    store = PatternStore()
    with open_cold(kind, folder, store.identity()) as cold:
        say("ready")
        n = first
        while True:
            spill_aloud(cold, store, n, say)
            if n % 3 == 2:
                delete_aloud(cold, n - 1, say)
            if n % 7 == 6:
                cold.gc()
            n += 1


def write_some(kind: str, folder: Path, say: Say) -> None:
    """A short life: three sequences, one deleted, collected; reopened, and one more."""
    store = PatternStore()
    with open_cold(kind, folder, store.identity()) as cold:
        for n in range(3):
            spill_aloud(cold, store, n, say)
        delete_aloud(cold, 1, say)
        cold.gc()
    with open_cold(kind, folder, store.identity()) as cold:
        spill_aloud(cold, store, 3, say)


def write_again(kind: str, folder: Path, say: Say) -> None:
    """A store that is emptied and collected, filled again when it is reopened, and collected once more."""
    store = PatternStore()
    with open_cold(kind, folder, store.identity()) as cold:
        for n in range(2):
            spill_aloud(cold, store, n, say)
        for n in range(2):
            delete_aloud(cold, n, say)
        cold.gc()
    with open_cold(kind, folder, store.identity()) as cold:
        for n in range(2, 6):  # more than there was before
            spill_aloud(cold, store, n, say)
    with open_cold(kind, folder, store.identity()) as cold:
        delete_aloud(cold, 2, say)
        cold.gc()
        spill_aloud(cold, store, 6, say)


#: What a writer does that a power cut ends.
LIVES: tuple[Callable[[str, Path, Say], None], ...] = (write_some, write_again)


def write_and_die(kind: str, folder: Path, say: Say) -> None:
    """The same, killed after its last acknowledgement: RocksDB's log is as it was written."""

    def say_and_die(*words: object) -> None:
        say(*words)
        if words[:2] == ("stored", 3):
            os.kill(os.getpid(), signal.SIGKILL)

    write_some(kind, folder, say_and_die)


# --------------------------------------------------------------------------------------------------
# What is left


@dataclass
class Promise:
    """What the writer's words amount to: rows by sequence, and which it was told to forget."""

    rows: dict[int, int] = field(default_factory=dict)
    doubtful: set[int] = field(default_factory=set)
    deleted: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, said: Said) -> Promise:
        promise = cls()
        for word, *rest in said:
            if word in ("batch", "stored"):
                promise.rows[int(rest[0])] = int(rest[1])
            elif word == "deleting":
                promise.doubtful.add(int(rest[0]))
            elif word == "deleted":
                promise.deleted.add(int(rest[0]))
        return promise


def key_of(store: PatternStore, n: int) -> str:
    """The catalogue's key of sequence ``n``."""
    return [page.key.hex() for page in keys.chain(store.identity(), pattern_tokens(n))][-1]


def check(
    kind: str, folder: Path, said: Said, first: int = 0, lost: frozenset[int] = frozenset()
) -> Crash:
    """Open what is left and compare it with what was acknowledged, in a process of its own.

    ``lost``: sequences that may be damaged, and have to be named then; no others may.
    """
    promise = Promise.of(said)
    result = Crash(next_sequence=max(promise.rows, default=first) + 2)
    result.problems += [f"the writer ended with code {w[1]}" for w in said if w[0] == "died"]

    def look(say: Say) -> None:
        _look(kind, folder, promise, lost, result.next_sequence - 1, say)

    for word, *rest in forked(look):
        if word == "recovered":
            result.recovered += 1
        elif word == "acknowledged":
            result.acknowledged += 1
        else:
            result.problems.append(" ".join([word, *rest] if word == "died" else rest))
    return result


def _look(
    kind: str, folder: Path, promise: Promise, lost: frozenset[int], another: int, say: Say
) -> None:
    store = PatternStore()
    may_be_named = {key_of(store, n) for n in lost}
    try:
        with open_cold(kind, folder, store.identity()) as cold:
            for damage in cold.verify():
                if not damage.sequences or not may_be_named.issuperset(damage.sequences):
                    say("problem", damage.key[:16], damage.what)
            if {entry.rows for entry in cold.catalogue()} - {PATTERN_ROWS}:
                say("problem", "the catalogue lists other numbers of rows")
            for n, rows in promise.rows.items():
                stored = cold.contains(pattern_tokens(n))
                if n in promise.deleted and stored > SHARED_ROWS:
                    say("problem", f"sequence {n} was deleted and is back")
                if n not in promise.doubtful:
                    say("acknowledged")
                    compare(cold, store, n, rows, say)
            cold.spill(pattern_session(store, another), pattern_tokens(another))  # type: ignore[arg-type]
        with open_cold(kind, folder, store.identity()) as cold:
            if cold.contains(pattern_tokens(another)) != PATTERN_ROWS:
                say("problem", "what was spilled after the crash is gone")
    except ColdError as error:
        say("problem", f"{type(error).__name__}: {error}")


def compare(cold: ColdStore, store: PatternStore, n: int, promised: int, say: Say) -> None:
    """Restore sequence ``n``; say ``recovered``, or what is wrong."""
    session = store.open_session()
    restored = cold.restore(pattern_tokens(n), session)  # type: ignore[arg-type]
    want = [layer[: -(-restored // 16)] for layer in pattern_session(store, n).contents()]
    if restored < promised:
        say("problem", f"sequence {n}: {promised} rows acknowledged, {restored} there")
    elif session.contents() != want:
        say("problem", f"sequence {n}: other bytes than were spilled")
    else:
        say("recovered")
