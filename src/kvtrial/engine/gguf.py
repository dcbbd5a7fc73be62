"""GGUF files: metadata and memory-mapped tensors, and a small writer.

Layout (little endian, versions 2 and 3): magic ``GGUF``, version u32, tensor count u64, metadata
count u64; metadata as key, type, value; tensor records as name, number of dimensions, dimensions
(fastest first), type, offset; then, from the next multiple of ``general.alignment``, the data.
Source: the GGUF specification in the ggml repository (docs/gguf.md).

A file is not trusted. Every length is compared with what is left of the file before anything is
allocated for it, and every loop step consumes bytes of the file, so time and memory are bounded by
the file's size. Decided where the specification leaves room:

- ``general.alignment`` is a power of two from 8 to 65536, of any integer type; 32 when absent.
- Arrays of arrays, tensors of no or more than four dimensions and empty dimensions are refused.
- Bytes after the last tensor (padding or not) are ignored.
- NaN and infinite weights are refused as a tensor is loaded, not where they surface in a logit.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvtrial.contract.arguments import shown
from kvtrial.engine.errors import (
    GgufInvalid,
    GgufTruncated,
    MissingTensor,
    NonFiniteWeight,
)
from kvtrial.engine.kinds import TensorKind
from kvtrial.host.files import beside

U8 = npt.NDArray[np.uint8]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """One tensor.

    Attributes
    ----------
    name : str
    kind : TensorKind
    shape : tuple of int
        NumPy order: rows first, the contiguous dimension last.
    data : uint8 (nbytes,)
        Read-only, the blocks as they lie in the file; a view of the file's one memory map.
    """

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    data: U8 = field(repr=False)


class Strange(NamedTuple):
    """A tensor of a type that does not run: the type's number, and the shape."""

    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class GgufFile:
    """What `read_gguf` returns.

    In ``metadata`` arrays of numbers are NumPy arrays, arrays of strings `Strings`.
    """

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)
    size: int
    #: Tensors of types that are not in `TensorKind`, by name.
    strange: Mapping[str, Strange] = field(default_factory=dict, repr=False)
    #: The map that the tensors lie in, and the file as it was mapped.
    mapped: mmap.mmap | None = field(default=None, repr=False)
    found: os.stat_result | None = field(default=None, repr=False)

    def tensor(self, name: str) -> GgufTensor:
        """The tensor of that name; else `MissingTensor`."""
        if name not in self.tensors:
            raise MissingTensor(
                f"{self.path}: no tensor {name!r} among its {len(self.tensors)}; the file is whole "
                "but was made without it: convert the model again"
            )
        return self.tensors[name]

    def check_unchanged_size(self) -> None:
        """Raise `GgufTruncated` if the file was cut since: touching its map would be SIGBUS. Weights are
        copied, so nothing but `sha256` touches it once a model is loaded."""
        now = self._now()
        if now is not None and now.st_size < self.size:
            raise GgufTruncated(
                f"{self.path}: {now.st_size} bytes, was {self.size} when it was opened; fetch it again"
            )

    def _now(self) -> os.stat_result | None:
        """The mapped file as it is; None where another one lies at the path by now, or none: then what is
        mapped stays whole."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return None
        return now if self.found is None or os.path.samestat(now, self.found) else None

    def sha256(self) -> str:
        """sha256 of the bytes that the weights come from, whatever lies at the path by now.

        Raises
        ------
        GgufTruncated, GgufInvalid
            The file was written to since it was mapped: no hash says what the weights are.
        """
        if self.mapped is None or self.found is None:
            raise GgufInvalid(f"{self.path}: was not read from a file; use read_gguf")
        digest = hashlib.sha256()
        for at in range(0, self.size, _HASHED_AT_ONCE):
            self.check_unchanged_size()
            digest.update(memoryview(self.mapped)[at : at + _HASHED_AT_ONCE])
        now = self._now()
        if now is not None and any(
            getattr(now, name) != getattr(self.found, name)
            for name in ("st_size", "st_mtime_ns", "st_ctime_ns")
        ):
            raise GgufInvalid(
                f"{self.path}: was written to since it was read, so its weights may be of two models; load "
                "it again, and put a new version in place by renaming it"
            )
        return digest.hexdigest()


_HASHED_AT_ONCE = 64 << 20
_CHECKED_AT_ONCE = (
    1 << 18
)  # words: what a test takes of memory stays in a cache, whatever the tensor


class _Scalar(NamedTuple):
    name: str
    format: str


_SCALARS = {
    0: _Scalar("uint8", "<u1"),
    1: _Scalar("int8", "<i1"),
    2: _Scalar("uint16", "<u2"),
    3: _Scalar("int16", "<i2"),
    4: _Scalar("uint32", "<u4"),
    5: _Scalar("int32", "<i4"),
    6: _Scalar("float32", "<f4"),
    7: _Scalar("bool", "|b1"),
    10: _Scalar("uint64", "<u8"),
    11: _Scalar("int64", "<i8"),
    12: _Scalar("float64", "<f8"),
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


class _Cursor:
    """A bounded read position; ``what`` names the key or tensor that a failure belongs to."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, what: str = "the header") -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.what = what

    def need(self, count: int) -> int:
        """Move past ``count`` bytes and return where they begin."""
        start = self.at
        if count > len(self.data) - start:
            raise GgufTruncated(
                f"{self.path}: {self.what} needs {count} bytes at {start}; the file has "
                f"{len(self.data)} in all; it is cut or corrupt: fetch it again"
            )
        self.at = start + count
        return start

    def invalid(self, problem: str) -> GgufInvalid:
        return GgufInvalid(f"{self.path}: {self.what} {problem}")

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.data, self.need(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.data, self.need(8))[0])

    def string(self) -> str:
        length = self.u64()
        start = self.need(length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.invalid(f"is not UTF-8 ({error.reason} at byte {start})") from None

    def scalars(self, kind: int, count: int) -> npt.NDArray[Any]:
        """A copy of ``count`` numbers, native dtype."""
        dtype = np.dtype(_SCALARS[kind].format)
        start = self.need(dtype.itemsize * count)
        raw = self.data[start : self.at]
        if dtype == np.bool_ and raw.strip(b"\0\1"):
            raise self.invalid("is a bool that is neither 0 nor 1")
        return np.frombuffer(raw, dtype).astype(dtype.newbyteorder("="))

    def value(self) -> Any:
        kind = self.u32()
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalars(kind, 1)[0].item()
        if kind != _ARRAY:
            raise self.invalid(f"has value type {kind}; allowed: 0 to 12")
        item, count = self.u32(), self.u64()
        if item in _SCALARS:
            return self.scalars(item, count)
        if item != _STRING:
            raise self.invalid(f"is an array of type {item}; allowed: numbers, bools, strings")
        return self.strings(count)

    def strings(self, count: int) -> Strings:
        """Move past ``count`` strings, each of which takes at least the eight bytes of its length."""
        end = self.at
        try:
            for _ in range(count):
                end += 8 + _LENGTH.unpack_from(self.data, end)[0]
        except (struct.error, OverflowError):  # the next length is past the end
            end += 8
        start = self.need(end - self.at)
        return Strings(self.path, self.what, self.data[start:end], count)


class Strings(Sequence[str]):
    """An array of strings, decoded when the first is asked for: a vocabulary takes longer to decode than the
    weights to map, and most processes of a trial ask for none of it.

    `GgufInvalid` is raised then, for one that is not UTF-8.
    """

    def __init__(self, path: Path, what: str, raw: bytes, count: int) -> None:
        self._cursor = _Cursor(path, raw, what)
        self._count = count

    @functools.cached_property
    def _decoded(self) -> list[str]:
        self._cursor.at = 0
        return [self._cursor.string() for _ in range(self._count)]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded[index]

    def __repr__(self) -> str:
        return f"an array of {self._count} strings"


#: What an array of strings is in metadata, read or to be written.
STRINGS = (Strings, list)


def read_gguf(path: str | Path) -> GgufFile:
    """Read a GGUF file's metadata and map its tensors.

    Parameters
    ----------
    path : path
        The file stays mapped, read-only, for as long as a tensor's data is referenced.

    Raises
    ------
    GgufTruncated
        The file ends inside the header, a key or a tensor; the first that does not fit is named.
    GgufInvalid
        Foreign magic, version or byte order; contradictory records.
    """
    path = Path(path)
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if found.st_size == 0:
            raise GgufTruncated(f"{path}: the file is empty; fetch it again")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, mapped)
    version, n_tensors, n_keys = _read_header(cursor)
    metadata: dict[str, Any] = {}
    for i in range(n_keys):
        cursor.what = f"metadata key {i} of {n_keys}"
        key = cursor.string()
        cursor.what = f"metadata key {key!r}"
        if key in metadata:
            raise cursor.invalid("is there twice")
        metadata[key] = cursor.value()
    alignment = _alignment(path, metadata)
    records: dict[str, _Record] = {}
    for i in range(n_tensors):
        cursor.what = f"tensor record {i} of {n_tensors}"
        record = _read_record(cursor, alignment)
        if record.name in records:
            raise cursor.invalid("is there twice")
        records[record.name] = record
    start = -(-cursor.at // alignment) * alignment
    tensors = _map_tensors(path, mapped, start, records)
    strange = {
        r.name: Strange(r.kind, r.shape) for r in records.values() if isinstance(r.kind, int)
    }
    return GgufFile(
        path, version, alignment, metadata, tensors, len(mapped), strange, mapped, found
    )


def check_finite(tensor: GgufTensor, path: Path | str = "") -> None:
    """Raise `NonFiniteWeight`, naming tensor and block, for a NaN or infinite weight or scale."""
    # Exponent bits tell: integer tests neither convert FP16 nor raise floating-point flags.
    word, exponent = _EXPONENTS.get(tensor.kind, ("<u2", 0x7C00))
    stride = tensor.kind.block_bytes
    count = tensor.data.size // stride
    bad, first = 0, 0
    for at in tensor.kind.layout.halves or (0,):
        view: npt.NDArray[Any] = np.ndarray(
            (count,), word, buffer=tensor.data.data, offset=at, strides=(stride,)
        )
        for start in range(0, count, _CHECKED_AT_ONCE):
            found = (view[start : start + _CHECKED_AT_ONCE] & exponent) == exponent
            if found.any():
                first = first if bad else start + int(found.argmax())
                bad += int(np.count_nonzero(found))
        if bad:
            raise NonFiniteWeight(
                f"{path}: tensor {tensor.name!r} ({tensor.kind.name}) block {first} is NaN or "
                f"infinite ({bad} blocks in all); the file is corrupt: fetch it again"
            )


#: Words whose exponent's bits are all set are no numbers; of the others, scales of FP16 are looked at.
_EXPONENTS = {TensorKind.F32: ("<u4", 0x7F800000), TensorKind.BF16: ("<u2", 0x7F80)}


class _Record(NamedTuple):
    name: str
    kind: TensorKind | int  # the number of one that does not run, whose size is not known
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def _read_header(cursor: _Cursor) -> tuple[int, int, int]:
    magic = cursor.data[:4]
    if magic != MAGIC[: len(magic)]:
        raise cursor.invalid(
            f"begins with {magic!r}, not {MAGIC!r}: this is not a GGUF file; a web page or a Git LFS pointer may "
            "have been saved in its place: fetch it again"
        )
    cursor.need(4)
    version = cursor.u32()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in VERSIONS:
            raise cursor.invalid(
                "is that of a big-endian file; allowed: little endian; the gguf package's `gguf-convert-endian "
                "FILE little` turns it"
            )
        raise cursor.invalid(f"has version {version}; allowed: 2, 3; convert the model again")
    return version, cursor.u64(), cursor.u64()


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not 8 <= value <= 65536
        or value & (value - 1)
    ):
        raise GgufInvalid(
            f"{path}: general.alignment is {shown(value)}; allowed: a power of two from 8 to 65536; convert the "
            "model again"
        )
    return int(value)


def _read_record(cursor: _Cursor, alignment: int) -> _Record:
    name = cursor.string()
    cursor.what = f"tensor {name!r}"
    dimensions = cursor.u32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.invalid(f"has {dimensions} dimensions; allowed: 1 to {MAX_DIMENSIONS}")
    shape = tuple(reversed([cursor.u64() for _ in range(dimensions)]))
    number = cursor.u32()
    offset = cursor.u64()
    try:
        kind = TensorKind(number)
    except ValueError:
        return _Record(name, number, shape, 0, offset)
    weights = math.prod(shape)
    if weights == 0 or weights >= 2**63:
        raise cursor.invalid(f"has shape {shape}; allowed: no empty dimension, under 2^63 weights")
    if shape[-1] % kind.block_size:
        raise cursor.invalid(
            f"is {kind.name} with rows of {shape[-1]}; allowed: multiples of {kind.block_size}"
        )
    if offset % alignment:
        raise cursor.invalid(f"lies at offset {offset}; allowed: multiples of {alignment}")
    return _Record(name, kind, shape, weights // kind.block_size * kind.block_bytes, offset)


def _map_tensors(
    path: Path, mapped: mmap.mmap, start: int, records: dict[str, _Record]
) -> dict[str, GgufTensor]:
    end, before = 0, ""
    for record in sorted(records.values(), key=lambda r: r.offset):
        if record.offset < end:
            raise GgufInvalid(
                f"{path}: tensor {record.name!r} at offset {record.offset} overlaps {before!r}, "
                f"which ends at {end}"
            )
        end, before = record.offset + record.nbytes, record.name
        if start + end > len(mapped):
            raise GgufTruncated(
                f"{path}: tensor {record.name!r} ({record.nbytes} bytes at "
                f"{start + record.offset}) ends after the file, which has {len(mapped)} bytes; "
                "fetch it again"
            )
    whole = np.frombuffer(mapped, np.uint8)
    return {
        r.name: GgufTensor(
            r.name, r.kind, r.shape, whole[start + r.offset : start + r.offset + r.nbytes]
        )
        for r in records.values()
        if isinstance(r.kind, TensorKind)
    }


# --------------------------------------------------------------------------------------------------
# Writing


class TensorToWrite(NamedTuple):
    """A tensor for `write_gguf`; ``chunks`` yield its bytes (any buffers) as they are written."""

    name: str
    kind: TensorKind
    shape: tuple[int, ...]
    chunks: Iterable[Any]


def write_gguf(
    path: str | Path, metadata: Mapping[str, Any], tensors: Iterable[TensorToWrite]
) -> None:
    """Write a GGUF file (version 3), beside and renamed.

    Parameters
    ----------
    metadata : mapping
        str, bool, int (as uint32, else int64), float (as float32), NumPy scalars and arrays by
        their dtype, `STRINGS` of str. ``general.alignment`` is obeyed.
    tensors : iterable of TensorToWrite
    """
    path = Path(path)
    tensors = list(tensors)
    alignment = _alignment(path, metadata)
    head = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _packed_string(key) + _packed_value(value)
    offset = 0
    for name, kind, shape, _ in tensors:
        head += _packed_string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind.value, offset)
        nbytes = math.prod(shape) // kind.block_size * kind.block_bytes
        offset += nbytes + -nbytes % alignment
    with beside(path) as new, new.open("wb") as file:
        file.write(head)
        for tensor in tensors:
            _pad(file, alignment)
            for chunk in tensor.chunks:
                file.write(chunk)
        _pad(file, alignment)


def _pad(file: BinaryIO, alignment: int) -> None:
    file.write(bytes(-file.tell() % alignment))


def _packed_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _packed_value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _packed_string(value)
    if isinstance(value, STRINGS):
        body = b"".join(_packed_string(item) for item in value)
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + body
    if isinstance(value, int) and not isinstance(value, bool):
        value = np.uint32(value) if 0 <= value < 2**32 else np.int64(value)
    elif isinstance(value, float):
        value = np.float32(value)
    array = np.asarray(value)
    kind = next(number for number, s in _SCALARS.items() if s.name == array.dtype.name)
    body = array.astype(_SCALARS[kind].format).tobytes()
    if array.ndim:
        return struct.pack("<IIQ", _ARRAY, kind, array.size) + body
    return struct.pack("<I", kind) + body
