"""Both cold stores against a store of pages of plain bytes: what was spilled comes back bitwise."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from spilling import P

from kvtrial.cold import KINDS, errors, keys, open_cold
from kvtrial.cold.store import RESTORE_PAGES
from kvtrial.contract import InvalidArgument, PoolExhausted, StepIncomplete, StoreSpec
from kvtrial.measure.cold.pattern import PatternStore


def tokens(n):
    return np.arange(n) * 7 % 1000


@pytest.fixture
def cold(kind, store, tmp_path):
    with open_cold(kind, tmp_path / "cold", store.identity()) as opened:
        yield opened


def test_a_spilled_session_comes_back_bitwise(cold, store):
    session = store.filled(3 * P + 5)
    report = cold.spill(session, tokens(3 * P + 5), batch_pages=2)
    assert (report.rows, report.pages_written, report.pages_shared) == (3 * P + 5, 4, 0)
    assert report.batches == 2
    assert report.payload_bytes == 4 * store.spec.layers * store.page_nbytes

    back = store.open_session()
    assert cold.restore(tokens(3 * P + 5), back) == 3 * P + 5
    assert back.contents() == session.contents()
    assert np.array_equal(back.bits, session.bits)


def test_the_longest_prefix_is_restored_in_whole_pages(cold, store):
    session = store.filled(2 * P + 3)
    cold.spill(session, tokens(2 * P + 3))
    longer = np.concatenate([tokens(2 * P + 3), [7, 8, 9]])
    assert cold.contains(longer) == 2 * P + 3  # the partial page is a prefix too
    assert cold.contains(tokens(2 * P + 2)) == 2 * P
    assert cold.contains(tokens(P - 1)) == 0
    other = tokens(2 * P + 3)
    other[P] += 1
    assert cold.contains(other) == P
    back = store.open_session()
    assert cold.restore(other, back) == P
    assert back.contents() == [layer[:1] for layer in session.contents()]


def test_equal_tokens_after_another_beginning_are_another_page(cold, store):
    cold.spill(store.filled(2 * P), tokens(2 * P))
    swapped = np.concatenate([tokens(2 * P)[P:], tokens(2 * P)[:P]])
    assert cold.contains(swapped) == 0


def test_nan_payloads_minus_zero_and_holes_survive(cold, store):
    session = store.filled(2 * P, holes=True)
    session.bits[:, :P] = False  # a whole page of holes in every layer
    session.bits[0, P + 3] = False
    session.bits[1, P:] = False  # and one layer without any valid row
    session.pages[0][1][:16] = np.array([0x7FC0BEEF, 0x80000000, 0xFF800001, 1], "<u4").view(
        np.uint8
    )
    cold.spill(session, tokens(2 * P))
    back = store.open_session(position_holes_allowed=True)
    assert cold.restore(tokens(2 * P), back) == 2 * P
    assert np.array_equal(back.bits, session.bits)
    assert back.pages[0][0] is None and back.pages[1][1] is None
    assert bytes(back.pages[0][1]) == bytes(session.pages[0][1])


def test_spilling_again_writes_nothing(cold, store):
    session = store.filled(2 * P + 1)
    cold.spill(session, tokens(2 * P + 1))
    before = cold.disk_bytes()
    again = cold.spill(session, tokens(2 * P + 1))
    assert (again.pages_written, again.pages_shared, again.batches) == (0, 3, 0)
    assert cold.disk_bytes() == before


def test_what_is_stored_is_shared_by_the_next_process_too(kind, store, tmp_path):
    session = store.filled(2 * P + 1)
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(session, tokens(2 * P + 1))
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        again = cold.spill(session, tokens(2 * P + 1))
    assert (again.pages_written, again.pages_shared, again.payload_bytes) == (0, 3, 0)


def test_a_page_shared_by_prefix_outlives_one_of_its_sequences(cold, store):
    one, two = tokens(3 * P), np.concatenate([tokens(2 * P), 5 + tokens(P)])
    session = store.filled(3 * P)
    cold.spill(session, one)
    assert cold.spill(session, two).pages_shared == 2
    assert cold.delete(one)
    assert not cold.delete(one)
    assert cold.contains(one) == 2 * P
    cold.gc()
    back = store.open_session()
    assert cold.restore(two, back) == 3 * P
    assert back.contents() == session.contents()
    assert cold.verify() == []
    assert [e.rows for e in cold.catalogue()] == [3 * P]


def test_a_store_is_looked_after_without_an_identity(kind, store, tmp_path):
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(3 * P), tokens(3 * P))
        cold.spill(store.filled(P), 1 + tokens(P))
    with open_cold(None, tmp_path / "cold") as cold:
        longer, shorter = sorted(cold.catalogue(), key=lambda entry: -entry.rows)
        assert (longer.rows, longer.pages, shorter.rows) == (3 * P, 3, P)
        seen = []
        assert cold.verify(progress=lambda *done: seen.append(done)) == []
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert cold.delete(longer.key)
        assert not cold.delete(longer.key)
        assert cold.catalogue() == [shorter]
        seen.clear()
        cold.gc(progress=lambda *done: seen.append(done))
        assert seen[-1] == (len(seen), len(seen)) and len(seen) == {"Z1": 4, "Z2": 1}[kind]
        with pytest.raises(InvalidArgument, match="no key of a sequence"):
            cold.delete("a sequence")
        for verb in (
            cold.contains,
            cold.delete,
            lambda ids: cold.restore(ids, store.open_session()),
        ):
            with pytest.raises(InvalidArgument, match="without an identity"):
                verb(tokens(P))
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        assert cold.contains(tokens(3 * P)) == 0
        assert cold.contains(1 + tokens(P)) == P


@pytest.mark.parametrize("between", ["one opening", "another opening"])
def test_deleted_space_comes_back_and_deleted_pages_do_not(kind, store, tmp_path, between):
    session = store.filled(8 * P)
    if between == "another opening":  # where a file holds what stays and what goes
        with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
            cold.spill(session, tokens(8 * P))
            cold.spill(session, 1 + tokens(8 * P))
    for reopened in range(2):
        with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
            if not reopened:
                cold.spill(session, tokens(8 * P))
                cold.spill(session, 1 + tokens(8 * P))
                cold.delete(tokens(8 * P))
                cold.gc()
                held = sum(
                    f.stat().st_size
                    for pattern in ("*.blob", "*.seg")
                    for f in (tmp_path / "cold").rglob(pattern)
                )
                payload = 8 * 2 * store.page_nbytes
                assert payload <= held < 1.3 * payload
            assert cold.contains(tokens(8 * P)) == 0
            assert cold.contains(1 + tokens(8 * P)) == 8 * P
            assert cold.verify() == []


def test_a_pool_too_small_changes_nothing(cold, store):
    cold.spill(store.filled(4 * P), tokens(4 * P))
    small = PatternStore(pages=6)
    back = small.open_session()
    with pytest.raises(PoolExhausted):
        cold.restore(tokens(4 * P), back)
    assert back.length(0) == 0 and small.pages_free == 6
    assert cold.restore(tokens(P), back) == P


ANOTHER = {
    "model_sha256": "another",
    "rope_base": 1e6,
    "activations": "quantised",
    "kernel_abi": 2,
    "head_dim": 32,
    "page_format": "other",
    "page_tokens": 32,
    "layers": 3,
    "kv_heads": 2,
    "base_position": 2,
    "kv_head_range": (0, 1),
}


@pytest.mark.parametrize("name", [field.name for field in fields(keys.Identity)])
def test_another_identity_is_a_miss(kind, store, tmp_path, name):
    identity = store.identity()
    with open_cold(kind, tmp_path / "cold", identity) as cold:
        cold.spill(store.filled(P), tokens(P))
    with open_cold(kind, tmp_path / "cold", replace(identity, **{name: ANOTHER[name]})) as cold:
        assert cold.contains(tokens(P)) == 0


def test_a_session_of_another_page_format_is_refused(cold):
    other = PatternStore(page_tokens=32)
    with pytest.raises(errors.IdentityMismatch, match="page_format"):
        cold.restore(tokens(P), other.open_session())
    with pytest.raises(errors.IdentityMismatch, match="page_format"):
        cold.spill(other.filled(32), tokens(32))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([[1, 2]], "shape"),
        ([0.5], "dtype"),
        ([-1], "ids lie in"),
        ([2**31], "ids lie in"),
        ([1, 2], "2 ids"),
        ([], "0 ids"),
    ],
)
def test_bad_tokens_are_named(cold, store, bad, message):
    with pytest.raises(InvalidArgument, match=message):
        cold.spill(store.filled(P), bad)


def test_an_empty_prompt_restores_nothing(cold, store):
    assert cold.restore([], store.open_session()) == 0
    assert cold.delete([]) is False


def test_a_colliding_key_is_noticed_and_not_served(cold, store, monkeypatch):
    strong = keys.digest
    monkeypatch.setattr(keys, "digest", lambda data: strong(data)[:1].ljust(32, b"\0"))
    session = store.filled(P)
    cold.spill(session, tokens(P))
    mine = next(keys.chain(cold.identity, tokens(P))).key
    other = next(
        t
        for n in range(10_000)
        if next(keys.chain(cold.identity, t := tokens(P) + n + 1)).key == mine
    )
    with pytest.raises(errors.KeyCollision):
        cold.restore(other, store.open_session())
    with pytest.raises(errors.KeyCollision):
        cold.spill(session, other)
    back = store.open_session()
    assert cold.restore(tokens(P), back) == P


def test_the_same_tokens_with_other_holes_are_refused(cold, store):
    session = store.filled(P, holes=True)
    cold.spill(session, tokens(P))
    session.bits[0, 3] = False
    with pytest.raises(errors.KeyCollision, match="other holes"):
        cold.spill(session, tokens(P))


def test_one_opener_at_a_time(kind, store, cold, tmp_path):
    with pytest.raises(errors.StoreLocked, match="open elsewhere"):
        open_cold(kind, tmp_path / "cold", store.identity())
    cold.spill(store.filled(P), tokens(P))  # the refusal did not release the lock
    cold.close()
    cold.close()
    with pytest.raises(errors.StoreClosed):
        cold.contains(tokens(P))
    with open_cold(kind, tmp_path / "cold", store.identity()) as again:
        assert again.contains(tokens(P)) == P


def test_foreign_folders_and_formats_are_refused(kind, store, tmp_path):
    (tmp_path / "photo.jpg").write_bytes(b"")
    with pytest.raises(errors.ForeignStore, match=r"photo\.jpg"):
        open_cold(kind, tmp_path, store.identity())
    assert [p.name for p in tmp_path.iterdir()] == ["photo.jpg"]
    with pytest.raises(errors.ForeignStore, match="is a file"):
        open_cold(kind, tmp_path / "photo.jpg", store.identity())
    other = next(k for k in KINDS if k != kind)
    open_cold(other, tmp_path / "cold", store.identity()).close()
    with pytest.raises(errors.FormatMismatch, match=other):
        open_cold(kind, tmp_path / "cold", store.identity())
    (tmp_path / "cold" / "FORMAT.json").write_text(json.dumps({"format": 0, "kind": kind}))
    with pytest.raises(errors.FormatMismatch, match="'format': 0"):
        open_cold(kind, tmp_path / "cold", store.identity())


def test_the_threads_of_the_session_s_store_share_the_reading(kind, tmp_path):
    store = PatternStore(threads=2)
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        session = store.filled(9 * P + 1)
        cold.spill(session, tokens(9 * P + 1))
        back = store.open_session()
        assert cold.restore(tokens(9 * P + 1), back) == 9 * P + 1
        assert back.contents() == session.contents()


def test_an_unknown_kind_lists_the_known(store, tmp_path):
    with pytest.raises(InvalidArgument, match="Z1, Z2"):
        open_cold("Z3", tmp_path, store.identity())


def test_progress_follows_the_acknowledged_batches(cold, store):
    seen = []
    cold.spill(
        store.filled(5 * P), tokens(5 * P), batch_pages=2, progress=lambda *a: seen.append(a)
    )
    assert seen == [(2, 5), (4, 5), (5, 5)]


def test_progress_of_a_restore_follows_its_pages(cold, store):
    rows = (RESTORE_PAGES + 3) * P
    session = store.filled(rows)
    cold.spill(session, np.arange(rows))
    seen, back = [], store.open_session()
    assert cold.restore(np.arange(rows), back, progress=lambda *a: seen.append(a)) == rows
    assert seen == [(RESTORE_PAGES, RESTORE_PAGES + 3), (RESTORE_PAGES + 3, RESTORE_PAGES + 3)]
    assert back.contents() == session.contents()


def test_a_restore_that_its_progress_ends_leaves_the_session_empty(cold, store):
    rows = (RESTORE_PAGES + 3) * P
    cold.spill(store.filled(rows), np.arange(rows))

    def interrupt(done, to_do):
        raise KeyboardInterrupt

    back = store.open_session()
    with pytest.raises(KeyboardInterrupt):
        cold.restore(np.arange(rows), back, progress=interrupt)
    assert back.length(0) == 0
    assert cold.restore(np.arange(rows), back) == rows


def test_every_acknowledgement_costs_one_sync_in_either_store(cold, store):
    cold.spill(store.filled(P), 9 + tokens(P))  # the first segment and log are there
    syncs = [cold.syncs]
    cold.spill(
        store.filled(5 * P),
        tokens(5 * P),
        batch_pages=2,
        progress=lambda *_: syncs.append(cold.syncs),
    )
    assert np.diff(syncs).tolist() == [1, 1, 1]
    cold.delete(tokens(5 * P))
    assert cold.syncs == syncs[-1] + 1


def test_a_session_inside_a_step_is_refused(cold, store):
    session = store.filled(P)
    session.bits[1, -1] = False
    with pytest.raises(StepIncomplete, match=r"\[15, 16\] rows"):
        cold.spill(session, tokens(P))


SPEC = {"layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "budget_bytes": 1 << 18}


@pytest.mark.parametrize("same", [(0, 1), [0, 1], (np.int32(0), np.int64(1)), np.array([0, 1])])
def test_equal_head_ranges_have_equal_identities(same):
    """Equal pages missed each other: the range went into the key as it was written."""
    store = PatternStore()
    store.spec = StoreSpec(**SPEC, kv_head_range=same)
    found = store.identity()
    store.spec = StoreSpec(**SPEC, kv_head_range=(0, 1))
    assert found == store.identity() and found.digest() == store.identity().digest()


@pytest.mark.parametrize("wrong", [(0.0, 1.0), (0, True), (0, 1, 2), 5, "ab", (None, None)])
def test_a_head_range_that_is_not_two_integers_is_refused_at_the_door(wrong):
    with pytest.raises(InvalidArgument, match=r"kv_head_range is .*; give"):
        StoreSpec(**SPEC, kv_head_range=wrong)


@pytest.mark.parametrize("wrong", [64.0, True, "16", None, 17])
def test_page_tokens_that_are_no_size_of_a_page_are_refused_at_the_door(wrong):
    with pytest.raises(InvalidArgument, match="page_tokens is"):
        StoreSpec(**SPEC, page_tokens=wrong)
