"""K1's, K2's and K5's kernel: paged, head-major, group-aware, fused, online softmax, SIMD.

One algorithm for three row formats, chosen by the fused type ``row_t``: float (fp32), uint16_t
(fp16) and int8_t (q8_0); sums are FP32 in each. Valid rows of the span are listed once; holes are
not in the list, so nothing of them takes part. Each KV head then goes through tiles of 64 rows:

    scores    4 rows x 3 query heads in registers: a K vector serves all three heads
    softmax   one maximum and one rescale a tile, vector exp (native/simd.h states its error)
    values    4 column vectors x 3 query heads in registers over the tile's rows

Padding lanes of the last K vector are cleared before they are used; those of V land in lanes of the
output tile that are not stored.
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
    void kv_store(float *, vector)
    vector kv_fma(vector, vector, vector)
    vector kv_max(vector, vector)
    vector kv_head(vector, int32_t lanes)
    float kv_hsum(vector)
    float kv_hmax(vector)
    void kv_hsum4(float *, vector, vector, vector, vector)
    vector kv_exp(vector)
    vector kv_mul(vector, vector)
    vector kv_sub(vector, vector)
    vector kv_add(vector, vector)
    vector kv_load_half(const uint16_t *)
    vector kv_load_q8(const unsigned char *block, int32_t first)
    void kv_prefetch(const void *)
    int32_t kv_lowest_bit(uint64_t)

ctypedef fused row_t:
    float
    uint16_t
    int8_t

cdef enum:
    LANES = 8
    SLOTS = 1024  # KV_SPAN_SLOTS
    TILE = 64  # rows between two rescales
    HEADS = 3  # query heads that share a row in registers
    AHEAD = 16  # rows between a read and its prefetch
    GROUP = 16  # KV_MAX_GROUP
    WIDEST = 256  # KV_MAX_HEAD_DIM


cdef inline vector load_row(const unsigned char *row, int32_t i, row_t format) noexcept nogil:
    """Elements [8 i, 8 i + 8) of a row. Only the type of ``format`` counts."""
    if row_t is float:
        return kv_load(<const float *>row + LANES * i)
    elif row_t is uint16_t:
        return kv_load_half(<const uint16_t *>row + LANES * i)
    else:
        return kv_load_q8(row + 34 * (i // 4), LANES * (i % 4))


cdef inline int32_t list_rows(const kv_span *span, int64_t *rows) noexcept nogil:
    """Offsets in the pool of the span's valid rows, of the K tile of head 0; their number."""
    cdef int64_t tokens = span.page_tokens
    cdef int64_t page, low, high, at
    cdef int32_t n = 0
    cdef uint64_t bits
    for page in range(span.first_slot // tokens, (span.last_slot + tokens - 1) // tokens):
        bits = span.valid[page]
        low = span.first_slot - page * tokens
        high = span.last_slot - page * tokens
        if low > 0:
            bits &= ~<uint64_t>0 << low
        if high < 64:
            bits &= ((<uint64_t>1) << high) - 1
        if not bits:
            continue
        at = span.page_ids[page] * span.page_bytes
        while bits:
            rows[n] = at + kv_lowest_bit(bits) * span.row_bytes
            n += 1
            bits &= bits - 1
    return n


cdef inline void score_rows(
    const unsigned char *base, const int64_t *rows, const float *q, int32_t q_stride,
    int32_t vectors, int32_t tail, float *scores, int32_t heads, row_t format,
) noexcept nogil:
    """Scores of 4 rows for 1 to 3 query heads, which is a constant where this is inlined."""
    cdef vector[4] k
    cdef vector[12] sums
    cdef vector query
    cdef int32_t i, h, r
    for h in range(4 * heads):
        sums[h] = kv_zero()
    for i in range(vectors):
        for r in range(4):
            k[r] = load_row(base + rows[r], i, format)
        for h in range(heads):
            query = kv_load(q + h * q_stride + LANES * i)
            for r in range(4):
                sums[4 * h + r] = kv_fma(k[r], query, sums[4 * h + r])
    if tail:
        for r in range(4):
            k[r] = kv_head(load_row(base + rows[r], vectors, format), tail)
        for h in range(heads):
            query = kv_load(q + h * q_stride + LANES * vectors)
            for r in range(4):
                sums[4 * h + r] = kv_fma(k[r], query, sums[4 * h + r])
    for h in range(heads):
        kv_hsum4(scores + h * TILE, sums[4 * h], sums[4 * h + 1], sums[4 * h + 2], sums[4 * h + 3])


cdef inline void add_values(
    const unsigned char *base, const int64_t *rows, int32_t n, const float *weights,
    float *output, int32_t first, int32_t columns, int32_t heads, row_t format,
) noexcept nogil:
    """Weighted V rows onto ``columns`` vectors of 1 to 3 heads, constants where inlined."""
    cdef vector[12] sums
    cdef vector[3] weight
    cdef vector v
    cdef int32_t r, h, c
    for h in range(heads):
        for c in range(columns):
            sums[4 * h + c] = kv_load(output + h * WIDEST + LANES * (first + c))
    for r in range(n):
        for h in range(heads):
            weight[h] = kv_splat(weights[h * TILE + r])
        for c in range(columns):
            v = load_row(base + rows[r], first + c, format)
            for h in range(heads):
                sums[4 * h + c] = kv_fma(weight[h], v, sums[4 * h + c])
    for h in range(heads):
        for c in range(columns):
            kv_store(output + h * WIDEST + LANES * (first + c), sums[4 * h + c])


cdef inline void values_of_heads(
    const unsigned char *base, const int64_t *rows, int32_t n, const float *weights,
    float *output, int32_t vectors, int32_t heads, row_t format,
) noexcept nogil:
    cdef int32_t first = 0
    while first + 4 <= vectors:
        add_values(base, rows, n, weights, output, first, 4, heads, format)
        first += 4
    while first < vectors:
        add_values(base, rows, n, weights, output, first, 1, heads, format)
        first += 1


cdef inline float soften(
    float *scores, int32_t n, float scale, float *top, float *output, int32_t vectors
) noexcept nogil:
    """Scores of one head become weights; the output is rescaled. Returns what the sum keeps.

    scores[n:TILE] is padding: its weights are not summed, and no row goes with them.
    """
    cdef int32_t i
    cdef float peak, keep
    cdef vector scaled, most
    for i in range(n, (n + LANES - 1) // LANES * LANES):
        scores[i] = scores[n - 1]
    most = kv_splat(-INFINITY)
    for i in range((n + LANES - 1) // LANES):
        scaled = kv_mul(kv_load(scores + LANES * i), kv_splat(scale))
        kv_store(scores + LANES * i, scaled)
        most = kv_max(scaled, most)
    peak = kv_hmax(most)
    # -inf would make inf - inf of rows whose scores all are -inf.
    if peak < -3.0e38:
        peak = -3.0e38
    keep = 1
    if peak > top[0]:
        keep = expf(top[0] - peak)
        top[0] = peak
        for i in range(vectors):
            kv_store(output + LANES * i, kv_mul(kv_load(output + LANES * i), kv_splat(keep)))
    for i in range((n + LANES - 1) // LANES):
        kv_store(
            scores + LANES * i, kv_exp(kv_sub(kv_load(scores + LANES * i), kv_splat(top[0])))
        )
    return keep


cdef inline float sum_weights(const float *weights, int32_t n) noexcept nogil:
    cdef vector total = kv_zero()
    cdef int32_t i
    for i in range(n // LANES):
        total = kv_add(total, kv_load(weights + LANES * i))
    if n % LANES:
        total = kv_add(
            total, kv_head(kv_load(weights + n // LANES * LANES), n % LANES)
        )
    return kv_hsum(total)


cdef void attend_head(
    const kv_span *span, int32_t head, const int64_t *rows, int32_t n, row_t format
) noexcept nogil:
    cdef float[16 * 256] q  # GROUP x WIDEST, zeros behind head_dim
    cdef float[16 * 256] output
    cdef float[16 * 64] scores  # GROUP x TILE
    cdef int64_t[4] last  # the tile's last rows, made up to 4
    cdef int32_t dim = span.head_dim, group = span.group
    cdef int32_t vectors = (dim + LANES - 1) // LANES, whole = dim // LANES, tail = dim % LANES
    cdef int32_t t, first, count, r, g, h, i
    cdef int64_t tile_bytes = span.page_tokens * span.row_bytes
    cdef const unsigned char *k_base = span.pool + head * 2 * tile_bytes
    cdef const unsigned char *v_base = k_base + tile_bytes
    cdef const unsigned char *next_row
    cdef const int64_t *tile
    cdef int64_t line
    cdef float *top = span.max + head * group
    cdef float *total = span.sum + head * group
    for g in range(group):
        top[g] = -INFINITY
        total[g] = 0
        memcpy(q + g * WIDEST, span.q + (head * group + g) * dim, dim * sizeof(float))
        for i in range(dim, vectors * LANES):
            q[g * WIDEST + i] = 0
        memset(output + g * WIDEST, 0, vectors * LANES * sizeof(float))
    for t in range((n + TILE - 1) // TILE):
        first = t * TILE
        count = n - first if n - first < TILE else TILE
        tile = rows + first
        for r in range(0, count, 4):
            if first + r + AHEAD + 4 <= n:
                for i in range(4):
                    next_row = v_base + rows[first + r + i]
                    for line in range(0, span.row_bytes, 64):
                        kv_prefetch(next_row + line)
                    next_row = k_base + rows[first + r + AHEAD + i]
                    for line in range(0, span.row_bytes, 64):
                        kv_prefetch(next_row + line)
            if r + 4 > count:
                for i in range(4):
                    last[i] = tile[r + i if r + i < count else count - 1]
                tile = last - r
            g = 0
            while g < group:
                h = group - g if group - g < HEADS else HEADS
                if h == 3:
                    score_rows(k_base, tile + r, q + g * WIDEST, WIDEST, whole, tail,
                               scores + g * TILE + r, 3, format)
                elif h == 2:
                    score_rows(k_base, tile + r, q + g * WIDEST, WIDEST, whole, tail,
                               scores + g * TILE + r, 2, format)
                else:
                    score_rows(k_base, tile + r, q + g * WIDEST, WIDEST, whole, tail,
                               scores + g * TILE + r, 1, format)
                g += h
        tile = rows + first
        for g in range(group):
            total[g] *= soften(
                scores + g * TILE, count, span.scale, top + g, output + g * WIDEST, vectors
            )
            total[g] += sum_weights(scores + g * TILE, count)
        g = 0
        while g < group:
            h = group - g if group - g < HEADS else HEADS
            if h == 3:
                values_of_heads(v_base, tile, count, scores + g * TILE, output + g * WIDEST,
                                vectors, 3, format)
            elif h == 2:
                values_of_heads(v_base, tile, count, scores + g * TILE, output + g * WIDEST,
                                vectors, 2, format)
            else:
                values_of_heads(v_base, tile, count, scores + g * TILE, output + g * WIDEST,
                                vectors, 1, format)
            g += h
    for g in range(group):
        memcpy(
            span.output + (head * group + g) * dim, output + g * WIDEST, dim * sizeof(float)
        )


cdef inline int attend_span(const kv_span *span, row_t format) noexcept nogil:
    cdef int64_t[1024] rows  # SLOTS
    cdef int32_t n = list_rows(span, rows)
    cdef int32_t head
    for head in range(span.first_head, span.last_head):
        attend_head(span, head, rows, n, format)
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
