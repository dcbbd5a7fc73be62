"""Restores, spills and gc of several threads beside each other."""

from __future__ import annotations

import threading

import pytest
from spilling import P, tokens

from kvtrial.cold import KINDS, open_cold, segments
from kvtrial.cold.store import ColdStore


@pytest.fixture(params=sorted(KINDS))
def cold(request, store, tmp_path):
    with open_cold(request.param, tmp_path / "cold", store.identity()) as opened:
        yield opened


def hooked(store, before_reading):
    """A session in which something happens after its pages were found and before they are read."""
    session = store.open_session()
    begin = session.begin_restore

    def begin_restore(valid):
        views = begin(valid)
        before_reading()
        return views

    session.begin_restore = begin_restore
    return session


def test_a_reader_goes_on_while_its_pages_are_deleted_and_collected(cold, store, tmp_path):
    want = store.filled(3 * P, seed=1)
    cold.spill(want, tokens(3 * P))

    def delete_and_collect():
        assert cold.delete(tokens(3 * P))
        thread = threading.Thread(target=cold.gc)  # another thread: it is not held up by the reader
        thread.start()
        thread.join()
        assert cold.contains(tokens(3 * P)) == 0
        assert not (tmp_path / "cold" / "segments" / "00000001.seg").exists()

    session = hooked(store, delete_and_collect)
    assert cold.restore(tokens(3 * P), session) == 3 * P
    assert session.contents() == want.contents()


def test_verify_lets_others_in_and_leaves_out_what_they_delete(cold, store):
    """A page that goes between the list and its turn is no damage; a restore comes in on the way."""
    want = store.filled(2 * P, seed=1)
    cold.spill(want, tokens(2 * P, 1))
    cold.spill(store.filled(4 * P, seed=2), tokens(4 * P, 2))
    rows = []

    def restore_and_delete():
        back = store.open_session()
        rows.append((cold.restore(tokens(2 * P, 1), back), back.contents() == want.contents()))
        rows.append(cold.delete(tokens(4 * P, 2)))

    def meanwhile(done, pages):
        if done == 1:
            thread = threading.Thread(target=restore_and_delete)
            thread.start()
            thread.join()
        seen.append((done, pages))

    seen: list[tuple[int, int]] = []
    assert cold.verify(meanwhile) == []
    assert rows == [(2 * P, True), True]
    assert seen == [(n, 6) for n in range(1, 7)]
    assert cold.contains(tokens(4 * P, 2)) == 0


def test_a_spill_between_the_steps_of_gc_survives(store, tmp_path, monkeypatch):
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        for first in range(4):
            cold.spill(store.filled(2 * P, seed=first), tokens(2 * P, first))
        for first in range(3):
            cold.delete(tokens(2 * P, first))
        scan = segments.SegmentLog.scan

        def scan_and_spill(log, number, end):
            for n, found in enumerate(scan(log, number, end)):
                if n == 2:
                    cold.spill(store.filled(2 * P, seed=1), tokens(2 * P, 1))  # deleted, and back
                    cold.spill(store.filled(2 * P, seed=9), tokens(2 * P, 9))
                yield found

        monkeypatch.setattr(segments.SegmentLog, "scan", scan_and_spill)
        cold.gc()
        assert not (tmp_path / "cold" / "segments" / "00000001.seg").exists()
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        for first in (1, 3, 9):
            back = store.open_session()
            assert cold.restore(tokens(2 * P, first), back) == 2 * P
            assert back.contents() == store.filled(2 * P, seed=first).contents()
        assert cold.verify() == []


def test_a_spill_between_the_scan_and_the_delete_of_orphans_survives(cold, store, monkeypatch):
    """Its pages are orphans as gc looks, and the spill would write none of them again."""

    class Interrupted(Exception):
        pass

    def interrupt(done, total):
        raise Interrupted

    session = store.filled(2 * P)
    with pytest.raises(Interrupted):
        cold.spill(session, tokens(2 * P), batch_pages=1, progress=interrupt)
    drop, begun = ColdStore._poisoning, threading.Event()
    spiller = threading.Thread(
        target=lambda: (begun.set(), cold.spill(session, tokens(2 * P))), daemon=True
    )

    def drop_later(self, write, *args):
        if threading.current_thread() is not spiller and not begun.is_set():
            spiller.start()
            begun.wait()
            spiller.join(0.2)  # as far as it comes: it has to wait for gc's step
        return drop(self, write, *args)

    monkeypatch.setattr(ColdStore, "_poisoning", drop_later)
    cold.gc()
    spiller.join()
    assert cold.contains(tokens(2 * P)) == 2 * P
    assert cold.verify() == []


def test_threads_restore_while_others_spill_and_collect(cold, store):
    for first in range(3):
        cold.spill(store.filled(2 * P, seed=first), tokens(2 * P, first))
    wrong: list[object] = []

    def restore(first):
        for _ in range(8):
            back = store.open_session()
            rows = cold.restore(tokens(2 * P, first), back)
            if back.contents() != store.filled(2 * P, seed=first).contents() or rows != 2 * P:
                wrong.append((first, rows))

    def churn():
        for n in range(10, 14):
            cold.spill(store.filled(2 * P, seed=n), tokens(2 * P, n))
            cold.delete(tokens(2 * P, n))
            cold.gc()

    threads = [threading.Thread(target=restore, args=(n,)) for n in range(3)]
    threads.append(threading.Thread(target=churn))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and cold.verify() == []
