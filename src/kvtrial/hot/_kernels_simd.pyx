"""K1's, K2's and K5's kernel: paged, head-major, group-aware, fused, online softmax, SIMD.

One algorithm for three row formats, chosen by the fused type ``row_t``: float (fp32), uint16_t
(fp16) and int8_t (q8_0); sums are FP32 in each. `_tile` walks from tile to tile. A tile serves all
query heads of its group, two at a time (with three, sums, factors and a row fill all 16 registers,
and the compiler spills):

    scores    4 rows x 2 query heads in registers: a K vector serves both heads
    softmax   one maximum and one rescale a tile, vector exp (native/simd.h states its error)
    values    4 column vectors x 2 query heads in registers over the tile's rows

The scores of q8_0 are integer: a query is rounded to 16 bits once a span, 2^-16 of its largest
element, which is little beside the 2^-8 of the rows; 32 products of a block are exact, and their
sum meets the block's scale as one float.

Rows outside the mask score -inf whatever lies in them, and their V rows are not read. Padding lanes
of the last K vector are cleared before they are used; those of V land in lanes that are not stored.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint16_t, uint64_t
from libc.string cimport memcpy

from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE, kv_span
from kvtrial.hot._simd cimport (
    LANES,
    kv_add_int,
    kv_dot_int16,
    kv_exp,
    kv_fma,
    kv_from_int,
    kv_head,
    kv_hmax,
    kv_hsum,
    kv_hsum4,
    kv_load,
    kv_load_half,
    kv_load_head,
    kv_load_int16,
    kv_load_int8,
    kv_lowest_bit,
    kv_max,
    kv_mul,
    kv_splat,
    kv_store,
    kv_store_head,
    kv_store_int16,
    kv_sub,
    kv_widen_int8,
    kv_zero,
    vector,
    whole,
)
from kvtrial.hot._tile cimport ROWS, Tile, ask_for, hide, share, soften, walk

ctypedef fused row_t:
    float
    uint16_t
    int8_t

cdef enum:
    HEADS = 2  # query heads that share a row in registers
    BLOCKS = 8  # q8_0 blocks of the longest row
    BLOCK_BYTES = 34
    QUERY_ROOM = 16384  # int16 of the queries that a pass over the pages of q8_0 takes

# The sums of a step: two heads, by 4 rows of K or 4 column vectors of V. Names rather than an array,
# which the compiler would keep in memory wherever a loop over it is unrolled too late.
ctypedef struct Sums:
    vector a0, a1, a2, a3
    vector b0, b1, b2, b3


cdef inline vector load_row(const unsigned char *row, int32_t i, row_t format) noexcept nogil:
    """Vector i of a row, for q8_0 without the scale. ``format`` is only a type."""
    if row_t is float:
        return kv_load(<const float *>row + LANES * i)
    elif row_t is uint16_t:
        return kv_load_half(<const uint16_t *>row + LANES * i)
    else:
        return kv_load_int8(
            <const int8_t *>row + BLOCK_BYTES * (LANES * i // 32) + 2 + LANES * i % 32
        )


cdef inline void read_scales(Tile *tile, const unsigned char *rows) noexcept nogil:
    """The q8_0 scales of the rows of a K or V tile."""
    cdef uint16_t[8 * 64] halves  # BLOCKS x ROWS
    cdef int32_t block, row, at, blocks = (tile.dim + 31) // 32
    for row in range(tile.tokens):
        for block in range(blocks):
            memcpy(halves + block * ROWS + row, rows + BLOCK_BYTES * block, 2)
        rows += tile.row_bytes
    for block in range(blocks):
        for row in range(tile.tokens // LANES):
            at = block * ROWS + LANES * row
            kv_store(tile.row_scales + at, kv_load_half(halves + at))


cdef inline void spread(
    vector x, vector f, vector g, vector *a, vector *b, int32_t heads
) noexcept nogil:
    """x times the factor of each head onto its sum."""
    a[0] = kv_fma(x, f, a[0])
    if heads > 1:
        b[0] = kv_fma(x, g, b[0])


cdef inline vector query_at(const float *q, int32_t lanes) noexcept nogil:
    return kv_load(q) if lanes == LANES else kv_load_head(q, lanes)


cdef inline vector key_at(
    const unsigned char *row, int32_t i, int32_t lanes, row_t format
) noexcept nogil:
    # Padding may hold anything, NaN included.
    return load_row(row, i, format) if lanes == LANES else kv_head(load_row(row, i, format), lanes)


cdef inline void dot_columns(
    const Tile *tile, const unsigned char *row, const float *q, int32_t i, int32_t lanes,
    Sums *sums, int32_t heads, row_t format,
) noexcept nogil:
    """Adds the products of column vector i of 4 rows with each query head."""
    cdef vector f = query_at(q + LANES * i, lanes), g = f
    if heads > 1:
        g = query_at(q + tile.dim + LANES * i, lanes)
    spread(key_at(row, i, lanes, format), f, g, &sums.a0, &sums.b0, heads)
    row += tile.row_bytes
    spread(key_at(row, i, lanes, format), f, g, &sums.a1, &sums.b1, heads)
    row += tile.row_bytes
    spread(key_at(row, i, lanes, format), f, g, &sums.a2, &sums.b2, heads)
    row += tile.row_bytes
    spread(key_at(row, i, lanes, format), f, g, &sums.a3, &sums.b3, heads)


cdef inline whole block_dot(whole low, whole high, const int16_t *q) noexcept nogil:
    """The products of 32 int8 and int16, in 8 sums."""
    return kv_add_int(
        kv_dot_int16(low, kv_load_int16(q)), kv_dot_int16(high, kv_load_int16(q + 16))
    )


cdef inline void dot_blocks(
    const unsigned char *row, const float *scales, const int16_t *q, int32_t blocks,
    vector *a, vector *b, int32_t heads,
) noexcept nogil:
    """Adds the products of a q8_0 row with each query head."""
    cdef int32_t block
    cdef whole low, high
    cdef vector scale
    for block in range(blocks):
        low = kv_widen_int8(<const int8_t *>row + 2)
        high = kv_widen_int8(<const int8_t *>row + 18)
        scale = kv_splat(scales[block * ROWS])
        a[0] = kv_fma(scale, kv_from_int(block_dot(low, high, q)), a[0])
        if heads > 1:
            b[0] = kv_fma(scale, kv_from_int(block_dot(low, high, q + 32 * blocks)), b[0])
        row += BLOCK_BYTES
        q += 32


cdef inline void score_heads(
    Tile *tile, const float *q, float *scores, int32_t first, int32_t heads, row_t format
) noexcept nogil:
    """Scores of all rows for 1 or 2 query heads from ``first`` on, a constant where inlined."""
    cdef Sums sums
    cdef const unsigned char *at
    cdef const float *scales
    cdef const int16_t *q8
    cdef const float *scale
    cdef int32_t row, i, blocks = (tile.dim + 31) // 32
    cdef int64_t pace = share(tile, 4 * heads * ((tile.dim + LANES - 1) // LANES))
    cdef float[2] same  # HEADS
    same[0] = same[1] = tile.scale
    scale = same
    if row_t is int8_t:
        q8 = tile.q + (tile.first_query + first) * 32 * blocks
        scale = tile.q_scales + tile.first_query + first
    q += first * tile.dim
    scores += first * ROWS
    for row in range(0, tile.tokens, 4):
        ask_for(tile, pace)
        if not tile.mask >> row & 15:
            continue
        at = tile.k + row * tile.row_bytes
        sums.a0 = sums.a1 = sums.a2 = sums.a3 = kv_zero()
        sums.b0 = sums.b1 = sums.b2 = sums.b3 = kv_zero()
        if row_t is int8_t:
            scales = tile.row_scales + row
            dot_blocks(at, scales, q8, blocks, &sums.a0, &sums.b0, heads)
            at += tile.row_bytes
            dot_blocks(at, scales + 1, q8, blocks, &sums.a1, &sums.b1, heads)
            at += tile.row_bytes
            dot_blocks(at, scales + 2, q8, blocks, &sums.a2, &sums.b2, heads)
            at += tile.row_bytes
            dot_blocks(at, scales + 3, q8, blocks, &sums.a3, &sums.b3, heads)
        else:
            for i in range(tile.dim // LANES):
                dot_columns(tile, at, q, i, LANES, &sums, heads, format)
            if tile.dim % LANES:
                dot_columns(
                    tile, at, q, tile.dim // LANES, tile.dim % LANES, &sums, heads, format
                )
        kv_hsum4(scores + row, sums.a0, sums.a1, sums.a2, sums.a3, scale[0])
        if heads > 1:
            kv_hsum4(scores + ROWS + row, sums.b0, sums.b1, sums.b2, sums.b3, scale[1])


cdef inline void add_row(
    const Tile *tile, int64_t row, const float *weights, int32_t first, Sums *sums,
    int32_t columns, int32_t heads, row_t format,
) noexcept nogil:
    """One weighted V row onto each head's column vectors from ``first`` on."""
    cdef const unsigned char *at = tile.v + row * tile.row_bytes
    cdef vector f = kv_splat(weights[row]), g = f
    if heads > 1:
        g = kv_splat(weights[ROWS + row])
    spread(load_row(at, first, format), f, g, &sums.a0, &sums.b0, heads)
    if columns == 4:
        spread(load_row(at, first + 1, format), f, g, &sums.a1, &sums.b1, heads)
        spread(load_row(at, first + 2, format), f, g, &sums.a2, &sums.b2, heads)
        spread(load_row(at, first + 3, format), f, g, &sums.a3, &sums.b3, heads)


cdef inline void load_sums(
    const float *at, int32_t lanes, int32_t columns, vector *s0, vector *s1, vector *s2, vector *s3
) noexcept nogil:
    if columns == 4:
        s0[0], s1[0] = kv_load(at), kv_load(at + LANES)
        s2[0], s3[0] = kv_load(at + 2 * LANES), kv_load(at + 3 * LANES)
    else:
        s0[0] = kv_load_head(at, lanes)


cdef inline void store_sums(
    float *at, int32_t lanes, int32_t columns, vector s0, vector s1, vector s2, vector s3
) noexcept nogil:
    if columns == 4:
        kv_store(at, s0)
        kv_store(at + LANES, s1)
        kv_store(at + 2 * LANES, s2)
        kv_store(at + 3 * LANES, s3)
    else:
        kv_store_head(at, s0, lanes)


cdef inline void add_values(
    Tile *tile, const float *weights, float *output, int32_t first, int32_t lanes,
    int32_t columns, int32_t heads, row_t format,
) noexcept nogil:
    """Weighted V rows onto 4 column vectors or 1, of 1 or 2 heads: constants where inlined.

    Only a single column vector has less than LANES ``lanes``.
    """
    cdef float[2 * 64] scaled  # HEADS x ROWS
    cdef Sums s
    cdef uint64_t bits
    cdef const float *scales
    cdef int32_t row, h, dim = tile.dim
    cdef int64_t pace = share(tile, 4 * heads * columns)
    if row_t is int8_t:
        scales = tile.row_scales + LANES * first // 32 * ROWS
        for h in range(heads):
            for row in range(tile.tokens // LANES):
                kv_store(scaled + h * ROWS + LANES * row, kv_mul(
                    kv_load(weights + h * ROWS + LANES * row), kv_load(scales + LANES * row)
                ))
        weights = scaled
    output += LANES * first
    load_sums(output, lanes, columns, &s.a0, &s.a1, &s.a2, &s.a3)
    if heads > 1:
        load_sums(output + dim, lanes, columns, &s.b0, &s.b1, &s.b2, &s.b3)
    for row in range(0, tile.tokens, 4):
        ask_for(tile, pace)
        bits = tile.mask >> row & 15
        # Halves are quicker row by row: they need a register more.
        if row_t is not uint16_t:
            if bits == 15:
                add_row(tile, row, weights, first, &s, columns, heads, format)
                add_row(tile, row + 1, weights, first, &s, columns, heads, format)
                add_row(tile, row + 2, weights, first, &s, columns, heads, format)
                add_row(tile, row + 3, weights, first, &s, columns, heads, format)
                continue
        while bits:
            add_row(tile, row + kv_lowest_bit(bits), weights, first, &s, columns, heads, format)
            bits &= bits - 1
    store_sums(output, lanes, columns, s.a0, s.a1, s.a2, s.a3)
    if heads > 1:
        store_sums(output + dim, lanes, columns, s.b0, s.b1, s.b2, s.b3)


cdef inline void add_columns(
    Tile *tile, const float *weights, float *output, int32_t first, int32_t lanes, int32_t columns,
    row_t format,
) noexcept nogil:
    """Weighted V rows onto ``columns`` vectors of all heads."""
    cdef int32_t g = 0, heads
    cdef const float *mine
    cdef float *out
    while g < tile.group:
        heads = min(tile.group - g, HEADS)
        mine, out = weights + g * ROWS, output + g * tile.dim
        if heads == 2:
            add_values(tile, mine, out, first, lanes, columns, 2, format)
        else:
            add_values(tile, mine, out, first, lanes, columns, 1, format)
        g += heads


cdef inline void attend_tile(
    Tile *tile, const float *q, float *top, float *total, float *output, row_t format
) noexcept nogil:
    """One tile into the running softmax of its group."""
    cdef float[16 * 64] scores  # KV_MAX_GROUP x ROWS
    cdef int32_t g = 0, i = 0, heads
    if row_t is int8_t:
        read_scales(tile, tile.k)
    while g < tile.group:
        heads = min(tile.group - g, HEADS)
        if heads == 2:
            score_heads(tile, q, scores, g, 2, format)
        else:
            score_heads(tile, q, scores, g, 1, format)
        g += heads
    hide(tile, scores)
    soften(tile, scores, top, total, output)
    if row_t is int8_t:
        read_scales(tile, tile.v)
    while LANES * (i + 4) <= tile.dim:
        add_columns(tile, scores, output, i, LANES, 4, format)
        i += 4
    while LANES * i < tile.dim:
        add_columns(tile, scores, output, i, min(LANES, tile.dim - LANES * i), 1, format)
        i += 1


cdef void attend_fp32(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil:
    attend_tile(tile, q, top, total, output, <float>0)


cdef void attend_fp16(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil:
    attend_tile(tile, q, top, total, output, <uint16_t>0)


cdef void attend_q8(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil:
    attend_tile(tile, q, top, total, output, <int8_t>0)


cdef int span_fp32(const kv_span *span) noexcept nogil:
    """FP32 rows."""
    cdef Tile tile
    walk(span, &tile, attend_fp32)
    return 0


cdef int span_fp16(const kv_span *span) noexcept nogil:
    """FP16 rows, FP32 sums."""
    cdef Tile tile
    walk(span, &tile, attend_fp16)
    return 0


cdef inline float round_query(const float *q, int16_t *rounded, int32_t dim) noexcept nogil:
    """A query in int16, zeros behind it up to whole blocks; returns their step.

    The step is NaN where an element is NaN or infinite, so that every score is.
    """
    cdef vector x, most = kv_splat(1e-30), odd = kv_zero()
    cdef int32_t i
    cdef float largest
    for i in range((dim + LANES - 1) // LANES):
        x = kv_load_head(q + LANES * i, min(LANES, dim - LANES * i))
        most = kv_max(kv_max(x, kv_sub(kv_zero(), x)), most)
        odd = kv_fma(x, kv_zero(), odd)
    largest = kv_hmax(most)
    for i in range((dim + 31) // 32 * (32 // LANES)):
        x = kv_load_head(q + LANES * i, min(LANES, max(dim - LANES * i, 0)))
        kv_store_int16(rounded + LANES * i, kv_mul(x, kv_splat(32767 / largest)))
    return largest / 32767 + kv_hsum(odd)


cdef int span_q8(const kv_span *span) noexcept nogil:
    """Q8_0 rows, FP32 sums; as many heads in a pass over the pages as there is room for queries."""
    cdef int16_t[16384] rounded  # QUERY_ROOM
    cdef float[512] q_scales  # of that many elements in blocks of 32
    cdef Tile tile
    cdef kv_span part = span[0]
    cdef int32_t length = (span.head_dim + 31) // 32 * 32, query, first, n
    tile.q, tile.q_scales = rounded, q_scales
    while part.first_head < span.last_head:
        part.last_head = min(
            span.last_head, part.first_head + QUERY_ROOM // (length * span.group)
        )
        first, n = part.first_head * span.group, (part.last_head - part.first_head) * span.group
        for query in range(n):
            q_scales[query] = span.scale * round_query(
                span.q + (first + query) * span.head_dim, rounded + query * length, span.head_dim
            )
        walk(&part, &tile, attend_q8)
        part.first_head = part.last_head
    return 0


def kernels():
    """Page format to its kernel, a ``kv_span_fn`` in a PyCapsule."""
    return {
        "fp32": PyCapsule_New(<void *>span_fp32, KV_KERNEL_CAPSULE, NULL),
        "fp16": PyCapsule_New(<void *>span_fp16, KV_KERNEL_CAPSULE, NULL),
        "q8_0": PyCapsule_New(<void *>span_q8, KV_KERNEL_CAPSULE, NULL),
    }


def exp_for_tests(float[::1] x, float[::1] out):
    """The kernel's exp of x <= 0 (n,), n a multiple of LANES, into out (n,)."""
    cdef Py_ssize_t i
    for i in range(x.shape[0] // LANES):
        kv_store(&out[LANES * i], kv_exp(kv_load(&x[LANES * i])))
