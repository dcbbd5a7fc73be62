"""Rows of int8 or 4-bit codes in panels, blocks of 32 with a step; rotated or not. See _panels.pxd."""

from cpython.pycapsule cimport PyCapsule_New
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
from kvtrial.hot.formats._blocks cimport first_beyond, in_int4, in_int8


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
    return first_beyond(values, n, (<const PanelRows *>format).limit)


cdef inline int64_t place(
    const kv_tiles *tiles, int64_t token, int64_t element, bint keys, int bits
) noexcept nogil:
    """The byte of an element's code, from its tile's beginning."""
    if keys:
        return code_at(tiles.page_tokens, element, token, bits)
    return code_at(blocks_of(tiles.head_dim) * BLOCK, token, element, bits)


cdef inline void put_key_codes(
    const kv_tiles *tiles, unsigned char *at, int64_t token, int64_t block, const int16_t *codes,
    int bits,
) noexcept nogil:
    """A block of a K row: two bytes, or four with eight codes, lie together."""
    cdef unsigned char[32] packed  # BLOCK
    cdef int64_t i, j, together = 2 if bits == 8 else 8
    if bits == 8:
        for i in range(BLOCK):
            packed[i] = <unsigned char>codes[i]
    else:
        for i in range(BLOCK // 8):
            for j in range(4):
                packed[4 * i + j] = <unsigned char>(
                    codes[8 * i + j] & 15 | (codes[8 * i + j + 4] & 15) << 4
                )
    for i in range(BLOCK // together):
        memcpy(
            at + place(tiles, token, BLOCK * block + together * i, True, bits),
            packed + together * bits // 8 * i, together * bits // 8,
        )


cdef inline void put_value_codes(
    const kv_tiles *tiles, unsigned char *at, int64_t token, int64_t block, const int16_t *codes,
    int bits,
) noexcept nogil:
    """A block of a V row: a byte, or half of it, of every second or fourth."""
    cdef int64_t i
    cdef int shift = nibble_shift(token)
    at += place(tiles, token, BLOCK * block, False, bits)
    for i in range(BLOCK):
        if bits == 8:
            at[2 * i] = <unsigned char>codes[i]
        else:
            at[4 * i] = <unsigned char>(at[4 * i] & ~(15 << shift) | (codes[i] & 15) << shift)


cdef void put_codes(
    const kv_tiles *tiles, unsigned char *at, int64_t token, int64_t block, const int16_t *codes,
    bint keys, int bits,
) noexcept nogil:
    """A block's 32 codes, of 4 bits where ``bits`` is 4, a constant where inlined."""
    if keys and bits == 8:
        put_key_codes(tiles, at, token, block, codes, 8)
    elif keys:
        put_key_codes(tiles, at, token, block, codes, 4)
    elif bits == 8:
        put_value_codes(tiles, at, token, block, codes, 8)
    else:
        put_value_codes(tiles, at, token, block, codes, 4)


cdef void put(
    const kv_tiles *tiles, unsigned char *at, int64_t token, const float *row, bint keys, Side side
) noexcept nogil:
    """A row's codes and steps into its tile."""
    cdef int64_t dim = tiles.head_dim, block, i
    cdef float[256] turned  # KV_MAX_HEAD_DIM
    cdef int16_t[32] codes  # BLOCK
    cdef uint16_t *steps = <uint16_t *>(at + panel_bytes(tiles.page_tokens, dim, side.bits))
    if side.rotated:
        memcpy(turned, row, dim * sizeof(float))
        rotate(turned, dim)
        row = turned
    for block in range(blocks_of(dim)):
        i = min(dim - BLOCK * block, <int64_t>BLOCK)
        if side.bits == 8:
            steps[block * tiles.page_tokens + token] = in_int8(row + BLOCK * block, i, codes)
        else:
            steps[block * tiles.page_tokens + token] = in_int4(row + BLOCK * block, i, codes)
            for i in range(BLOCK):
                codes[i] += 8
        put_codes(tiles, at, token, block, codes, keys, side.bits)


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
    cdef int16_t[32] codes  # BLOCK
    cdef uint16_t *steps = <uint16_t *>(at + panel_bytes(tiles.page_tokens, dim, side.bits))
    for i in range(BLOCK):
        codes[i] = <int16_t>byte
    for i in range(blocks_of(dim)):
        put_codes(tiles, at, token, i, codes, keys, side.bits)
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
cdef Side int8_rotated = Side(8, True)
cdef Side int4_rotated = Side(4, True)
# A step is max / 127 or max / 7, below 65520. A rotated element is at most 16 times, the root of 256, the
# largest: 520065 and 28665 would do but for rounding.
cdef PanelRows int8rp = panel_rows(510000.0, int8_rotated, int8)
cdef PanelRows int4p = panel_rows(7 * 65520.0, int4, int4)
cdef PanelRows int4rp = panel_rows(28000.0, int4_rotated, int4_rotated)
cdef PanelRows int8r4rp = panel_rows(28000.0, int8_rotated, int4_rotated)


def rows():
    """Format to its ``kv_rows`` in a capsule."""
    return {
        "int8rp": PyCapsule_New(&int8rp, KV_ROWS_CAPSULE, NULL),
        "int4p": PyCapsule_New(&int4p, KV_ROWS_CAPSULE, NULL),
        "int4rp": PyCapsule_New(&int4rp, KV_ROWS_CAPSULE, NULL),
        "int8r4rp": PyCapsule_New(&int8r4rp, KV_ROWS_CAPSULE, NULL),
    }
