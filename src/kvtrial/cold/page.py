"""One page index of a session, all layers: what is stored under one key.

A page's *meta* says what it is (parent key, tokens, validity, size of a layer's page) and the
*payload* is the layers' pages one after the other, each as it lies in memory; a layer whose rows
here are all holes has none. Both stores keep the same two byte strings.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import blake3
import numpy as np

from kvtrial.cold.disk import Buffer
from kvtrial.cold.errors import CorruptIndex
from kvtrial.contract import I64, Bool

_HEAD = struct.Struct("<32s32sIIQ")


class PageMeta(NamedTuple):
    """What a stored page is.

    Attributes
    ----------
    parent : bytes
        Key of the page before, or the chain's start.
    address : bytes
        Content address: BLAKE3 over the payload.
    tokens : int64 (rows,)
    layers : int
    bits : bytes
        The validity, packed; `valid_rows` and ``valid`` are the arrays of it.
    page_nbytes : int
        Bytes of one layer's page.
    """

    parent: bytes
    address: bytes
    tokens: I64
    layers: int
    bits: bytes
    page_nbytes: int

    @property
    def valid(self) -> Bool:
        """bool (L, rows)."""
        return valid_rows([self])

    @property
    def payload_nbytes(self) -> int:
        """Bytes of the payload: the pages of the layers that have a valid row."""
        return int(self.valid.any(axis=1).sum()) * self.page_nbytes

    def split(self, payload: memoryview) -> list[memoryview]:
        """Views of the layers' pages in a buffer of ``payload_nbytes``."""
        step = self.page_nbytes
        return [payload[at : at + step] for at in range(0, self.payload_nbytes, step)]

    def encode(self) -> bytes:
        """As it is stored, little-endian."""
        rows = len(self.tokens)
        head = _HEAD.pack(self.parent, self.address, self.layers, rows, self.page_nbytes)
        return head + self.tokens.astype("<i8", copy=False).tobytes() + self.bits

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
        tokens: I64 = np.frombuffer(data, "<i8", rows, _HEAD.size)
        return cls(parent, address, tokens, layers, data[bits:], page_nbytes)


def packed(valid: Bool) -> bytes:
    """bool (L, rows) as `PageMeta` keeps it."""
    return np.packbits(valid).tobytes()


def valid_rows(metas: Sequence[PageMeta]) -> Bool:
    """bool (L, rows) of pages that follow each other; pages of equal size are unpacked together."""
    parts = []
    for rows, alike in groupby(metas, lambda meta: len(meta.tokens)):
        pages = list(alike)
        layers = pages[0].layers
        bits = np.frombuffer(b"".join(meta.bits for meta in pages), np.uint8)
        each = np.unpackbits(bits.reshape(len(pages), -1), axis=1, count=layers * rows)
        parts.append(each.reshape(-1, layers, rows).swapaxes(0, 1).reshape(layers, -1))
    return np.concatenate(parts, axis=1).view(bool)


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
