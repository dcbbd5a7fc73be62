"""Forks of a process that has a store open, and verbs that are called from each other's progress.

What fails here hangs, so each case is a process of its own with a limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from spilling import P

from kvtrial.cold import errors, index, open_cold
from kvtrial.measure.cold.pattern import PatternStore

HEAD = """
import json, os, signal, sys, threading
from pathlib import Path
import numpy as np
from kvtrial.cold import open_cold, errors
from kvtrial.measure.cold.pattern import PatternStore
kind, folder, out = sys.argv[1], Path(sys.argv[2]), []
store = PatternStore()
def opened(name="cold"): return open_cold(kind, folder / name, store.identity())
def tokens(n): return np.arange(32) + 1000 * n
def spill(cold, n, **more): return cold.spill(store.filled(32, seed=n), tokens(n), **more)
def rows(cold, n):
    back = store.open_session()
    found = cold.restore(tokens(n), back)
    return found if not found or back.contents() == store.filled(32, seed=n).contents() else "wrong"
def tried(work):
    try: return work()
    except errors.ColdError as error: return type(error).__name__
def forked(work):
    '''What a forked child's work gives; it ends as one that knows nothing of stores does.'''
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, json.dumps(tried(work)).encode())
        os.close(writing)
        raise SystemExit
    os.close(writing)
    with os.fdopen(reading) as said: words = json.loads(said.read())
    os.waitpid(pid, 0)
    return words
"""


def python(code: str, kind: str, folder: Path) -> list:
    """What the code puts into ``out``."""
    text = f"{HEAD}{textwrap.dedent(code)}\nprint(json.dumps(out))"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", text, kind, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_fork_writes_nothing_and_takes_nothing_from_its_parent(kind, tmp_path):
    out = python(
        """
        cold = opened()
        spill(cold, 0)
        # Both would append at one place; each verb of the child is refused.
        out.append(forked(lambda: [tried(verb) for verb in (
            lambda: spill(cold, 1), lambda: rows(cold, 0), cold.gc, lambda: cold.delete(tokens(0)),
            cold.verify, lambda: cold.contains(tokens(0)))]))
        spill(cold, 2)
        out.append(forked(cold.close))  # which does nothing, and comes back
        spill(cold, 3)
        cold.close()
        # RocksDB's threads are the process's: not even a folder of its own works in a fork.
        out.append(forked(lambda: opened("other").close()))
        with opened() as cold:
            out.append([rows(cold, n) for n in range(4)] + [len(cold.verify())])
        """,
        kind,
        tmp_path,
    )
    assert out == [["ForkedProcess"] * 6, None, "ForkedProcess", [32, 0, 32, 32, 0]]


def test_a_fork_that_lives_on_does_not_hold_its_killed_parents_lock(kind, tmp_path):
    out = python(
        """
        reading, writing = os.pipe()
        parent = os.fork()
        if parent == 0:
            cold = opened()
            spill(cold, 0)
            child = os.fork()
            if child == 0:
                signal.pause()
            os.write(writing, b"%d" % child)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(parent, 0)
        child = int(os.read(reading, 20))
        try:
            with opened() as cold: out.append(rows(cold, 0))
        finally:
            os.kill(child, signal.SIGKILL)
        """,
        kind,
        tmp_path,
    )
    assert out == [32]


def test_a_process_forked_before_the_first_store_was_opened_has_its_own(kind, tmp_path):
    out = python(
        """
        def work():
            with opened("child") as cold:
                spill(cold, 1)
                return rows(cold, 1)
        out.append(forked(work))
        with opened() as cold:
            spill(cold, 0)
            out.append(rows(cold, 0))
        """,
        kind,
        tmp_path,
    )
    assert out == [32, 32]


def test_gc_beside_a_spill_that_makes_room_waits_for_nobody_who_waits_for_it(kind, tmp_path):
    out = python(
        """
        with opened() as cold:
            for n in range(8): spill(cold, n)
            for n in range(1, 8, 2): cold.delete(tokens(n))
            collecting, spilling = threading.Event(), threading.Event()
            def between(done, to_do):  # gc holds what only a gc holds, and lets others in
                collecting.set()
                spilling.wait()
            other = threading.Thread(target=cold.gc, args=(between,))
            def make_room(done, to_do):
                if not other.ident: other.start()
                collecting.wait()
                spilling.set()
                out.append(cold.gc())
            if kind == "Z1":  # whose gc takes a step before it says so
                other.start()
                collecting.wait()
            else:
                other = threading.Thread(target=lambda: (collecting.set(), cold.gc()))
            spill(cold, 40, batch_pages=1, progress=make_room)
            other.join()
            out.append([rows(cold, n) for n in (0, 1, 2, 40)] + [len(cold.verify())])
        """,
        kind,
        tmp_path,
    )
    assert out[-1] == [32, 0, 32, 32, 0]
    assert len(out) == 3


def test_gc_from_its_own_progress_leaves_the_work_to_the_one_around_it(kind, tmp_path):
    out = python(
        """
        with opened() as cold:
            for n in range(4): spill(cold, n)
            for n in (0, 1, 2): cold.delete(tokens(n))
            inner = []
            freed = cold.gc(lambda done, to_do: inner.append(cold.gc()))
            out += [sorted(set(inner)), rows(cold, 3), len(cold.verify())]
        """,
        kind,
        tmp_path,
    )
    assert out == [[0], 32, 0]


def test_a_spill_whose_progress_closes_the_store_writes_nothing_more(kind, tmp_path):
    store = PatternStore()
    cold = open_cold(kind, tmp_path / "cold", store.identity())

    def close_and_let_another_in(done, to_do):
        cold.close()
        with open_cold(kind, tmp_path / "cold", store.identity()) as other:
            other.spill(store.filled(2 * P, seed=7), np.arange(2 * P) + 7000)

    with pytest.raises(errors.StoreClosed):
        cold.spill(
            store.filled(3 * P), np.arange(3 * P), batch_pages=1, progress=close_and_let_another_in
        )
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        back = store.open_session()
        assert cold.restore(np.arange(2 * P) + 7000, back) == 2 * P
        assert back.contents() == store.filled(2 * P, seed=7).contents()
        assert cold.contains(np.arange(3 * P)) == P and cold.verify() == []


def test_a_spill_whose_progress_poisons_the_store_writes_nothing_more(tmp_path, monkeypatch):
    store = PatternStore()
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:

        def interrupted(fd):
            raise KeyboardInterrupt

        def poison(done, to_do):
            if done > 1:
                return
            with monkeypatch.context() as patch:
                patch.setattr("kvtrial.cold.disk.fsync", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    cold.gc()

        cold.spill(store.filled(P, seed=9), np.arange(P) + 9000)
        cold.delete(np.arange(P) + 9000)
        with pytest.raises(errors.StorePoisoned, match="KeyboardInterrupt"):
            cold.spill(store.filled(3 * P), np.arange(3 * P), batch_pages=1, progress=poison)


def test_an_interrupted_close_leaves_the_store_closed(kind, tmp_path, monkeypatch):
    store = PatternStore()
    cold = open_cold(kind, tmp_path / "cold", store.identity())
    cold.spill(store.filled(P), np.arange(P))

    def interrupted(self):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(index.Index, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cold.close()
    cold.close()  # which does nothing more
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        assert cold.contains(np.arange(P)) == P
