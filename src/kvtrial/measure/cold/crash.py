"""The crash matrix: writers that are killed, disks that fail, files that are damaged; then it is looked
at what is left.

``python -m kvtrial.measure.cold.crash SPEC.json OUT.json`` with a `CrashSpec`. Each round is one fault, at a
place drawn by chance, in `FAULTS`. Afterwards, whatever happened:

- every acknowledged batch of every sequence that was not deleted is there, bitwise;
- nothing that was acknowledged as deleted is back;
- all that is there, acknowledged or not, is whole (`ColdStore.verify`), or is named as damaged;
- the store takes another sequence, and has it when it is opened once more.

Where a disk has to fail the process needs `faults.preload_environment`; without it those rounds are left
out.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtrial.cold import ColdStore, open_cold, segments
from kvtrial.cold.errors import ColdError, StoreLocked, StorePoisoned
from kvtrial.measure.child import Row, main
from kvtrial.measure.cold import faults
from kvtrial.measure.cold.aftermath import (
    LIVES,
    Crash,
    Promise,
    Said,
    Say,
    check,
    compare,
    forked,
    key_of,
    spill_aloud,
    write_and_die,
    write_forever,
    write_some,
)
from kvtrial.measure.cold.pattern import PatternStore
from kvtrial.measure.specs import CrashSpec

#: A writer is killed within this many seconds.
KILL_WITHIN_S = 0.2
#: A segment is sealed after a batch or two.
SMALL_SEGMENT_BYTES = 3000


@dataclass
class Round:
    """One fault: the store's kind, a folder for it, and where chance comes from."""

    kind: str
    folder: Path
    draw: random.Random
    #: Goes on where the last round on this folder ended.
    first: int = 0

    def __post_init__(self) -> None:
        self.life = self.draw.choice(LIVES)
        #: Small ones too, so that a short life has many.
        self.segment_bytes = self.draw.choice((segments.SEGMENT_BYTES, SMALL_SEGMENT_BYTES))

    @property
    def store(self) -> Path:
        """The store's own folder; what is watched is the one around it."""
        return self.folder / "cold"

    @property
    def memory(self) -> Path:
        """What a power cut would leave."""
        path = self.folder.with_name(f"{self.folder.name}-memory")
        path.mkdir(exist_ok=True)
        return path


# --------------------------------------------------------------------------------------------------
# The faults


def killed(at: Round) -> Crash:
    """SIGKILL at a random moment; rounds on one folder go on where the last was killed."""

    def kill(pid: int) -> None:
        time.sleep(at.draw.uniform(0, KILL_WITHIN_S))
        os.kill(pid, signal.SIGKILL)

    said = forked(lambda say: write_forever(at.kind, at.store, at.first, say), kill)
    return check(at.kind, at.store, said[1:], at.first)


def _calls(at: Round) -> int:
    """Writes and syncs of a whole short life; nothing is left of it."""

    def count(say: Say) -> None:
        segments.SEGMENT_BYTES = at.segment_bytes
        faults.watch(at.folder, at.memory)
        at.life(at.kind, at.store, lambda *_: None)
        say(faults.calls(faults.WRITE) + faults.calls(faults.SYNC))

    ((calls,),) = forked(count)
    for path in (at.folder, at.memory):
        shutil.rmtree(path)
    at.folder.mkdir()
    return int(calls)


def _write_until(at: Round, call: int, say: Say) -> None:
    """A short life that ends by force at so many writes and syncs."""
    segments.SEGMENT_BYTES = at.segment_bytes
    faults.watch(at.folder, at.memory)
    faults.fail(faults.ANY, faults.DIE, call, at.draw.randrange(2000))
    at.life(at.kind, at.store, say)


def _after_power_cut(at: Round, said: Said, torn: bool = False) -> Crash:
    """A look at what the machine finds when the power is back."""
    left = at.folder.with_name(f"{at.folder.name}-left")
    faults.power_cut(at.folder, at.memory, left, at.draw if torn else None)
    try:
        return check(at.kind, left / "cold", said)
    finally:
        shutil.rmtree(left)


def power_cut(at: Round, torn: bool = False) -> Crash:
    """The process and the machine stop at a write or sync; what was not synced is lost."""
    call = at.draw.randrange(_calls(at))
    return _after_power_cut(at, forked(lambda say: _write_until(at, call, say)), torn)


def torn_write(at: Round) -> Crash:
    """A power cut that leaves a part of what was being written."""
    return power_cut(at, torn=True)


def killed_then_power_cut(at: Round) -> Crash:
    """The process is killed at a write or sync, another goes on from there, then the machine stops.

    What the first made and did not sync is there for the second, which has to sync it before it builds
    on it. Most of it is made in the beginning.
    """
    call = at.draw.randrange(1 + at.draw.randrange(_calls(at)))

    def go_on(say: Say) -> None:
        faults.watch(at.folder, at.memory)
        store = PatternStore()
        with open_cold(at.kind, at.store, store.identity()) as cold:
            spill_aloud(cold, store, 9, say)

    said = forked(lambda say: _write_until(at, call, say))
    return _after_power_cut(at, said + forked(go_on))


def power_cut_in_repair(at: Round) -> Crash:
    """What a power cut left is opened and gone on with, and the power is cut again on the way."""
    calls = _calls(at)
    first, second = at.draw.randrange(calls), at.draw.randrange(calls)
    said = forked(lambda say: _write_until(at, first, say))
    left = Round(at.kind, at.folder.with_name(f"{at.folder.name}-repaired"), at.draw)
    faults.power_cut(at.folder, at.memory, left.folder, at.draw)

    def repair(say: Say) -> None:
        segments.SEGMENT_BYTES = left.segment_bytes
        faults.watch(left.folder, left.memory)
        faults.settle(left.folder)
        faults.fail(faults.ANY, faults.DIE, second, at.draw.randrange(2000))
        store = PatternStore()
        for n in (9, 10):
            with open_cold(at.kind, left.store, store.identity()) as cold:
                spill_aloud(cold, store, n, say)
                cold.gc()

    # gc takes the pages of a spill that was cut short, so only whole sequences are promised.
    whole = {words[1] for words in said if words[0] == "stored"}
    said = [words for words in said if words[0] != "batch" or words[1] in whole]
    try:
        return _after_power_cut(left, said + forked(repair), torn=True)
    finally:
        shutil.rmtree(left.folder)
        shutil.rmtree(left.memory)


def failed_read(at: Round) -> Crash:
    """EIO from reads, as the store opens and as pages come back: refused, and nothing is lost by it."""
    after, rebuild = at.draw.randrange(12), at.draw.random() < 0.5

    def read(say: Say) -> None:
        write_some(at.kind, at.store, say)
        if at.kind == "Z2" and rebuild:  # then everything is read at once
            shutil.rmtree(at.store / "index")
        store = PatternStore()
        faults.watch(at.folder)
        faults.fail(faults.READ, errno.EIO, after)
        with (
            contextlib.suppress(ColdError),
            open_cold(at.kind, at.store, store.identity()) as cold,
        ):
            for n in (0, 2, 3):
                with contextlib.suppress(ColdError):
                    compare(cold, store, n, 0, say)
        faults.fail(faults.ANY, 0)

    said = forked(read)
    result = check(at.kind, at.store, [words for words in said if words[0] != "recovered"])
    result.problems += [" ".join(words[1:]) for words in said if words[0] == "problem"]
    return result


def failing(at: Round, call: int, error: int) -> Crash:
    """From some call on the disk refuses; it is well again afterwards, and the store is reopened."""
    after, keep = at.draw.randrange(6), at.draw.randrange(600)

    def write(say: Say) -> None:
        store = PatternStore()
        faults.watch(at.folder)
        cold = open_cold(at.kind, at.store, store.identity())
        spill_aloud(cold, store, 0, say)
        faults.fail(call, error, after, keep)
        try:
            for n in (1, 2, 3):
                spill_aloud(cold, store, n, say)
            say("refused", "nothing")
        except ColdError as refused:
            say("refused", type(refused).__name__)
            if call == faults.SYNC:
                _expect_poisoned(cold, say)
        faults.fail(faults.ANY, 0)
        with contextlib.suppress(ColdError):
            cold.close()
        with open_cold(at.kind, at.store, store.identity()) as cold:
            spill_aloud(cold, store, 4, say)

    said = forked(write)
    result = check(at.kind, at.store, [w for w in said if w[0] != "refused"])
    refusals = [w[1] for w in said if w[0] == "refused"]
    if refusals != ["nothing"] and error == faults.SHORT:
        result.problems.append(f"short writes were not continued: {refusals}")
    if "unpoisoned" in refusals or not {*refusals} - {"unpoisoned"}:
        result.problems.append("a failed sync did not poison the store")
    return result


def _expect_poisoned(cold: ColdStore, say: Say) -> None:
    try:
        cold.catalogue()
        say("refused", "unpoisoned")
    except StorePoisoned:
        pass


def full_disk(at: Round) -> Crash:
    """ENOSPC in the middle of a batch."""
    return failing(at, faults.WRITE, errno.ENOSPC)


def failed_write(at: Round) -> Crash:
    """EIO from a write."""
    return failing(at, faults.WRITE, errno.EIO)


def failed_sync(at: Round) -> Crash:
    """EIO from a sync."""
    return failing(at, faults.SYNC, errno.EIO)


def short_writes(at: Round) -> Crash:
    """Every write takes fewer bytes than it is given."""
    return failing(at, faults.WRITE, faults.SHORT)


def truncated(at: Round) -> Crash:
    """The file that was written last ends at some byte of its last records."""
    said = forked(lambda say: write_and_die(at.kind, at.store, say))
    name, whole = said[-1][-2:]
    ends = [int(w[-1]) for w in said if w[0] in ("batch", "stored") and w[-2] == name]
    cut = at.draw.randrange(ends[0], int(whole))
    (path,) = at.store.rglob(name)
    os.truncate(path, cut)
    kept = [w for w in said if w[-2] != name or int(w[-1]) <= cut]
    lost = Promise.of(said).rows.keys() - {int(w[1]) for w in kept if w[0] == "stored"}
    return check(at.kind, at.store, kept, lost=frozenset(lost))


def flipped_bit(at: Round) -> Crash:
    """One bit of one file is another: what it hits is named, and nothing else is lost.

    Of the batch that was written last it may look like a write that was cut short, so that one may be
    missing without a word.
    """
    said = forked(lambda say: write_and_die(at.kind, at.store, say))
    files = [p for p in at.store.rglob("*") if p.is_file() and not p.name.startswith("LO")]
    sizes = [p.stat().st_size for p in files]
    (path,) = at.draw.choices(files, sizes)
    with path.open("r+b") as file:
        place = at.draw.randrange(path.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << at.draw.randrange(8)]))
    promise = Promise.of(said)
    result = Crash(acknowledged=len(promise.rows) - len(promise.doubtful))
    last = max(promise.rows)

    def look(say: Say) -> None:
        store = PatternStore()
        try:
            cold = open_cold(at.kind, at.store, store.identity())
        except ColdError as error:
            if path.suffix == ".seg":  # the index is sound, and nothing is replayed
                say("problem", f"a damaged segment keeps the store from opening: {error}")
            return
        with contextlib.suppress(ColdError), cold:  # closing names damage too
            try:
                named = {key for damage in cold.verify() for key in damage.sequences}
            except ColdError:  # the index itself
                named = {key_of(store, n) for n in promise.rows}
            for n, rows in promise.rows.items():
                if n in promise.doubtful:
                    continue
                missing = n == last or key_of(store, n) in named
                try:
                    compare(cold, store, n, 0 if missing else rows, say)
                except ColdError as error:
                    if not missing:
                        say("problem", f"sequence {n} was not named, and {error}")

    for word, *rest in forked(look):
        if word == "recovered":
            result.recovered += 1
        else:
            result.problems.append(f"{path.name} at {place}: {' '.join([word, *rest])}")
    return result


def lost_index(at: Round) -> Crash:
    """The index is deleted; Z2 builds it from the segments. For Z1 it is the store."""
    said = forked(lambda say: write_some(at.kind, at.store, say))
    if at.kind == "Z2":
        shutil.rmtree(at.store / "index")
    return check(at.kind, at.store, said)


def two_processes(at: Round) -> Crash:
    """A second opener is refused while the first lives, and only so long."""

    def hold(say: Say) -> None:
        with open_cold(at.kind, at.store, PatternStore().identity()):
            say("ready")
            signal.pause()

    def attempt(say: Say) -> None:
        try:
            open_cold(at.kind, at.store, PatternStore().identity()).close()
            say("opened")
        except StoreLocked:
            say("locked")

    seen: Said = []

    def meanwhile(pid: int) -> None:
        seen.extend(forked(attempt))
        os.kill(pid, signal.SIGKILL)

    forked(hold, meanwhile)
    seen += forked(attempt)
    result = check(at.kind, at.store, [])
    if seen != [["locked"], ["opened"]]:
        result.problems.append(f"expected locked, then opened; it was {seen}")
    return result


#: Name -> (fault, whether the disk has to fail).
FAULTS: dict[str, tuple[Callable[[Round], Crash], bool]] = {
    "kill": (killed, False),
    "power cut": (power_cut, True),
    "torn write": (torn_write, True),
    "killed, then power cut": (killed_then_power_cut, True),
    "power cut in the repair": (power_cut_in_repair, True),
    "full disk": (full_disk, True),
    "failed write": (failed_write, True),
    "failed sync": (failed_sync, True),
    "failed read": (failed_read, True),
    "short writes": (short_writes, True),
    "truncated": (truncated, False),
    "flipped bit": (flipped_bit, False),
    "lost index": (lost_index, False),
    "two processes": (two_processes, False),
}


def rounds_of(name: str, kind: str, folder: Path, rounds: int, seed: int) -> list[Crash]:
    """So many rounds of one fault; the folder is gone afterwards."""
    fault, _ = FAULTS[name]
    results: list[Crash] = []
    for n in range(rounds):
        folder.mkdir(parents=True, exist_ok=True)
        at = Round(kind, folder, random.Random(f"{seed} {name} {kind} {n}"))
        at.first = results[-1].next_sequence if results and fault is killed else 0
        results.append(fault(at))
        if fault is not killed:
            shutil.rmtree(folder)
        shutil.rmtree(at.memory)
    shutil.rmtree(folder, ignore_errors=True)
    return results


# --------------------------------------------------------------------------------------------------
# Syncs


def syncs_of_batches(kind: str, folder: Path, batches: int) -> list[int]:
    """Calls of fsync and fdatasync between the acknowledgements of a spill, by whoever made them."""
    folder.mkdir(parents=True)

    def write(say: Say) -> None:
        def acknowledged(*_: int) -> None:
            say(faults.calls(faults.SYNC))

        faults.watch(folder)
        store = PatternStore()
        rows = store.spec.page_tokens * (batches + 1)
        with open_cold(kind, folder / "cold", store.identity()) as cold:
            session: Any = store.filled(rows)
            # The first batch also makes the first file.
            cold.spill(
                session,
                range(rows),
                batch_pages=1,
                progress=acknowledged,
            )

    counts = [int(words[0]) for words in forked(write)]
    shutil.rmtree(folder)
    return [after - before for before, after in itertools.pairwise(counts)]


def measure(spec: CrashSpec, note: Callable[[str], None]) -> list[Row]:
    """Rows of the matrix: ``cold/crash_recovered`` is 1 for a round in which every promise was kept."""
    rows: list[Row] = []
    for kind in spec.candidates:
        note(kind)
        folder = Path(spec.folder) / kind
        for name, (_, needs_faults) in FAULTS.items():
            if needs_faults and not faults.available():
                text = f"{name}: not run, the failing disk needs Linux and glibc"
                rows.append({"candidate": kind, "metric": "cold/crash_left_out", "text": text})
                continue
            rounds = spec.rounds if name == "kill" else max(1, spec.rounds // 5)
            rows += rows_of(name, kind, rounds_of(name, kind, folder, rounds, spec.seed))
        if faults.available():
            rows += [
                {"candidate": kind, "metric": "cold/fsyncs_per_batch", "index": i, "value": n}
                for i, n in enumerate(syncs_of_batches(kind, folder, spec.batches))
            ]
    return rows


def rows_of(name: str, kind: str, results: list[Crash]) -> list[Row]:
    """Events of one fault's rounds."""
    rows: list[Row] = []
    for index, result in enumerate(results):
        common = {"candidate": kind, "index": index}
        for metric, value in (
            ("crash_recovered", float(not result.problems)),
            ("crash_acknowledged", float(result.acknowledged)),
        ):
            rows.append({**common, "metric": f"cold/{metric}", "value": value, "text": name})
        rows += [
            {**common, "metric": "cold/crash_fault", "text": f"{name}: {problem}"}
            for problem in result.problems
        ]
    return rows


if __name__ == "__main__":
    main(CrashSpec, measure, sys.argv)
