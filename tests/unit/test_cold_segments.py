"""The segment log alone: every cut, every flipped bit, every way in which a write goes wrong."""

from __future__ import annotations

import errno
import os
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
from kvtrial.cold._reader import SHORT_BYTES, WINDOW_BYTES, checksum

from kvtrial.cold import errors, segments
from kvtrial.cold.records import FILE_HEADER_BYTES, HEADER_BYTES, MAGIC, PAGE, Header, Record
from kvtrial.cold.recovery import recover
from kvtrial.cold.segments import SegmentLog, Wanted


def key(name: str) -> bytes:
    return name.encode().ljust(32, b"\0")


def record(name: str, n: int = 40) -> Record:
    """Two pages: one that is checked as it is read, and with ``n`` up to 240 both that are not."""
    return Record(PAGE, key(name), b"meta of " + name.encode(), [name.encode() * n, b"x" * n])


def opened(folder) -> tuple[SegmentLog, list[str]]:
    """A recovered log and the names of the records in it, batch by batch."""
    log = SegmentLog(folder)
    names = [
        "".join(f.header.key.rstrip(b"\0").decode() for f in batch) for batch in recover(log, None)
    ]
    return log, names


def wanted(log, name, location) -> tuple[Wanted, bytearray]:
    into = bytearray(location.payload_nbytes)
    file = log.file(location.segment)
    return Wanted(key(name), file, location, location.split(memoryview(into))), into


def payload(log, location, name):
    item, into = wanted(log, name, location)
    ((meta,), spent_ns) = log.read([item])
    assert meta == b"meta of " + name.encode() and (spent_ns >= 0).all()
    return bytes(into)


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_records_come_back_by_any_number_of_threads(folder, threads):
    log, _ = opened(folder)
    where = log.append([record("a"), record("b", 300)]) + log.append([record("c", 70_000)])
    items, buffers = zip(*(wanted(log, n, w) for n, w in zip("abc", where)))
    metas, spent_ns = log.read(items, threads)
    assert metas == [b"meta of a", b"meta of b", b"meta of c"]
    assert [bytes(b) for b in buffers] == [
        n.encode() * size + b"x" * size for n, size in zip("abc", (40, 300, 70_000))
    ]
    assert spent_ns.shape == (2,) and spent_ns[0] > 0
    log.close()


@pytest.mark.parametrize("size", [241, 1024, 1025, 49_152, 65_537, WINDOW_BYTES, WINDOW_BYTES + 1])
@pytest.mark.parametrize("start", [0, 32, 1])  # as a pool aligns its pages, and not at all
def test_pages_of_any_size_come_to_any_place_and_nothing_beside_them_is_touched(
    folder, size, start
):
    pages = [np.random.default_rng(n).bytes(size) for n in range(9)]
    log, _ = opened(folder)
    (where,) = log.append([Record(PAGE, key("a"), b"meta of a", pages)])
    step = size + 64 + -size % 64
    memory = np.full(9 * step + 128, 0xAB, np.uint8)
    first = start + -memory.ctypes.data % 64
    places = [slice(at, at + size) for at in range(first, first + 9 * step, step)]
    views = [memoryview(memory)[place] for place in places]
    log.read([Wanted(key("a"), log.file(1), where, views)])
    assert [bytes(view) for view in views] == pages
    for place in places:
        memory[place] = 0xAB
    assert (memory == 0xAB).all()
    damaged = bytearray(log.path(1).read_bytes())
    damaged[-size - 1] ^= 4  # the last byte of the last page but one
    log.path(1).write_bytes(damaged)
    with pytest.raises(errors.CorruptSegment, match="payload's checksum is wrong in page 7"):
        log.read([Wanted(key("a"), log.file(1), where, views)])
    log.close()


@pytest.mark.parametrize("size", [1, 63, 64, 240, 241, 1023, 1024, 1025, 2048, 49_152, 100_003])
def test_the_readers_sum_is_xxh3(size):
    data = np.random.default_rng(size).bytes(size + 1)
    for start in (0, 1):  # any alignment
        part = memoryview(data)[start : start + size]
        if size <= SHORT_BYTES:
            with pytest.raises(ValueError, match=f"{size} bytes"):
                checksum(part)
        else:
            assert checksum(part) == xxhash.xxh3_64_intdigest(part)


def test_a_cut_at_any_byte_of_the_last_batch_costs_that_batch_alone(folder):
    log, _ = opened(folder)
    log.append([record("a")])
    start = log.end.offset
    log.append([record("b"), record("c")])
    end = log.end.offset
    log.close()
    whole = log.path(1).read_bytes()
    assert len(whole) == end
    for cut in range(start, end):
        log.path(1).write_bytes(whole[:cut])
        log, names = opened(folder)
        assert names == ["a"]
        assert log.recovered.truncated_bytes == cut - start
        assert log.size(1) == start
        # The point: what is written after a torn tail survives the next opening.
        log.append([record("d")])
        log.close()
        log, names = opened(folder)
        assert names == ["a", "d"] and log.recovered.truncated_bytes == 0
        log.close()


def test_a_cut_inside_the_file_header_gives_an_empty_log(folder):
    log, _ = opened(folder)
    log.append([record("a")])
    log.close()
    whole = log.path(1).read_bytes()
    for cut in range(FILE_HEADER_BYTES):
        log.path(1).write_bytes(whole[:cut])
        log, names = opened(folder)
        assert names == []
        log.append([record("b")])
        log.close()
        assert opened(folder)[1] == ["b"]


def test_a_segment_whose_first_batch_was_torn_header_and_all_is_begun_again(folder, monkeypatch):
    """Its later blocks may have reached the disk before the first: they hold no acknowledged batch."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    log, _ = opened(folder)
    log.append([record("a")])
    log.append([record("b", 2000), record("c", 2000)])
    log.close()
    whole = log.path(2).read_bytes()
    log.path(2).write_bytes(bytes(512) + whole[512:])
    log, names = opened(folder)
    assert names == ["a"] and log.recovered.truncated_bytes == len(whole)
    log.append([record("d")])
    log.close()
    assert opened(folder)[1] == ["a", "d"]


def test_a_batch_that_was_rolled_back_stays_so_once_another_segment_has_begun(folder, monkeypatch):
    """A power cut undoes a truncation that was not synced: then a torn batch stands in a sealed file."""
    log, _ = opened(folder)
    log.append([record("a")])
    lasts, cut = {}, []
    real_sync, real_cut = os.fdatasync, os.ftruncate

    def synced(fd):
        real_sync(fd)
        lasts[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    def truncated(fd, size):
        cut.append(os.fstat(fd).st_ino)
        real_cut(fd, size)

    def full(fd, buffers, offset, real=os.pwritev):
        if len(buffers) > 3:
            real(fd, buffers[:2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(os, "ftruncate", truncated)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(errors.DiskFull):
        log.append([record("b"), record("c")])
    assert lasts == {cut[0]: log.size(1)}  # durable before anything else is begun
    log.close()


def test_a_flipped_bit_anywhere_in_a_file_header_is_named(folder):
    log, _ = opened(folder)
    log.append([record("a")])
    log.close()
    path = log.path(1)
    whole = path.read_bytes()
    for bit in range(8 * FILE_HEADER_BYTES):
        path.write_bytes(
            whole[: bit // 8] + bytes([whole[bit // 8] ^ 1 << bit % 8]) + whole[bit // 8 + 1 :]
        )
        log = SegmentLog(folder)
        with pytest.raises(errors.CorruptSegment, match="at offset 0: the file header is damaged"):
            list(recover(log, None))
        log.close()


@pytest.mark.parametrize("n", [40, 250])
def test_a_flipped_bit_anywhere_in_a_record_is_named_on_read(folder, n):
    log, _ = opened(folder)
    log.append([record("a")])
    (where,) = log.append([record("b", n)])
    path = log.path(1)
    whole = path.read_bytes()
    fd = os.open(path, os.O_RDWR)
    for byte in range(where.offset, where.offset + where.nbytes):
        for bit in range(8) if byte < where.offset + HEADER_BYTES else (byte % 8,):
            os.pwrite(fd, bytes([whole[byte] ^ 1 << bit]), byte)
            with pytest.raises(
                errors.CorruptSegment, match=rf"00000001.seg at offset {where.offset}"
            ):
                payload(log, where, "b")
            os.pwrite(fd, whole[byte : byte + 1], byte)
    assert payload(log, where, "b") == b"b" * n + b"x" * n
    os.close(fd)
    log.close()


def test_a_damaged_batch_with_later_ones_behind_it_is_no_torn_tail(folder):
    log, _ = opened(folder)
    (a,) = log.append([record("a")])
    log.append([record("b")])
    log.append([record("c")])
    log.close()
    path = log.path(1)
    whole = path.read_bytes()
    for byte in range(a.offset, a.offset + a.nbytes):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 16]) + whole[byte + 1 :])
        log = SegmentLog(folder)
        with pytest.raises(errors.CorruptSegment, match=rf"at offset {a.offset}: batch 1"):
            list(recover(log, None))
        log.close()
        assert path.stat().st_size == len(whole)  # nothing was cut


def test_a_garbage_length_allocates_nothing(folder):
    log, _ = opened(folder)
    (where,) = log.append([record("a")])
    log.close()
    data = bytearray(log.path(1).read_bytes())
    data[where.offset + 24 : where.offset + 40] = b"\xff" * 16  # meta, pages, payload
    log.path(1).write_bytes(data)
    tracemalloc.start()
    log, names = opened(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert names == [] and peak < 4 << 20
    log.close()


def test_segments_rotate_and_a_damaged_earlier_one_is_named(folder, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 330)
    log, _ = opened(folder)
    for name in "abcde":
        log.append([record(name)])
    assert log.numbers() == [1, 2, 3]
    log.close()
    log, names = opened(folder)
    assert names == list("abcde")
    log.close()
    first = log.path(1)
    first.write_bytes(first.read_bytes()[:-1])
    log = SegmentLog(folder)
    with pytest.raises(errors.CorruptSegment, match=r"00000001\.seg"):
        list(recover(log, None))
    log.close()


def test_a_file_cut_under_an_open_log_is_an_error_not_a_crash(folder):
    log, _ = opened(folder)
    (where,) = log.append([record("a")])
    os.truncate(log.path(1), where.offset + 50)
    with pytest.raises(errors.CorruptSegment, match="the file ends inside the record"):
        payload(log, where, "a")
    log.close()


def test_short_writes_are_continued(folder, monkeypatch):
    log, _ = opened(folder)
    real = os.pwritev

    def short(fd, buffers, offset):
        return real(fd, [bytes(buffers[0])[:7]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    (where,) = log.append([record("a")])
    assert payload(log, where, "a") == b"a" * 40 + b"x" * 40
    log.close()
    assert opened(folder)[1] == ["a"]


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (errno.ENOSPC, errors.DiskFull),
        (errno.EDQUOT, errors.DiskFull),
        (errno.EIO, errors.StorePoisoned),
    ],
)
def test_a_failed_write_is_rolled_back_whole(folder, monkeypatch, code, raised):
    log, _ = opened(folder)
    log.append([record("a")])
    size = log.size(1)
    real, calls = os.pwritev, []

    def failing(fd, buffers, offset):
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(code, os.strerror(code))
        return real(fd, [bytes(buffers[0])[:7]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", failing)
        with pytest.raises(raised, match="rolled back"):
            log.append([record("b")])
    assert calls == [size, size + 7]
    assert log.size(1) == size
    log.append([record("c")])
    log.close()
    assert opened(folder)[1] == ["a", "c"]


def test_a_failed_sync_leaves_nothing_that_could_pass_for_durable(folder, monkeypatch):
    log, _ = opened(folder)
    log.append([record("a")])
    size = log.size(1)

    def failing(fd):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(errors.StorePoisoned, match="sync of"):
            log.append([record("b")])
    assert log.size(1) == size
    log.close()
    assert opened(folder)[1] == ["a"]


def test_a_full_disk_at_a_new_segment_leaves_the_old_one(folder, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    log, _ = opened(folder)
    log.append([record("a")])

    def full(fd, buffers, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(errors.DiskFull):
            log.append([record("b")])
    log.close()
    log, names = opened(folder)
    assert names == ["a"]
    log.append([record("c")])
    log.close()
    log, names = opened(folder)
    assert names == ["a", "c"] and log.numbers() == [1, 2]
    log.close()


@pytest.mark.parametrize(
    ("pages", "payload"), [(3, 2), (2, 3), (0, 1), (1, 0), (2**32 - 1, 2**32 - 2)]
)
def test_a_record_whose_pages_do_not_fit_its_bytes_is_damaged_whatever_its_sums_say(pages, payload):
    fields = [MAGIC, PAGE, 0, 1, 1, 0, pages, payload, key("a"), xxhash.xxh3_64_intdigest(b"")]
    covered = struct.pack("<4sIIIQIIQ32sQ", *fields)
    header = covered + xxhash.xxh3_64_intdigest(covered).to_bytes(8, "little")
    assert len(header) == HEADER_BYTES
    assert Header.parse(header) is None
    fields[6:8] = 2, 4
    covered = struct.pack("<4sIIIQIIQ32sQ", *fields)
    header = covered + xxhash.xxh3_64_intdigest(covered).to_bytes(8, "little")
    assert Header.parse(header).location(1, 32).pages == 2
