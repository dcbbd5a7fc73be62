"""One page index of a session, all layers: what is stored under one key.

A page's *meta* says what it is (parent key, tokens, validity, size of a layer's page) and the
*payload* is the layers' pages one after the other, each as it lies in memory; a layer whose rows
here are all holes has none. Both stores keep the same two byte strings.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import blake3
import numpy as np

from kvtrial.cold.disk import Buffer
from kvtrial.cold.errors import CorruptIndex
from kvtrial.contract import I64, Bool

_HEAD = struct.Struct("<32s32sIIQ")


@dataclass(frozen=True)
class PageMeta:
    """What a stored page is.

    Attributes
    ----------
    parent : bytes
        Key of the page before, or the chain's start.
    address : bytes
        Content address: BLAKE3 over the payload.
    tokens : int64 (rows,)
    valid : bool (L, rows)
    page_nbytes : int
        Bytes of one layer's page.
    """

    parent: bytes
    address: bytes
    tokens: I64
    valid: Bool
    page_nbytes: int

    @property
    def layers_present(self) -> Bool:
        """bool (L,): layers that have a page in the payload."""
        return np.asarray(self.valid.any(axis=1))

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the payload."""
        return int(self.layers_present.sum()) * self.page_nbytes

    def split(self, payload: memoryview) -> list[memoryview]:
        """Views of the layers' pages in a buffer of ``payload_nbytes``."""
        step = self.page_nbytes
        return [payload[at : at + step] for at in range(0, self.payload_nbytes, step)]

    def encode(self) -> bytes:
        """As it is stored, little-endian."""
        layers, rows = self.valid.shape
        return b"".join(
            (
                _HEAD.pack(self.parent, self.address, layers, rows, self.page_nbytes),
                self.tokens.astype("<i8").tobytes(),
                np.packbits(self.valid).tobytes(),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> PageMeta:
        """Inverse of `encode`; `CorruptIndex` where the sizes don't fit."""
        if len(data) < _HEAD.size:
            raise CorruptIndex(f"page meta of {len(data)} bytes; it has at least {_HEAD.size}")
        parent, address, layers, rows, page_nbytes = _HEAD.unpack_from(data)
        bits = _HEAD.size + 8 * rows
        if len(data) != bits + (layers * rows + 7) // 8:
            raise CorruptIndex(
                f"page meta of {len(data)} bytes for {layers} layers and {rows} rows; run "
                "verify() to list all damage"
            )
        tokens = np.frombuffer(data, "<i8", rows, _HEAD.size).astype(np.int64, copy=False)
        packed = np.frombuffer(data, np.uint8, offset=bits)
        valid = np.unpackbits(packed, count=layers * rows).reshape(layers, rows).view(bool)
        return cls(parent, address, tokens, valid, page_nbytes)


@dataclass(frozen=True)
class Page:
    """A page on its way to the disk; ``payload`` are views of the pool's own memory, a layer each."""

    key: bytes
    meta: PageMeta
    payload: list[Buffer]


def flat(view: memoryview) -> memoryview:
    """A page's view as bytes."""
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def content_address(payload: list[Buffer]) -> bytes:
    """BLAKE3 over the payload, 32 bytes."""
    hasher = blake3.blake3()
    for part in payload:
        hasher.update(part)
    return hasher.digest()


def split(payload: bytes, into: list[memoryview]) -> None:
    """Copy a payload into the layers' pages."""
    source = memoryview(payload)
    offset = 0
    for view in into:
        flat(view)[:] = source[offset : offset + view.nbytes]
        offset += view.nbytes
