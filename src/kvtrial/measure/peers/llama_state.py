"""llama.cpp's saved state of one sequence, written from rows of ours.

Its layout is no public interface, so it is never trusted: `check_layout` compares it with a state that
the installed version made itself. Integers are little-endian:

=====================  =============================================================================
magic, sequence        uint32 0xaf143cd8, int32 0
streams, cells         uint32 each; one stream
each cell              position int32, number of sequences uint32 (1), the sequence int32 (0)
V transposed, layers   uint32 each; V is transposed unless flash attention is on
K of each layer        ggml type int32, bytes of a row uint64, the rows
V of each layer        type int32, bytes of a row uint64, the rows; or transposed: type int32, bytes of
                       an element uint32, elements of a row uint32, then one run of cells for each
=====================  =============================================================================

Quantised rows whose heads are whole multiples of 64 are stored after a turn by an orthonormal
Walsh-Hadamard matrix, which spreads outliers over the blocks; queries and outputs are turned likewise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
from scipy.linalg import hadamard

from kvtrial.contract import F32
from kvtrial.measure.peers.programs import QUANTISED, Peer

U8 = npt.NDArray[np.uint8]

_GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8}
_MAGIC = 0xAF143CD8
_BLOCK = 32
_TURN = 64


class UnknownStateLayout(RuntimeError):
    """llama.cpp saves its state in another layout than this module knows."""


def sections(k: F32, v: F32, peer: Peer) -> Iterator[bytes | np.ndarray]:
    """The state of rows k and v (L, N, H_kv, D), N >= 1, in order.

    What describes the layout comes as bytes, the rows as arrays.
    """
    layers, cells = k.shape[:2]
    table = np.zeros((cells, 3), "<i4")
    table[:, 0] = np.arange(cells)
    table[:, 1] = 1
    yield struct.pack("<IiII", _MAGIC, 0, 1, cells) + table.tobytes()
    yield struct.pack("<II", not peer.flash, layers)
    for layer in range(layers):
        flat = turned(k[layer], peer, peer.k_type, widest=True).reshape(cells, -1)
        rows = stored(flat, peer.k_type)
        yield struct.pack("<iQ", _GGML_TYPES[peer.k_type], rows.nbytes // cells)
        yield rows
    for layer in range(layers):
        flat = turned(v[layer], peer, peer.v_type, widest=False).reshape(cells, -1)
        if peer.flash:
            rows = stored(flat, peer.v_type)
            yield struct.pack("<iQ", _GGML_TYPES[peer.v_type], rows.nbytes // cells)
        else:
            rows = np.ascontiguousarray(stored(flat, peer.v_type).T)
            yield struct.pack("<iII", _GGML_TYPES[peer.v_type], rows.itemsize, len(rows))
        yield rows


def turned(rows: F32, peer: Peer, kind: str, *, widest: bool) -> F32:
    """Rows (N, H_kv, D) as they are before they are stored as ``kind``, float32.

    ``widest``: by the widest matrix whose size divides D, as K is; else by one of 64, as V is.
    """
    if not peer.turned or kind not in QUANTISED or rows.shape[-1] % _TURN:
        return rows
    size = _TURN
    while widest and rows.shape[-1] % (2 * size) == 0:
        size *= 2
    matrix = (hadamard(size) / np.sqrt(size)).astype(np.float32)
    whole: F32 = (rows.reshape(-1, size) @ matrix).reshape(rows.shape)
    return whole


def stored(rows: F32, kind: str) -> np.ndarray:
    """float32 (N, width) as llama.cpp stores it: float32, float16, or bytes of Q8_0 or Q4_0 blocks.

    Raises
    ------
    ValueError
        For blocks, width is not a multiple of 32.
    """
    if kind == "f32":
        return np.ascontiguousarray(rows, np.float32)
    if kind == "f16":
        return rows.astype(np.float16)
    if rows.shape[1] % _BLOCK:
        raise ValueError(
            f"rows of {rows.shape[1]} elements; {kind.upper()} needs a multiple of {_BLOCK}"
        )
    blocks = rows.reshape(len(rows), -1, _BLOCK)
    scale, numbers = _q8_0(blocks) if kind == "q8_0" else _q4_0(blocks)
    parts = [scale.astype("<f2").view(np.uint8), numbers]
    return np.concatenate(parts, axis=-1).reshape(len(rows), -1)


def _q8_0(blocks: F32) -> tuple[F32, U8]:
    """Scale and int8 of blocks (..., 32)."""
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    return scale, np.rint(blocks * _inverse(scale)).astype(np.int8).view(np.uint8)


def _q4_0(blocks: F32) -> tuple[F32, U8]:
    """Scale, by which the largest magnitude is -8, and the nibbles of blocks (..., 32): 16 low, 16 high ones."""
    at = np.abs(blocks).argmax(axis=-1, keepdims=True)
    scale = np.take_along_axis(blocks, at, axis=-1) / np.float32(-8)
    whole = np.minimum(blocks * _inverse(scale) + np.float32(8.5), 15).astype(np.uint8)
    half = _BLOCK // 2
    return scale, whole[..., :half] | whole[..., half:] << 4


def _inverse(scale: F32) -> F32:
    """1 / scale, and 0 for 0."""
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def join(parts: Iterable[bytes | np.ndarray]) -> U8:
    """All sections as the bytes of a state."""
    return np.concatenate([_as_bytes(part) for part in parts])


def check_layout(state: U8, parts: Iterable[bytes | np.ndarray]) -> None:
    """Raise `UnknownStateLayout` unless ``state`` has the layout of ``parts``; rows may differ."""
    offset = 0
    for part in parts:
        own = _as_bytes(part)
        there = state[offset : offset + own.size]
        if there.size != own.size or (isinstance(part, bytes) and not np.array_equal(there, own)):
            raise UnknownStateLayout(
                f"llama.cpp's saved state differs from the known layout at byte {offset}; run "
                "`make peers`, which installs the version that this was written for"
            )
        offset += own.size
    if offset != state.size:
        raise UnknownStateLayout(
            f"llama.cpp's saved state has {state.size} bytes where {offset} are known; run "
            "`make peers`, which installs the version that this was written for"
        )


def _as_bytes(part: bytes | np.ndarray) -> U8:
    if isinstance(part, bytes):
        return np.frombuffer(part, np.uint8)
    return part.reshape(-1).view(np.uint8)
