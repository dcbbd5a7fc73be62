"""The GGUF reader: whole files round trip, broken ones are refused with a name."""

from __future__ import annotations

import hashlib
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from kvtrial.engine import gguf
from kvtrial.engine.errors import (
    GgufInvalid,
    GgufTruncated,
    MissingTensor,
    NonFiniteWeight,
)
from kvtrial.engine.gguf import TensorKind, TensorToWrite, check_finite, read_gguf, write_gguf

DATA = Path(__file__).parents[1] / "data"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors=0, keys=0, magic=b"GGUF", version=3) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def record(name="w", shape=(32,), kind=0, offset=0) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def alignment(kind: int, packed: bytes) -> bytes:
    return header(keys=1) + text("general.alignment") + struct.pack("<I", kind) + packed


def padded(head: bytes, data: bytes) -> bytes:
    return head + bytes(-len(head) % 32) + data


HOSTILE = {
    "empty": (b"", GgufTruncated, "empty"),
    "magic": (b"GGML" + bytes(20), GgufInvalid, "not a GGUF"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), GgufInvalid, "big-endian"),
    "version": (header(version=1), GgufInvalid, "version 1"),
    "key count": (header(keys=2**63), GgufTruncated, "key 0 of"),
    "tensor count": (header(tensors=2**63), GgufTruncated, "record 0 of"),
    "string": (header(keys=1) + struct.pack("<Q", 2**63), GgufTruncated, "metadata key 0"),
    "array": (
        header(keys=1) + text("a") + struct.pack("<IIQ", 9, 10, 2**61),
        GgufTruncated,
        "'a'",
    ),
    "strings": (header(keys=1) + text("a") + struct.pack("<IIQ", 9, 8, 2**60), GgufTruncated, "a"),
    "nested": (header(keys=1) + text("a") + struct.pack("<IIQ", 9, 9, 1), GgufInvalid, "type 9"),
    "value type": (header(keys=1) + text("a") + struct.pack("<I", 13), GgufInvalid, "type 13"),
    "bool": (header(keys=1) + text("a") + struct.pack("<IB", 7, 2), GgufInvalid, "neither"),
    "utf-8": (header(keys=1) + struct.pack("<Q", 1) + b"\xff", GgufInvalid, "UTF-8"),
    "key twice": (
        header(keys=2) + 2 * (text("a") + struct.pack("<IB", 0, 1)),
        GgufInvalid,
        "'a' is there twice",
    ),
    "alignment 0": (alignment(4, struct.pack("<I", 0)), GgufInvalid, "alignment is 0"),
    "alignment -8": (alignment(5, struct.pack("<i", -8)), GgufInvalid, "alignment is -8"),
    "alignment 3": (alignment(4, struct.pack("<I", 3)), GgufInvalid, "alignment is 3"),
    "alignment 2^30": (alignment(4, struct.pack("<I", 2**30)), GgufInvalid, "is 1073741824"),
    "alignment text": (alignment(8, text("32")), GgufInvalid, "alignment is '32'"),
    "dimensions": (
        header(1) + text("w") + struct.pack("<I", 1_000_000),
        GgufInvalid,
        "'w' has 1000000 dimensions",
    ),
    "no dimensions": (header(1) + record(shape=()), GgufInvalid, "0 dimensions"),
    "empty dimension": (header(1) + record(shape=(32, 0)), GgufInvalid, r"shape \(0, 32\)"),
    "overflow": (header(1) + record(shape=(2**32, 2**32)), GgufInvalid, "2\\^63"),
    "huge": (header(1) + record(shape=(2**40,)), GgufTruncated, "'w'"),
    "row length": (header(1) + record(shape=(33,), kind=8), GgufInvalid, "rows of 33"),
    "misaligned": (header(1) + record(offset=8), GgufInvalid, "offset 8"),
    "tensor twice": (header(2) + record() + record(offset=128), GgufInvalid, "'w' is there twice"),
    "overlap": (
        padded(header(2) + record("a") + record("b", offset=64), bytes(256)),
        GgufInvalid,
        "'b' at offset 64 overlaps 'a'",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name_in_little_memory(tmp_path, case):
    raw, error, message = HOSTILE[case]
    (tmp_path / "x.gguf").write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=message):
            read_gguf(tmp_path / "x.gguf")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize("keep", ["first byte", "header", "record", "last tensor", "last byte"])
def test_a_cut_file_is_truncated_wherever_it_is_cut(tmp_path, keep):
    weights = np.arange(32, dtype="<f4").tobytes()
    whole = padded(header(2) + record("a") + record("b", offset=128), 2 * weights)
    size = {"first byte": 1, "header": 10, "record": 40, "last tensor": -64, "last byte": -1}[keep]
    (tmp_path / "x.gguf").write_bytes(whole[:size])
    names = {"last tensor": "'b'", "last byte": "'b'", "record": "'a'"}
    with pytest.raises(GgufTruncated, match=names.get(keep, "header")):
        read_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("padding", [0, 1, 32])
def test_bytes_after_the_last_tensor_do_not_matter(tmp_path, padding):
    weights = np.arange(3, dtype="<f4").tobytes()
    (tmp_path / "x.gguf").write_bytes(
        padded(header(1) + record(shape=(3,)), weights + bytes(padding))
    )
    tensor = read_gguf(tmp_path / "x.gguf").tensor("w")
    assert tensor.data.view("<f4").tolist() == [0, 1, 2]
    assert not tensor.data.flags.writeable


@pytest.mark.parametrize("step", [16, 32, 64])
@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_alignment_is_obeyed_for_every_size_of_metadata(tmp_path, step, kind):
    for size in range(32):
        metadata = {"general.alignment": kind(step), "pad": "x" * size}
        payload = {f"t{n}": np.arange(n, dtype="<f4") + size for n in (1, 9, 33)}
        tensors = [
            TensorToWrite(name, TensorKind.F32, values.shape, [values.tobytes()])
            for name, values in payload.items()
        ]
        write_gguf(tmp_path / "x.gguf", metadata, tensors)
        file = read_gguf(tmp_path / "x.gguf")
        assert file.alignment == step
        for name, values in payload.items():
            assert file.tensor(name).data.tobytes() == values.tobytes()


def test_metadata_of_every_type_comes_back(tmp_path):
    metadata = {"s": "é", "l": ["a", ""], "b": True, "i": 7, "n": -3, "f": 0.5}
    for dtype in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8", "?"):
        metadata[f"a.{dtype}"] = np.array([0, 1], dtype)
    write_gguf(tmp_path / "x.gguf", metadata, [])
    found = read_gguf(tmp_path / "x.gguf").metadata
    assert list(found) == list(metadata)
    for key, value in metadata.items():
        assert np.array_equal(found[key], value)
        assert np.asarray(found[key]).dtype.kind == np.asarray(value).dtype.kind


@pytest.mark.parametrize(
    ("name", "shape", "kind", "nbytes"),
    [
        ("llama-tiny-q4_1", (96, 288), TensorKind.Q4_1, 96 * 9 * 20),
        ("qwen2-tiny-q8_0", (32, 224), TensorKind.Q8_0, 32 * 7 * 34),
    ],
)
def test_files_of_the_field_have_their_shapes(name, shape, kind, nbytes):
    file = read_gguf(DATA / f"{name}.gguf")
    tensor = file.tensor("blk.0.attn_k.weight")
    assert (tensor.shape, tensor.kind, tensor.data.shape) == (shape, kind, (nbytes,))
    with pytest.raises(MissingTensor, match=r"blk\.9\.ffn_up\.weight"):
        file.tensor("blk.9.ffn_up.weight")


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00])
@pytest.mark.parametrize(("kind", "at"), [("Q8_0", 0), ("Q4_1", 0), ("Q4_1", 2), ("F16", 0)])
def test_weights_that_are_not_finite_are_refused_with_their_block(tmp_path, kind, at, bits):
    kind = TensorKind[kind]
    raw = np.zeros((6, kind.block_bytes), np.uint8)
    raw[4, at : at + 2] = np.frombuffer(struct.pack("<H", bits), np.uint8)
    tensor = TensorToWrite("w", kind, (2, 3 * kind.block_size), [raw.tobytes()])
    write_gguf(tmp_path / "x.gguf", {}, [tensor])
    with pytest.raises(NonFiniteWeight, match=r"'w' .* block 4"):
        check_finite(read_gguf(tmp_path / "x.gguf").tensor("w"))


def test_the_test_for_finite_weights_takes_no_memory_of_the_tensors_size(tmp_path):
    """A sparse file needs no disk; a copy of its tensor would need all the memory there is."""
    path = tmp_path / "x.gguf"
    with path.open("wb") as file:
        file.write(padded(header(1) + record(shape=(1 << 24,)), b""))
        file.truncate(file.tell() + (4 << 24))
    tracemalloc.start()
    try:
        check_finite(read_gguf(path).tensor("w"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_bad_blocks_are_counted_over_all_pieces_and_the_first_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "_CHECKED_AT_ONCE", 4)
    weights = np.zeros(11, "<f4")
    weights[[6, 7, 10]] = np.nan, np.inf, -np.inf
    tensor = TensorToWrite("w", TensorKind.F32, (11,), [weights.tobytes()])
    write_gguf(tmp_path / "x.gguf", {}, [tensor])
    with pytest.raises(NonFiniteWeight, match=r"block 6 is NaN or infinite \(3 blocks in all\)"):
        check_finite(read_gguf(tmp_path / "x.gguf").tensor("w"))


def test_a_file_cut_while_it_is_open_is_noticed(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes((DATA / "qwen2-tiny-q8_0.gguf").read_bytes())
    file = read_gguf(path)
    file.check_unchanged_size()
    with path.open("r+b") as cut:
        cut.truncate(100)
    with pytest.raises(GgufTruncated, match="100 bytes"):
        file.check_unchanged_size()
    path.unlink()
    file.check_unchanged_size()  # whoever has it mapped has it whole


def test_the_hash_is_of_the_bytes_that_are_mapped_whatever_lies_at_the_path(tmp_path):
    path, newer = tmp_path / "x.gguf", tmp_path / "newer"
    whole = (DATA / "qwen2-tiny-q8_0.gguf").read_bytes()
    path.write_bytes(whole)
    newer.write_bytes(b"another model")
    file = read_gguf(path)
    newer.replace(path)  # as a downloader puts an update in place
    assert file.sha256() == hashlib.sha256(whole).hexdigest()
    file.check_unchanged_size()  # what is shorter is another file
    path.unlink()
    assert file.sha256() == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize("put_back", [False, True])
def test_a_file_that_was_written_to_since_it_was_mapped_has_no_hash(tmp_path, put_back):
    path = tmp_path / "x.gguf"
    path.write_bytes((DATA / "qwen2-tiny-q8_0.gguf").read_bytes())
    before = path.stat()
    file = read_gguf(path)
    with path.open("r+b") as changed:
        changed.seek(-1, 2)
        changed.write(b"x")
    if put_back:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(GgufInvalid, match=r"was written to since it was read"):
        file.sha256()
