"""RocksDB's log and manifest as a crash or a failing disk leaves them."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
from kvtrial.cold._crc32c import crc32c
from spilling import P

from kvtrial.cold import errors, open_cold, rockslog

LONG = 40 * P  # rows of a batch that takes more than two blocks of the log


def tokens(n, rows=LONG):
    return np.arange(rows) + 10_000 * n


def restored(cold, store, n):
    back = store.open_session()
    rows = cold.restore(tokens(n), back)
    assert not rows or back.contents() == store.filled(LONG, seed=n).contents()
    return rows


@pytest.fixture
def left(store, tmp_path):
    """What a killed process left in ``tmp_path/left``: the log, and its size before the last batch."""
    sizes = []
    with open_cold("Z1", tmp_path / "cold", store.identity()) as cold:
        for n in range(3):
            (log,) = (tmp_path / "cold" / "index").glob("*.log")
            sizes.append(log.stat().st_size)
            cold.spill(store.filled(LONG, seed=n), tokens(n), batch_pages=64)
        shutil.copytree(tmp_path / "cold", tmp_path / "left")
    return tmp_path / "left" / "index" / log.name, sizes[-1]


@pytest.mark.parametrize(
    ("data", "want"),
    [(b"", 0), (b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_the_sum_is_crc32c(data, want):
    assert crc32c(data) == want


def test_what_rocksdb_wrote_is_whole_to_its_last_byte(left):
    log, _ = left
    data = memoryview(log.read_bytes())
    assert rockslog.whole_until(data) == len(data) > 3 * rockslog.BLOCK_BYTES
    assert rockslog.cut_torn_tail(log.parent) == 0


@pytest.mark.parametrize("block", [512, 4096])
@pytest.mark.parametrize("what", ["zeros at the end", "zeros", "others", "nothing", "longer"])
def test_a_torn_last_batch_is_cut_off_in_whatever_order_its_blocks_came(
    store, left, tmp_path, block, what
):
    log, before = left
    draw = random.Random(f"{what} {block}")
    data = bytearray(log.read_bytes())
    blocks = range(before // block * block, len(data), block)
    chosen = {
        "zeros at the end": blocks[draw.randrange(len(blocks)) :],
        "nothing": blocks,
    }.get(what, [at for at in blocks if draw.random() < 0.5] or blocks)
    for at in chosen:
        place = slice(max(at, before), min(at + block, len(data)))
        n = place.stop - place.start
        data[place] = draw.randbytes(n) if what == "others" else bytes(n)
    log.write_bytes(data + bytes(9000 if what == "longer" else 0))
    for again in (3, 4):
        with open_cold("Z1", tmp_path / "left", store.identity()) as cold:
            assert [restored(cold, store, n) for n in range(3)] == [LONG, LONG, 0]
            assert cold.verify() == [] and len(cold.catalogue()) == again - 1
            cold.spill(store.filled(LONG, seed=again), tokens(again))


@pytest.mark.parametrize("what", ["a bit", "its header", "a block"])
def test_damage_before_an_entry_that_is_whole_is_no_torn_tail(store, left, tmp_path, what):
    """A header of zeros ended RocksDB's reading: what stood behind it was gone without a word."""
    log, before = left
    data = bytearray(log.read_bytes())
    first = rockslog.BLOCK_BYTES if what == "a block" else 0
    if what == "a bit":
        data[before // 2] ^= 1
    else:
        data[first : first + (7 if what == "its header" else 4096)] = bytes(
            7 if what == "its header" else 4096
        )
    log.write_bytes(data)
    with pytest.raises(
        errors.CorruptIndex, match=rf"{log.name} at offset \d+: an entry is damaged"
    ):
        open_cold("Z1", tmp_path / "left", store.identity())
    assert log.read_bytes() == data


OPEN_ALL = """
import json, shutil, sys
from pathlib import Path
from kvtrial.cold import open_cold, errors
from kvtrial.measure.cold.pattern import PatternStore
kind, folder, places = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
(manifest,) = (folder / "index").glob("MANIFEST-*")
whole, said, identity = manifest.read_bytes(), set(), PatternStore().identity()
for at in places:
    data = bytearray(whole)
    data[at] ^= 4
    manifest.write_bytes(data)
    try:
        open_cold(kind, folder, identity).close()
        said.add("opened")
    except errors.ColdError as error:
        said.add(f"{type(error).__name__} {manifest.name in str(error)}")
    assert manifest.read_bytes() == data
manifest.write_bytes(whole)
with open_cold(kind, folder, identity) as cold: said.add(len(cold.verify()))
print(json.dumps(sorted(said, key=str)))
"""


@pytest.mark.parametrize("kind", ["Z1", "Z2"])
def test_a_flipped_bit_in_the_manifest_is_named_and_read_once(kind, store, tmp_path):
    """With the type of a record changed from 1 to 5 RocksDB read on for ever."""
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(2 * P), tokens(0, 2 * P))
    (manifest,) = (tmp_path / "cold" / "index").glob("MANIFEST-*")
    data, types, at = memoryview(manifest.read_bytes()), [], 0
    while (found := rockslog.fragment_at(data, at)) is not None:
        types.append(at + 6)
        at = found.end
    assert at == len(data) and len(types) > 5
    places = json.dumps([*types, *(at - 6 for at in types), *(at - 2 for at in types[:-1])])
    command = [sys.executable, "-c", OPEN_ALL, kind, tmp_path / "cold", places]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60)
    assert json.loads(done.stdout) == [0, "CorruptIndex True"]


def test_a_manifest_that_the_files_end_cuts_short_is_rocksdbs_to_forgive(store, tmp_path):
    with open_cold("Z2", tmp_path / "cold", store.identity()) as cold:
        cold.spill(store.filled(2 * P), tokens(0, 2 * P))
        shutil.copytree(tmp_path / "cold", tmp_path / "left")
    (manifest,) = (tmp_path / "left" / "index").glob("MANIFEST-*")
    whole = manifest.read_bytes()
    for tail in (b"\0\0", whole[:9], bytes(5000)):
        manifest.write_bytes(whole + tail)
        rockslog.refuse_damaged_manifest(manifest.parent, "")
    with open_cold("Z2", tmp_path / "left", store.identity()) as cold:
        assert cold.verify() == []


@pytest.mark.parametrize("kind", ["Z1", "Z2"])
def test_sequences_spilled_one_an_opening_leave_few_files(kind, store, tmp_path):
    """Each left a file of one key for good; past the limit on open files nothing opened."""
    for n in range(24):
        with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
            cold.spill(store.filled(P, seed=n), tokens(n, P))
    with open_cold(kind, tmp_path / "cold", store.identity()) as cold:
        assert [cold.contains(tokens(n, P)) for n in range(24)] == [P] * 24
        assert len(list((tmp_path / "cold" / "index").glob("*.sst"))) <= 16
