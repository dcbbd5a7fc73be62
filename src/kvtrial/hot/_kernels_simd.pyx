"""K1's, K2's and K5's kernel: paged, head-major, group-aware, fused, online softmax, SIMD.

One algorithm for three row formats, chosen by the fused type ``row_t``: float (fp32), uint16_t
(fp16) and int8_t (q8_0); sums are FP32 in each. Pages are read once and in the order in which they
lie in memory, K and V tile of each head in turn; while one tile is worked on, the lines of the next
are asked for. A tile serves up to 3 query heads at a time:

    scores    4 rows x 3 query heads in registers: a K vector serves all three heads
    softmax   one maximum and one rescale a tile, vector exp (native/simd.h states its error)
    values    4 column vectors x 3 query heads in registers over the tile's rows

Rows outside the mask score -inf whatever lies in them, and their V rows are not read. Padding lanes
of the last K vector are cleared before they are used; those of V land in lanes that are not stored.
"""

from libc.math cimport INFINITY, expf
from libc.stdint cimport int8_t, int32_t, int64_t, uint16_t, uint64_t
from libc.string cimport memcpy, memset

from kvtrial.hot._kernel cimport kv_span

cdef extern from "simd.h" nogil:
    ctypedef float vector "kv_vf"
    vector kv_zero()
    vector kv_splat(float)
    vector kv_load(const float *)
    vector kv_load_head(const float *, int32_t lanes)
    vector kv_load_half(const uint16_t *)
    vector kv_load_int8(const int8_t *)
    void kv_store(float *, vector)
    void kv_store_head(float *, vector, int32_t lanes)
    vector kv_fma(vector, vector, vector)
    vector kv_mul(vector, vector)
    vector kv_add(vector, vector)
    vector kv_sub(vector, vector)
    vector kv_max(vector, vector)
    vector kv_head(vector, int32_t lanes)
    float kv_hsum(vector)
    float kv_hmax(vector)
    void kv_hsum4(float *, vector, vector, vector, vector, float scale)
    vector kv_exp(vector)
    void kv_prefetch(const void *)
    int32_t kv_lowest_bit(uint64_t)

ctypedef fused row_t:
    float
    uint16_t
    int8_t

cdef enum:
    LANES = 8  # as a step of range: literally, since Cython loops in C over nothing else
    HEADS = 3  # query heads that share a row in registers
    ROWS = 64  # rows of the largest page
    BLOCKS = 8  # q8_0 blocks of the longest row

# K and V rows of one KV head in one page. What is constant while a kernel runs is here too, so that
# it is inlined as one thing.
ctypedef struct Tile:
    const unsigned char *k
    const unsigned char *v
    const unsigned char *next  # the tile that is read after this one, or NULL
    int64_t row_bytes
    int32_t tokens, dim
    uint64_t mask
    float scale
    float[8 * 64] k_scales  # BLOCKS x ROWS, for q8_0
    float[8 * 64] v_scales


cdef inline vector load_row(const unsigned char *row, int32_t i, row_t format) noexcept nogil:
    """Elements [8 i, 8 i + 8) of a row, for q8_0 without their scale. ``format`` is only a type."""
    if row_t is float:
        return kv_load(<const float *>row + LANES * i)
    elif row_t is uint16_t:
        return kv_load_half(<const uint16_t *>row + LANES * i)
    else:
        return kv_load_int8(<const int8_t *>row + 34 * (i >> 2) + 2 + LANES * (i & 3))


cdef inline void read_scales(
    const unsigned char *rows, const Tile *tile, float *scales
) noexcept nogil:
    """The q8_0 scales of a tile's rows (BLOCKS, ROWS)."""
    cdef uint16_t[64] halves
    cdef int32_t block, row
    for block in range((tile.dim + 31) // 32):
        for row in range(tile.tokens):
            memcpy(halves + row, rows + row * tile.row_bytes + 34 * block, 2)
        for row in range(0, tile.tokens, 8):
            kv_store(scales + block * ROWS + row, kv_load_half(halves + row))


cdef inline void ask_for(const Tile *tile, int64_t offset, int64_t nbytes) noexcept nogil:
    """Prefetches the lines that lie as far in the next tile as these bytes in this one."""
    cdef int64_t line
    if tile.next is not NULL:
        for line in range(0, nbytes, 64):
            kv_prefetch(tile.next + offset + line)


cdef inline void score_columns(
    const Tile *tile, int32_t row, const float *q, int32_t i, int32_t lanes, vector *sums,
    int32_t heads, row_t format,
) noexcept nogil:
    """Adds the products of column vector i of 4 rows with each query head."""
    cdef vector[3] query  # HEADS
    cdef vector k
    cdef int32_t h, r
    for h in range(heads):
        if lanes < LANES:
            query[h] = kv_load_head(q + h * tile.dim + LANES * i, lanes)
        else:
            query[h] = kv_load(q + h * tile.dim + LANES * i)
    for r in range(4):
        k = load_row(tile.k + (row + r) * tile.row_bytes, i, format)
        if row_t is int8_t:
            k = kv_mul(k, kv_splat(tile.k_scales[(i >> 2) * ROWS + row + r]))
        if lanes < LANES:
            k = kv_head(k, lanes)
        for h in range(heads):
            sums[4 * h + r] = kv_fma(k, query[h], sums[4 * h + r])


cdef inline void score_rows(
    const Tile *tile, const float *q, float *scores, int32_t heads, row_t format
) noexcept nogil:
    """Scores of all rows for 1 to 3 query heads, which is a constant where this is inlined."""
    cdef vector[12] sums
    cdef int32_t row, i, h
    cdef uint64_t hidden = ~tile.mask
    for row in range(0, tile.tokens, 4):
        if not tile.mask >> row & 15:
            continue
        for h in range(4 * heads):
            sums[h] = kv_zero()
        for i in range(tile.dim // LANES):
            score_columns(tile, row, q, i, LANES, sums, heads, format)
        if tile.dim % LANES:
            score_columns(
                tile, row, q, tile.dim // LANES, tile.dim % LANES, sums, heads, format
            )
        ask_for(tile, row * tile.row_bytes, 4 * tile.row_bytes)
        for h in range(heads):
            kv_hsum4(scores + h * ROWS + row, sums[4 * h], sums[4 * h + 1], sums[4 * h + 2],
                     sums[4 * h + 3], tile.scale)
    if tile.tokens < 64:
        hidden &= ((<uint64_t>1) << tile.tokens) - 1
    while hidden:
        row = kv_lowest_bit(hidden)
        hidden &= hidden - 1
        for h in range(heads):
            scores[h * ROWS + row] = -INFINITY


cdef inline void soften(
    float *scores, int32_t tokens, float *top, float *total, float *output, int32_t dim
) noexcept nogil:
    """Scores of one query head become weights; where they raise its maximum, its output shrinks."""
    cdef int32_t i
    cdef float peak, keep = 1
    cdef vector weights, most = kv_splat(-INFINITY), sums = kv_zero()
    for i in range(0, tokens, 8):
        # A NaN score is left out here, and shows in the sum.
        most = kv_max(kv_load(scores + i), most)
    peak = kv_hmax(most)
    # -inf would make inf - inf of rows whose scores all are -inf.
    if peak < -3.0e38:
        peak = -3.0e38
    if peak > top[0]:
        keep = expf(top[0] - peak)
        top[0] = peak
        for i in range(dim):
            output[i] *= keep
    for i in range(0, tokens, 8):
        weights = kv_exp(kv_sub(kv_load(scores + i), kv_splat(top[0])))
        kv_store(scores + i, weights)
        sums = kv_add(sums, weights)
    total[0] = total[0] * keep + kv_hsum(sums)


cdef inline void add_values(
    const Tile *tile, const float *weights, float *output, int32_t first, int32_t lanes,
    int32_t columns, int32_t heads, row_t format,
) noexcept nogil:
    """Weighted V rows onto ``columns`` vectors of 1 to 3 heads, constants where inlined.

    Only a single column vector has less than 8 ``lanes``.
    """
    cdef float[3 * 64] scaled  # HEADS x ROWS
    cdef vector[12] sums
    cdef vector[3] weight
    cdef vector v
    cdef const unsigned char *row
    cdef float *at
    cdef int64_t offset
    cdef uint64_t left = tile.mask
    cdef int32_t r, h, c
    if row_t is int8_t:
        for h in range(heads):
            for r in range(0, tile.tokens, 8):
                kv_store(scaled + h * ROWS + r, kv_mul(
                    kv_load(weights + h * ROWS + r),
                    kv_load(tile.v_scales + (first >> 2) * ROWS + r),
                ))
        weights = scaled
    for h in range(heads):
        for c in range(columns):
            at = output + h * tile.dim + LANES * (first + c)
            sums[4 * h + c] = kv_load_head(at, lanes) if columns == 1 else kv_load(at)
    while left:
        r = kv_lowest_bit(left)
        left &= left - 1
        offset = r * tile.row_bytes
        row = tile.v + offset
        for h in range(heads):
            weight[h] = kv_splat(weights[h * ROWS + r])
        for c in range(columns):
            v = load_row(row, first + c, format)
            for h in range(heads):
                sums[4 * h + c] = kv_fma(weight[h], v, sums[4 * h + c])
        ask_for(
            tile, tile.tokens * tile.row_bytes + offset + first * LANES * sizeof(row_t),
            columns * LANES * sizeof(row_t),
        )
    for h in range(heads):
        for c in range(columns):
            at = output + h * tile.dim + LANES * (first + c)
            if columns == 1:
                kv_store_head(at, sums[4 * h + c], lanes)
            else:
                kv_store(at, sums[4 * h + c])


cdef inline void attend_heads(
    const Tile *tile, const float *q, float *top, float *total, float *output, int32_t heads,
    row_t format,
) noexcept nogil:
    """One tile into the running softmax of 1 to 3 query heads, a constant where this is inlined."""
    cdef float[3 * 64] scores  # HEADS x ROWS
    cdef int32_t h, i = 0, vectors = (tile.dim + LANES - 1) // LANES
    score_rows(tile, q, scores, heads, format)
    for h in range(heads):
        soften(
            scores + h * ROWS, tile.tokens, top + h, total + h, output + h * tile.dim, tile.dim
        )
    while LANES * (i + 4) <= tile.dim:
        add_values(tile, scores, output, i, LANES, 4, heads, format)
        i += 4
    while i < vectors:
        add_values(
            tile, scores, output, i, min(LANES, tile.dim - LANES * i), 1, heads, format
        )
        i += 1


cdef inline uint64_t rows_of(const kv_span *span, int64_t page) noexcept nogil:
    """Bits of a page's rows that are valid and belong to the span; 0 behind its end."""
    cdef int64_t low = span.first_slot - page * span.page_tokens
    cdef int64_t high = span.last_slot - page * span.page_tokens
    cdef uint64_t bits
    if high <= 0:
        return 0
    bits = span.valid[page]
    if low > 0:
        bits &= ~<uint64_t>0 << low
    if high < 64:
        bits &= ((<uint64_t>1) << high) - 1
    return bits


cdef inline void attend_page(
    const kv_span *span, const unsigned char *page, const unsigned char *following, Tile *tile,
    row_t format,
) noexcept nogil:
    """All heads of a page; ``following`` is the page that is read next, or NULL."""
    cdef int64_t tile_bytes = span.page_tokens * span.row_bytes
    cdef int32_t head, g, query, dim = span.head_dim
    for head in range(span.first_head, span.last_head):
        tile.k = page + head * 2 * tile_bytes
        tile.v = tile.k + tile_bytes
        if head + 1 < span.last_head:
            tile.next = tile.v + tile_bytes
        elif following is not NULL:
            tile.next = following + span.first_head * 2 * tile_bytes
        else:
            tile.next = NULL
        if row_t is int8_t:
            read_scales(tile.k, tile, tile.k_scales)
            read_scales(tile.v, tile, tile.v_scales)
        g = 0
        while g < span.group:
            query = head * span.group + g
            # 4 heads make two pairs rather than 3 and 1.
            if span.group - g == 2 or span.group - g == 4:
                attend_heads(tile, span.q + query * dim, span.max + query, span.sum + query,
                             span.output + query * dim, 2, format)
                g += 2
            elif span.group - g == 1:
                attend_heads(tile, span.q + query * dim, span.max + query, span.sum + query,
                             span.output + query * dim, 1, format)
                g += 1
            else:
                attend_heads(tile, span.q + query * dim, span.max + query, span.sum + query,
                             span.output + query * dim, 3, format)
                g += HEADS
            # The next tile is under way for the group's other heads.
            tile.next = NULL


cdef inline int attend_span(const kv_span *span, row_t format) noexcept nogil:
    cdef Tile tile
    cdef const unsigned char *following
    cdef int64_t tokens = span.page_tokens, page
    cdef int32_t query, first = span.first_head * span.group, last = span.last_head * span.group
    cdef uint64_t next_rows
    for query in range(first, last):
        span.max[query] = -INFINITY
        span.sum[query] = 0
    memset(
        span.output + first * span.head_dim, 0, (last - first) * span.head_dim * sizeof(float)
    )
    tile.row_bytes, tile.tokens, tile.dim = span.row_bytes, span.page_tokens, span.head_dim
    tile.scale = span.scale
    page = span.first_slot // tokens
    tile.mask = rows_of(span, page)
    for page in range(page, (span.last_slot + tokens - 1) // tokens):
        next_rows = rows_of(span, page + 1)
        if tile.mask:
            following = NULL
            if next_rows:
                following = span.pool + span.page_ids[page + 1] * span.page_bytes
            attend_page(
                span, span.pool + span.page_ids[page] * span.page_bytes, following, &tile, format
            )
        tile.mask = next_rows
    return 0


cdef int span_fp32(const kv_span *span) noexcept nogil:
    """FP32 rows."""
    return attend_span(span, <float>0)


cdef int span_fp16(const kv_span *span) noexcept nogil:
    """FP16 rows, FP32 sums."""
    return attend_span(span, <uint16_t>0)


cdef int span_q8(const kv_span *span) noexcept nogil:
    """Q8_0 rows, FP32 sums."""
    return attend_span(span, <int8_t>0)


def exp_for_tests(float[::1] x, float[::1] out):
    """The kernel's exp of x <= 0 (n,), n a multiple of 8, into out (n,)."""
    cdef Py_ssize_t i
    for i in range(0, x.shape[0] // LANES * LANES, LANES):
        kv_store(&out[i], kv_exp(kv_load(&x[i])))
