"""K1T's and K2T's kernel: K1's algorithm on pages in which K lies [head_dim][token] within its tile.

Scores and values are then one operation, a panel product:

    sums (heads, columns) += factors (heads, rows) @ panel (rows, columns)

with queries and the K tile, and with weights and the V tile. Vectors of a panel row serve all heads
of a block, each factor is broadcast, and nothing is summed across lanes. A block is five heads by two
column vectors (10 sums, 2 vectors and a factor of 16 registers) or two heads by four; both keep the
multiply-adds busy, which have to be eight at a time. The fused type ``element_t`` is what a panel
holds, float or binary16 (uint16_t); a half is converted once for all heads of a block, and factors
and sums are FP32 in both.

Rows outside the mask score -inf whatever lies in them, and their V rows are not read. Padding lanes
of V land in lanes that are not stored; K has padding rows, which are not read.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint16_t, uint64_t

from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE, kv_span
from kvtrial.hot._simd cimport (
    LANES,
    kv_fma,
    kv_load,
    kv_load_half,
    kv_load_head,
    kv_lowest_bit,
    kv_mul,
    kv_splat,
    kv_store,
    kv_store_head,
    kv_zero,
    vector,
)
from kvtrial.hot._tile cimport (
    ROWS,
    Tile,
    ask_for,
    heads_together,
    hide,
    share,
    soften,
    walk,
)


ctypedef fused element_t:
    float
    uint16_t

ctypedef struct Panel:
    const unsigned char *rows
    int64_t row_bytes
    int32_t n, columns
    # Of the group's first head; those of the next are so many floats further.
    const float *factors
    int64_t factors_apart
    float *sums
    int64_t sums_apart


# Sums of a block: five heads (a to e) by two column vectors, or two heads by four: then a and b are the
# first two vectors of each head, c and d the others. Names rather than an array, which the compiler
# would keep in memory wherever a loop over it is unrolled too late.
ctypedef struct Sums:
    vector a0, a1, b0, b1, c0, c1, d0, d1, e0, e1


cdef inline void spread(
    vector x, vector y, float factor, vector *s0, vector *s1, int32_t vectors
) noexcept nogil:
    """One or two vectors times a head's factor onto its sums."""
    cdef vector f = kv_splat(factor)
    s0[0] = kv_fma(x, f, s0[0])
    if vectors > 1:
        s1[0] = kv_fma(y, f, s1[0])


cdef inline vector load(const unsigned char *row, int32_t i, element_t format) noexcept nogil:
    """Vector i of a panel row. ``format`` is only a type."""
    if element_t is float:
        return kv_load(<const float *>row + LANES * i)
    else:
        return kv_load_half(<const uint16_t *>row + LANES * i)


cdef inline void add_row(
    const unsigned char *row, const float *factor, int64_t apart, Sums *s, int32_t vectors,
    int32_t heads, element_t format,
) noexcept nogil:
    """One row of the panel, times each head's factor."""
    cdef vector x = load(row, 0, format), y = x
    if vectors > 1:
        y = load(row, 1, format)
    spread(x, y, factor[0], &s.a0, &s.a1, vectors)
    if heads > 1:
        spread(x, y, factor[apart], &s.b0, &s.b1, vectors)
    if vectors == 4:
        x, y = load(row, 2, format), load(row, 3, format)
        spread(x, y, factor[0], &s.c0, &s.c1, vectors)
        if heads > 1:
            spread(x, y, factor[apart], &s.d0, &s.d1, vectors)
    if heads > 2:
        spread(x, y, factor[2 * apart], &s.c0, &s.c1, vectors)
    if heads > 3:
        spread(x, y, factor[3 * apart], &s.d0, &s.d1, vectors)
    if heads > 4:
        spread(x, y, factor[4 * apart], &s.e0, &s.e1, vectors)


cdef inline void begin(
    const float *at, int32_t lanes, vector *s0, vector *s1, int32_t vectors, bint scores
) noexcept nogil:
    """Scores begin with zero, values with what was added before."""
    if scores:
        s0[0] = s1[0] = kv_zero()
    elif vectors > 1:
        s0[0], s1[0] = kv_load(at), kv_load(at + LANES)
    else:
        s0[0] = kv_load_head(at, lanes)


cdef inline void finish(
    float *at, int32_t lanes, vector s0, vector s1, int32_t vectors, bint scores, float scale
) noexcept nogil:
    if scores:
        s0 = kv_mul(s0, kv_splat(scale))
        s1 = kv_mul(s1, kv_splat(scale))
    if vectors > 1:
        kv_store(at, s0)
        kv_store(at + LANES, s1)
    else:
        kv_store_head(at, s0, lanes)


cdef inline void multiply_block(
    Tile *tile, const Panel *panel, int32_t head, int32_t first, int32_t lanes, int32_t vectors,
    int32_t heads, bint scores, element_t format,
) noexcept nogil:
    """The panel's product for heads from ``head`` and column vectors from ``first`` on.

    How many there are of both is a constant where inlined. Only a single vector has less than LANES
    ``lanes``.
    """
    cdef Sums s
    cdef const unsigned char *row = panel.rows + <int64_t>first * LANES * sizeof(element_t)
    cdef const float *factor = panel.factors + head * panel.factors_apart
    cdef float *out = panel.sums + head * panel.sums_apart + LANES * first
    cdef int64_t step = panel.row_bytes, apart = panel.factors_apart, stride = panel.sums_apart
    cdef int64_t third = 2 * LANES if vectors == 4 else 2 * stride
    cdef int64_t pace = share(tile, 4 * heads * vectors)
    cdef int32_t i, n = panel.n, whole = panel.n // 4 * 4
    begin(out, lanes, &s.a0, &s.a1, vectors, scores)
    if heads > 1:
        begin(out + stride, lanes, &s.b0, &s.b1, vectors, scores)
    if heads > 2 or vectors == 4:
        begin(out + third, lanes, &s.c0, &s.c1, vectors, scores)
    if heads > 3 or (heads > 1 and vectors == 4):
        begin(out + third + stride, lanes, &s.d0, &s.d1, vectors, scores)
    if heads > 4:
        begin(out + 4 * stride, lanes, &s.e0, &s.e1, vectors, scores)
    for i in range(0, whole, 4):
        ask_for(tile, pace)
        add_row(row, factor + i, apart, &s, vectors, heads, format)
        add_row(row + step, factor + i + 1, apart, &s, vectors, heads, format)
        add_row(row + 2 * step, factor + i + 2, apart, &s, vectors, heads, format)
        add_row(row + 3 * step, factor + i + 3, apart, &s, vectors, heads, format)
        row += 4 * step
    for i in range(whole, n):
        add_row(row, factor + i, apart, &s, vectors, heads, format)
        row += step
    finish(out, lanes, s.a0, s.a1, vectors, scores, tile.scale)
    if heads > 1:
        finish(out + stride, lanes, s.b0, s.b1, vectors, scores, tile.scale)
    if heads > 2 or vectors == 4:
        finish(out + third, lanes, s.c0, s.c1, vectors, scores, tile.scale)
    if heads > 3 or (heads > 1 and vectors == 4):
        finish(out + third + stride, lanes, s.d0, s.d1, vectors, scores, tile.scale)
    if heads > 4:
        finish(out + 4 * stride, lanes, s.e0, s.e1, vectors, scores, tile.scale)


cdef inline void multiply_heads(
    Tile *tile, const Panel *panel, int32_t head, int32_t heads, bint scores, element_t format
) noexcept nogil:
    """All columns for so many heads, a constant where inlined."""
    cdef int32_t i = 0, columns = panel.columns
    if heads <= 2:
        while LANES * (i + 4) <= columns:
            multiply_block(tile, panel, head, i, LANES, 4, heads, scores, format)
            i += 4
    while LANES * (i + 2) <= columns:
        multiply_block(tile, panel, head, i, LANES, 2, heads, scores, format)
        i += 2
    while LANES * i < columns:
        multiply_block(
            tile, panel, head, i, min(LANES, columns - LANES * i), 1, heads, scores, format
        )
        i += 1


cdef inline void multiply(
    Tile *tile, const Panel *panel, bint scores, element_t format
) noexcept nogil:
    """The whole panel for the whole group."""
    cdef int32_t head = 0, heads
    while head < tile.group:
        heads = heads_together(tile.group - head)
        if heads == 5:
            multiply_heads(tile, panel, head, 5, scores, format)
        elif heads == 4:
            multiply_heads(tile, panel, head, 4, scores, format)
        elif heads == 3:
            multiply_heads(tile, panel, head, 3, scores, format)
        elif heads == 2:
            multiply_heads(tile, panel, head, 2, scores, format)
        else:
            multiply_heads(tile, panel, head, 1, scores, format)
        head += heads


cdef inline int32_t run_of(uint64_t bits) noexcept nogil:
    """How many bits are set from the lowest on."""
    return kv_lowest_bit(~bits) if ~bits else 64


cdef inline void attend_tile(
    Tile *tile, const float *q, float *top, float *total, float *output, element_t format
) noexcept nogil:
    """One tile into the running softmax of its group."""
    cdef float[16 * 64] scores  # KV_MAX_GROUP x ROWS
    cdef Panel panel
    cdef uint64_t rows = tile.mask
    cdef int32_t first
    panel.rows, panel.row_bytes = tile.k, tile.tokens * <int64_t>sizeof(element_t)
    panel.n, panel.columns = tile.dim, tile.tokens
    panel.factors, panel.factors_apart = q, tile.dim
    panel.sums, panel.sums_apart = scores, ROWS
    multiply(tile, &panel, True, format)
    hide(tile, scores)
    soften(tile, scores, top, total, output)
    panel.row_bytes, panel.columns = tile.row_bytes, tile.dim
    panel.factors_apart = ROWS
    panel.sums, panel.sums_apart = output, tile.dim
    # Runs of rows inside the mask: no weight, not even 0, keeps a NaN out.
    while rows:
        first = kv_lowest_bit(rows)
        panel.n = run_of(rows >> first)
        panel.rows = tile.v + first * tile.row_bytes
        panel.factors = scores + first
        multiply(tile, &panel, False, format)
        rows &= rows + ((<uint64_t>1) << first)


cdef void attend_fp32(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil:
    attend_tile(tile, q, top, total, output, <float>0)


cdef void attend_fp16(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil:
    attend_tile(tile, q, top, total, output, <uint16_t>0)


cdef int span_panel_fp32(const kv_span *span) noexcept nogil:
    """FP32 rows, K transposed within the page."""
    cdef Tile tile
    walk(span, &tile, attend_fp32)
    return 0


cdef int span_panel_fp16(const kv_span *span) noexcept nogil:
    """FP16 rows, FP32 sums, K transposed within the page."""
    cdef Tile tile
    walk(span, &tile, attend_fp16)
    return 0


def kernels():
    """Page format to its kernel, a ``kv_span_fn`` in a PyCapsule."""
    return {
        "fp32t": PyCapsule_New(<void *>span_panel_fp32, KV_KERNEL_CAPSULE, NULL),
        "fp16t": PyCapsule_New(<void *>span_panel_fp16, KV_KERNEL_CAPSULE, NULL),
    }
