"""Rows of int8 or 4-bit codes in panels, blocks of 32 with a step; rotated or not. See _panels.pxd."""

from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport fabsf
from libc.stdint cimport int16_t, int64_t, int8_t, uint16_t
from libc.string cimport memcpy

from kvtrial.hot._panels cimport (
    BLOCK,
    blocks_of,
    code_at,
    nibble_shift,
    panel_bytes,
    tile_bytes,
)
from kvtrial.hot._rotation cimport rotate
from kvtrial.hot._rows cimport KV_ROWS_CAPSULE, kv_rows, kv_tiles
from kvtrial.hot._simd cimport kv_from_half
from kvtrial.hot.formats._blocks cimport in_int4, in_int8


# One side of a head: K, whose depth is head_dim, or V, whose depth is the tokens.
ctypedef struct Side:
    int bits
    bint rotated

# `rows` comes first: a kv_rows pointer to it is one to the whole.
ctypedef struct PanelRows:
    kv_rows rows
    float limit  # magnitudes from here on have a step that no half holds
    Side k
    Side v


cdef int64_t row_bytes(const kv_rows *format, int64_t dim) noexcept nogil:
    cdef const PanelRows *own = <const PanelRows *>format
    return (tile_bytes(1, dim, own.k.bits) + tile_bytes(1, dim, own.v.bits)) // 2


cdef int64_t first_unfit(const kv_rows *format, const float *values, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        if not fabsf(values[i]) < (<const PanelRows *>format).limit:
            return i
    return -1


cdef inline int64_t place(
    const kv_tiles *tiles, int64_t token, int64_t element, bint keys, int bits
) noexcept nogil:
    """The byte of an element's code, from its tile's beginning."""
    if keys:
        return code_at(tiles.page_tokens, element, token, bits)
    return code_at(blocks_of(tiles.head_dim) * BLOCK, token, element, bits)


cdef inline void put_code(
    const kv_tiles *tiles, unsigned char *at, int64_t token, int64_t element, bint keys, int bits,
    int code,
) noexcept nogil:
    cdef unsigned char *byte = at + place(tiles, token, element, keys, bits)
    cdef int shift = nibble_shift(element if keys else token)
    if bits == 8:
        byte[0] = <unsigned char>code
    else:
        byte[0] = <unsigned char>(byte[0] & ~(15 << shift) | (code & 15) << shift)


cdef void put(
    const kv_tiles *tiles, unsigned char *at, int64_t token, const float *row, bint keys, Side side
) noexcept nogil:
    """A row's codes and steps into its tile."""
    cdef int64_t dim = tiles.head_dim, block, i
    cdef float[256] turned  # KV_MAX_HEAD_DIM
    cdef int16_t[32] codes  # BLOCK
    cdef int offset = 8 if side.bits == 4 else 0
    cdef uint16_t *steps = <uint16_t *>(at + panel_bytes(tiles.page_tokens, dim, side.bits))
    memcpy(turned, row, dim * sizeof(float))
    if side.rotated:
        rotate(turned, dim)
    for block in range(blocks_of(dim)):
        i = min(dim - BLOCK * block, <int64_t>BLOCK)
        if side.bits == 8:
            steps[block * tiles.page_tokens + token] = in_int8(turned + BLOCK * block, i, codes)
        else:
            steps[block * tiles.page_tokens + token] = in_int4(turned + BLOCK * block, i, codes)
        for i in range(BLOCK):
            put_code(
                tiles, at, token, BLOCK * block + i, keys, side.bits, codes[i] + offset
            )


cdef void take(
    const kv_tiles *tiles, const unsigned char *at, int64_t token, float *row, bint keys, Side side
) noexcept nogil:
    """The inverse of `put`, but for what was rounded."""
    cdef int64_t dim = tiles.head_dim, i
    cdef int code, shift
    cdef const uint16_t *steps = <const uint16_t *>(
        at + panel_bytes(tiles.page_tokens, dim, side.bits)
    )
    for i in range(dim):
        code = at[place(tiles, token, i, keys, side.bits)]
        shift = nibble_shift(i if keys else token)
        code = <int8_t>code if side.bits == 8 else (code >> shift & 15) - 8
        row[i] = kv_from_half(steps[i // BLOCK * tiles.page_tokens + token]) * code
    if side.rotated:
        rotate(row, dim)


cdef void clear(
    const kv_tiles *tiles, unsigned char *at, int64_t token, int byte, bint keys, Side side
) noexcept nogil:
    """A byte, or as many of its bits, into each code and step of a row."""
    cdef int64_t i, dim = tiles.head_dim
    cdef uint16_t *steps = <uint16_t *>(at + panel_bytes(tiles.page_tokens, dim, side.bits))
    for i in range(blocks_of(dim) * BLOCK):
        put_code(tiles, at, token, i, keys, side.bits, byte)
    for i in range(blocks_of(dim)):
        steps[i * tiles.page_tokens + token] = <uint16_t>(byte << 8 | byte)


cdef inline int64_t values_at(const PanelRows *own, const kv_tiles *tiles) noexcept nogil:
    """Bytes from the head's K tile to its V tile."""
    return tile_bytes(tiles.page_tokens, tiles.head_dim, own.k.bits)


cdef void write(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, const float *k,
    const float *v,
) noexcept nogil:
    cdef const PanelRows *own = <const PanelRows *>format
    put(tiles, at, token, k, True, own.k)
    put(tiles, at + values_at(own, tiles), token, v, False, own.v)


cdef void read(
    const kv_rows *format, const kv_tiles *tiles, const unsigned char *at, int64_t token, float *k,
    float *v,
) noexcept nogil:
    cdef const PanelRows *own = <const PanelRows *>format
    take(tiles, at, token, k, True, own.k)
    take(tiles, at + values_at(own, tiles), token, v, False, own.v)


cdef void fill(
    const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, int byte
) noexcept nogil:
    cdef const PanelRows *own = <const PanelRows *>format
    clear(tiles, at, token, byte, True, own.k)
    clear(tiles, at + values_at(own, tiles), token, byte, False, own.v)


cdef PanelRows panel_rows(float limit, Side k, Side v):
    cdef PanelRows format
    format.rows.row_bytes = row_bytes
    format.rows.first_unfit = first_unfit
    format.rows.write = write
    format.rows.read = read
    format.rows.fill = fill
    format.rows.key_offset = NULL
    format.limit, format.k, format.v = limit, k, v
    return format


cdef Side int8 = Side(8, False)
cdef Side int4 = Side(4, False)
cdef Side int4_rotated = Side(4, True)
# A step is max / 127 or max / 7, below 65520. A rotated element is at most 16 times, the root of 256, the
# largest: 28665 would do but for rounding.
cdef PanelRows int8p = panel_rows(127 * 65520.0, int8, int8)
cdef PanelRows int4p = panel_rows(7 * 65520.0, int4, int4)
cdef PanelRows int4rp = panel_rows(28000.0, int4_rotated, int4_rotated)
cdef PanelRows int84rp = panel_rows(28000.0, int8, int4_rotated)


def rows():
    """Format to its ``kv_rows`` in a capsule."""
    return {
        "int8p": PyCapsule_New(&int8p, KV_ROWS_CAPSULE, NULL),
        "int4p": PyCapsule_New(&int4p, KV_ROWS_CAPSULE, NULL),
        "int4rp": PyCapsule_New(&int4rp, KV_ROWS_CAPSULE, NULL),
        "int84rp": PyCapsule_New(&int84rp, KV_ROWS_CAPSULE, NULL),
    }
