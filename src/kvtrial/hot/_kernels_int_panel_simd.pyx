"""The kernel of integer panels: scores and values are one operation, a product of integers.

    sums (heads, columns) += steps (heads) * (factors (heads, depth) @ panel (depth, columns)) * scales

Factors are what a panel is multiplied with, rounded: for scores the query, once a span, in blocks of 32; for
values the weights of at most 32 rows, each times its row's step. They are int16 where codes are int8, and
int8 where codes have 4 bits; so 32 of their products fit into int32, and eight of the latter into int16.
A sum covers a depth of 32 at most: a block of K, 32 rows of V. All of it is exact until it is made float.

A nibble is its code + 8, so 8 times the sum of the factors is taken off. Where rows are stored rotated, the
query is too, and the output is turned back once a span.

Rows outside the mask score -inf, and weigh 0 whatever their step holds: theirs is not read. The fused type
``code_t`` is what a panel holds, int8 or two codes a byte (uint8_t).
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int16_t, int32_t, int64_t, int8_t, uint8_t, uint16_t, uint64_t
from libc.string cimport memcpy, memset

from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE, kv_span
from kvtrial.hot._panels cimport BLOCK, blocks_of, panel_bytes, tile_bytes
from kvtrial.hot._quants cimport (
    codes,
    floats,
    q_add,
    q_add_pairs,
    q_add_sums,
    q_fma,
    q_high_nibbles,
    q_load,
    q_load_f16,
    q_load_four,
    q_load_i8,
    q_low_nibbles,
    q_max,
    q_max_lane,
    q_mul,
    q_no_sums,
    q_pairs_float,
    q_round_i8x32,
    q_round_i16x16,
    q_set,
    q_store,
    q_store_i8,
    q_sum,
    q_sums_float,
    q_widen_i8,
    sums,
)
from kvtrial.hot._rotation cimport rotate
from kvtrial.hot._simd cimport LANES, kv_lowest_bit
from kvtrial.hot._tile cimport (
    ROWS,
    Tile,
    ask_for,
    heads_together,
    hide,
    soften,
    tile_fn,
    walk,
)


cdef enum:
    QUERY_ROOM = 16384  # elements of queries that a pass over the pages can have
    PACE_BITS = 16

ctypedef fused code_t:
    int8_t
    uint8_t

ctypedef fused value_t:
    int8_t
    uint8_t

# Of head h: factors from h * factors_apart bytes on; a step, and what is taken off the sum for the 8s in
# nibbles, from h * steps_apart floats on; sums from h * sums_apart floats on.
ctypedef struct Panel:
    const unsigned char *codes
    int64_t columns
    int32_t depth, lanes  # lanes: columns that have a sum
    const unsigned char *factors
    int64_t factors_apart
    const float *steps
    int64_t steps_apart
    const unsigned char *scales  # of scores, halves, one a column
    float *sums
    int64_t sums_apart
    int64_t pace  # of the next tile, bytes to ask for in a depth of 8 of a head and a vector, << PACE_BITS


# Sums of a block, as in _kernels_panel_simd: five heads (a to e) by two column vectors, or two by four.
ctypedef struct Sums:
    sums a0, a1, b0, b1, c0, c1, d0, d1, e0, e1


cdef inline sums add(sums s, codes x, const unsigned char *four, code_t code) noexcept nogil:
    """A vector of codes times four bytes of a head's factors. ``code`` is only a type."""
    if code_t is int8_t:
        return q_add_pairs(s, x, q_load_four(four))
    else:
        return q_add_sums(s, x, q_load_four(four))


cdef inline void spread(
    codes x, codes y, codes z, codes w, const unsigned char *four, int64_t apart, Sums *s,
    int32_t vectors, int32_t heads, code_t code,
) noexcept nogil:
    """Two or four vectors of codes times the same four bytes of each head."""
    s.a0, s.a1 = add(s.a0, x, four, code), add(s.a1, y, four, code)
    if heads > 1:
        s.b0, s.b1 = add(s.b0, x, four + apart, code), add(s.b1, y, four + apart, code)
    if vectors == 4:
        s.c0, s.c1 = add(s.c0, z, four, code), add(s.c1, w, four, code)
        if heads > 1:
            s.d0, s.d1 = add(s.d0, z, four + apart, code), add(s.d1, w, four + apart, code)
    if heads > 2:
        s.c0, s.c1 = add(s.c0, x, four + 2 * apart, code), add(s.c1, y, four + 2 * apart, code)
    if heads > 3:
        s.d0, s.d1 = add(s.d0, x, four + 3 * apart, code), add(s.d1, y, four + 3 * apart, code)
    if heads > 4:
        s.e0, s.e1 = add(s.e0, x, four + 4 * apart, code), add(s.e1, y, four + 4 * apart, code)


cdef inline void add_depth(
    const unsigned char *at, const unsigned char *four, int64_t apart, Sums *s, int32_t vectors,
    int32_t heads, code_t code,
) noexcept nogil:
    """The codes that lie together in depth: two int8 of a column, or eight of 4 bits."""
    cdef codes x, y, z, w
    if code_t is int8_t:
        x, y = q_widen_i8(at), q_widen_i8(at + 16)
        z, w = x, y
        if vectors == 4:
            z, w = q_widen_i8(at + 32), q_widen_i8(at + 48)
        spread(x, y, z, w, four, apart, s, vectors, heads, code)
    else:
        x, y = q_load_i8(at), q_load_i8(at + 32)
        z, w = x, y
        if vectors == 4:
            z, w = q_load_i8(at + 64), q_load_i8(at + 96)
        spread(
            q_low_nibbles(x), q_low_nibbles(y), q_low_nibbles(z), q_low_nibbles(w), four, apart, s,
            vectors, heads, code,
        )
        spread(
            q_high_nibbles(x), q_high_nibbles(y), q_high_nibbles(z), q_high_nibbles(w), four + 4,
            apart, s, vectors, heads, code,
        )


cdef inline void finish(
    const Panel *panel, int32_t head, int32_t vector, sums s, bint scores, code_t code
) noexcept nogil:
    """An integer sum onto its float."""
    cdef const float *step = panel.steps + head * panel.steps_apart
    cdef float *out = panel.sums + head * panel.sums_apart + LANES * vector
    cdef int32_t lanes = panel.lanes - LANES * vector
    cdef float[8] tail  # LANES
    cdef floats x
    if code_t is int8_t:
        x = q_pairs_float(s)
    else:
        x = q_add(q_sums_float(s), q_set(-step[1]))
    if scores:
        x = q_mul(x, q_load_f16(panel.scales + 2 * LANES * vector))
    if scores or lanes >= LANES:
        q_store(out, q_fma(x, q_set(step[0]), q_load(out)))
    elif lanes > 0:
        memcpy(tail, out, lanes * sizeof(float))
        q_store(tail, q_fma(x, q_set(step[0]), q_load(tail)))
        memcpy(out, tail, lanes * sizeof(float))


cdef inline void multiply_block(
    Tile *tile, const Panel *panel, int32_t head, int32_t first, int32_t vectors, int32_t heads,
    bint scores, code_t code,
) noexcept nogil:
    """The panel's product for heads from ``head`` and column vectors from ``first`` on."""
    cdef Sums s
    cdef int32_t each = 2 if code_t is int8_t else 4, _
    cdef const unsigned char *at = panel.codes + first * LANES * each
    cdef const unsigned char *factors = panel.factors + head * panel.factors_apart
    cdef int64_t apart = panel.factors_apart, row = panel.columns * each
    cdef int64_t pace = panel.pace * heads * vectors >> PACE_BITS
    s.a0 = s.a1 = s.b0 = s.b1 = s.c0 = s.c1 = s.d0 = s.d1 = s.e0 = s.e1 = q_no_sums()
    for _ in range(panel.depth // 8):
        ask_for(tile, pace)
        if code_t is int8_t:
            add_depth(at, factors, apart, &s, vectors, heads, code)
            add_depth(at + row, factors + 4, apart, &s, vectors, heads, code)
            add_depth(at + 2 * row, factors + 8, apart, &s, vectors, heads, code)
            add_depth(at + 3 * row, factors + 12, apart, &s, vectors, heads, code)
            at += 4 * row
            factors += 16
        else:
            add_depth(at, factors, apart, &s, vectors, heads, code)
            at += row
            factors += 8
    finish(panel, head, first, s.a0, scores, code)
    finish(panel, head, first + 1, s.a1, scores, code)
    if heads > 1:
        finish(panel, head + 1, first, s.b0, scores, code)
        finish(panel, head + 1, first + 1, s.b1, scores, code)
    if vectors == 4:
        finish(panel, head, first + 2, s.c0, scores, code)
        finish(panel, head, first + 3, s.c1, scores, code)
        if heads > 1:
            finish(panel, head + 1, first + 2, s.d0, scores, code)
            finish(panel, head + 1, first + 3, s.d1, scores, code)
    if heads > 2:
        finish(panel, head + 2, first, s.c0, scores, code)
        finish(panel, head + 2, first + 1, s.c1, scores, code)
    if heads > 3:
        finish(panel, head + 3, first, s.d0, scores, code)
        finish(panel, head + 3, first + 1, s.d1, scores, code)
    if heads > 4:
        finish(panel, head + 4, first, s.e0, scores, code)
        finish(panel, head + 4, first + 1, s.e1, scores, code)


cdef inline void multiply_heads(
    Tile *tile, const Panel *panel, int32_t head, int32_t vectors, int32_t heads, bint scores,
    code_t code,
) noexcept nogil:
    """So many column vectors, an even number, for so many heads, a constant where inlined."""
    cdef int32_t i = 0
    if heads <= 2:
        while i + 4 <= vectors:
            multiply_block(tile, panel, head, i, 4, heads, scores, code)
            i += 4
    while i < vectors:
        multiply_block(tile, panel, head, i, 2, heads, scores, code)
        i += 2


cdef inline void multiply(
    Tile *tile, const Panel *panel, int32_t vectors, bint scores, code_t code
) noexcept nogil:
    """So many column vectors of the panel for the whole group."""
    cdef int32_t head = 0, heads
    while head < tile.group:
        heads = heads_together(tile.group - head)
        if heads == 5:
            multiply_heads(tile, panel, head, vectors, 5, scores, code)
        elif heads == 4:
            multiply_heads(tile, panel, head, vectors, 4, scores, code)
        elif heads == 3:
            multiply_heads(tile, panel, head, vectors, 3, scores, code)
        elif heads == 2:
            multiply_heads(tile, panel, head, vectors, 2, scores, code)
        else:
            multiply_heads(tile, panel, head, vectors, 1, scores, code)
        head += heads


cdef inline floats magnitude(floats x) noexcept nogil:
    return q_max(x, q_mul(x, q_set(-1)))


cdef inline float largest_of(const float *x) noexcept nogil:
    """Largest magnitude of 32 floats, 1e-30 at least."""
    cdef floats most = q_set(1e-30)
    cdef int32_t i
    for i in range(BLOCK // LANES):
        most = q_max(most, magnitude(q_load(x + LANES * i)))
    return q_max_lane(most)


cdef inline float levels_of(code_t code) noexcept nogil:
    """What factors are rounded to, from its negative on: int16 for int8 codes, int8 for 4 bits."""
    return 32767 if code_t is int8_t else 127


cdef inline float store_factors(
    floats a, floats b, floats c, floats d, unsigned char *factors, code_t code
) noexcept nogil:
    """32 of them, whole to nearest; returns 8 times their sum where codes have 4 bits."""
    cdef const unsigned char *eights = [8, 8, 8, 8]
    cdef codes whole
    if code_t is int8_t:
        q_store_i8(factors, q_round_i16x16(a, b))
        q_store_i8(factors + 32, q_round_i16x16(c, d))
        return 0
    else:
        whole = q_round_i8x32(a, b, c, d)
        q_store_i8(factors, whole)
        return q_sum(q_sums_float(q_add_sums(q_no_sums(), q_load_four(eights), whole)))


cdef inline void scale_weights(
    const Tile *tile, const float *weights, const float *total, float *scaled, float *steps,
    value_t code,
) noexcept nogil:
    """Weights of 32 rows in whole and broken steps of each head's largest one, and those steps."""
    cdef int32_t h, i
    cdef float largest
    for h in range(tile.group):
        largest = largest_of(weights + h * ROWS)
        for i in range(BLOCK // LANES):
            q_store(
                scaled + h * BLOCK + LANES * i,
                q_mul(
                    q_load(weights + h * ROWS + LANES * i), q_set(levels_of(code) / largest)
                ),
            )
        # A NaN among the weights is lost in rounding, and shows in their sum.
        steps[h] = largest / levels_of(code) + total[h] * <float>0


cdef inline void share_steps(
    Tile *tile, const uint16_t *halves, int32_t rows, uint64_t mask, float *shares, float *largest
) noexcept nogil:
    """Steps of at most 32 rows over the largest of them, which each block has; hidden rows have none."""
    cdef int32_t i
    for i in range(BLOCK // LANES):
        q_store(
            shares + LANES * i,
            q_load_f16(halves + LANES * i) if LANES * i < rows else q_set(0),
        )
    # No weight, not even 0, keeps a NaN out.
    mask = ~mask & ((<uint64_t>1) << rows) - 1
    while mask:
        shares[kv_lowest_bit(mask)] = 0
        mask &= mask - 1
    largest[0] = largest_of(shares)
    for i in range(BLOCK // LANES):
        q_store(shares + LANES * i, q_mul(q_load(shares + LANES * i), q_set(1 / largest[0])))


cdef inline void round_weights(
    const Tile *tile, const float *scaled, const float *weight_steps, const float *shares,
    float largest, unsigned char *factors, float *steps, value_t code,
) noexcept nogil:
    """What `scale_weights` gave, each row times its share of the largest step, rounded."""
    cdef floats a = q_load(shares), b = q_load(shares + LANES)
    cdef floats c = q_load(shares + 2 * LANES), d = q_load(shares + 3 * LANES)
    cdef int32_t h
    for h in range(tile.group):
        steps[2 * h] = weight_steps[h] * largest
        steps[2 * h + 1] = store_factors(
            q_mul(q_load(scaled), a), q_mul(q_load(scaled + LANES), b),
            q_mul(q_load(scaled + 2 * LANES), c), q_mul(q_load(scaled + 3 * LANES), d),
            factors, code,
        )
        scaled += BLOCK
        factors += BLOCK * (2 if value_t is int8_t else 1)


cdef inline void attend_tile(
    Tile *tile, const float *q, float *top, float *total, float *output, code_t key, value_t value
) noexcept nogil:
    """One tile into the running softmax of its group."""
    cdef float[16 * 64] scores  # KV_MAX_GROUP x ROWS
    cdef unsigned char[16 * 32 * 2] factors  # KV_MAX_GROUP x BLOCK int16
    cdef float[16 * 2] steps
    cdef float[16 * 32] scaled  # KV_MAX_GROUP x BLOCK
    cdef float[16] weight_steps
    cdef float[8] largest  # blocks of the longest row
    cdef Panel panel
    cdef int64_t tokens = tile.tokens, dim = tile.dim, padded = blocks_of(tile.dim) * BLOCK
    cdef int64_t key_bits = 8 if code_t is int8_t else 4, bits = 8 if value_t is int8_t else 4
    cdef int32_t block, blocks = <int32_t>blocks_of(dim), part, first, rows, _
    cdef uint64_t mask
    cdef const unsigned char *v = tile.k + tile_bytes(tokens, dim, <int>key_bits)
    cdef const uint16_t *value_steps = <const uint16_t *>(v + panel_bytes(tokens, dim, <int>bits))
    memset(scores, 0, tile.group * ROWS * sizeof(float))
    panel.columns, panel.depth, panel.lanes = tokens, BLOCK, ROWS
    # A head's K and V are 2 * tokens * ahead bytes, and have tokens * padded / 32 depths of 8 of a vector.
    panel.pace = (<int64_t>tile.ahead << PACE_BITS + 6) // (tile.group * padded)
    panel.factors_apart, panel.steps_apart = padded * key_bits // 4, 2 * blocks
    panel.sums, panel.sums_apart = scores, ROWS
    panel.codes, panel.scales = tile.k, tile.k + panel_bytes(tokens, dim, <int>key_bits)
    panel.factors = <const unsigned char *>tile.q + tile.first_query * panel.factors_apart
    panel.steps = tile.q_scales + tile.first_query * panel.steps_apart
    for _ in range(blocks):
        multiply(tile, &panel, <int32_t>tokens // LANES, True, key)
        panel.codes += panel_bytes(tokens, BLOCK, <int>key_bits)
        panel.scales += 2 * tokens
        panel.factors += BLOCK * key_bits // 4
        panel.steps += 2
    hide(tile, scores)
    soften(tile, scores, top, total, output)
    panel.columns, panel.scales = padded, NULL
    panel.factors, panel.factors_apart = factors, BLOCK * bits // 4
    panel.steps, panel.steps_apart = steps, 2
    panel.sums_apart = dim
    for part in range((<int32_t>tokens + BLOCK - 1) // BLOCK):
        first = BLOCK * part
        mask = tile.mask >> first
        rows = min(<int32_t>tokens - first, BLOCK)
        if not mask & (((<uint64_t>1) << rows) - 1):
            continue
        panel.depth = rows
        scale_weights(tile, scores + first, total, scaled, weight_steps, value)
        for block in range(blocks):
            share_steps(
                tile, value_steps + block * tokens + first, rows, mask,
                tile.row_scales + BLOCK * block, largest + block,
            )
        for block in range(blocks):
            round_weights(
                tile, scaled, weight_steps, tile.row_scales + BLOCK * block, largest[block],
                factors, steps, value,
            )
            panel.codes = v + first * padded * bits // 8 + block * BLOCK * (16 // bits)
            panel.sums, panel.lanes = output + block * BLOCK, <int32_t>dim - block * BLOCK
            multiply(tile, &panel, 4, False, value)


cdef inline void round_query(
    const kv_span *span, const float *q, bint rotated, unsigned char *rounded, float *steps,
    code_t code,
) noexcept nogil:
    """A query in blocks of 32, zeros behind it; steps are those of its blocks times the span's scale.

    A step is NaN where an element is NaN or infinite, so that every score is.
    """
    cdef float[256] turned  # KV_MAX_HEAD_DIM
    cdef floats odd = q_set(0), inverse
    cdef float *x
    cdef float largest
    cdef int32_t block, i
    memset(turned, 0, sizeof(turned))
    memcpy(turned, q, span.head_dim * sizeof(float))
    for i in range(<int32_t>blocks_of(span.head_dim) * (BLOCK // LANES)):
        odd = q_fma(q_load(turned + LANES * i), q_set(0), odd)
    if rotated:
        rotate(turned, span.head_dim)
    for block in range(<int32_t>blocks_of(span.head_dim)):
        x = turned + BLOCK * block
        largest = largest_of(x)
        inverse = q_set(levels_of(code) / largest)
        steps[2 * block] = q_sum(odd) + span.scale * (largest / levels_of(code))
        steps[2 * block + 1] = store_factors(
            q_mul(q_load(x), inverse), q_mul(q_load(x + LANES), inverse),
            q_mul(q_load(x + 2 * LANES), inverse), q_mul(q_load(x + 3 * LANES), inverse),
            rounded + BLOCK * block * (2 if code_t is int8_t else 1), code,
        )


cdef inline void attend_span(
    const kv_span *span, tile_fn attend, bint rotated_keys, bint rotated_values, code_t key
) noexcept nogil:
    """As many heads in a pass over the pages as there is room for queries."""
    cdef unsigned char[2 * 16384] rounded  # QUERY_ROOM int16
    cdef float[1024] steps  # of that many elements in blocks of 32, two each
    cdef Tile tile
    cdef kv_span part = span[0]
    cdef int32_t blocks = <int32_t>blocks_of(span.head_dim), query, first, n
    tile.q, tile.q_scales = <const int16_t *>rounded, steps
    while part.first_head < span.last_head:
        part.last_head = min(
            span.last_head, part.first_head + QUERY_ROOM // (blocks * BLOCK * span.group)
        )
        first, n = part.first_head * span.group, (part.last_head - part.first_head) * span.group
        for query in range(n):
            round_query(
                span, span.q + (first + query) * span.head_dim, rotated_keys,
                rounded + query * blocks * BLOCK * (2 if code_t is int8_t else 1),
                steps + query * blocks * 2, key,
            )
        walk(&part, &tile, attend)
        if rotated_values:
            for query in range(first, first + n):
                rotate(span.output + query * span.head_dim, span.head_dim)
        part.first_head = part.last_head


cdef void attend_int8(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil:
    attend_tile(tile, q, top, total, output, <int8_t>0, <int8_t>0)


cdef void attend_int4(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil:
    attend_tile(tile, q, top, total, output, <uint8_t>0, <uint8_t>0)


cdef void attend_int84(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil:
    attend_tile(tile, q, top, total, output, <int8_t>0, <uint8_t>0)


cdef int span_int8(const kv_span *span) noexcept nogil:
    """K and V in int8, K rotated."""
    attend_span(span, attend_int8, True, False, <int8_t>0)
    return 0


cdef int span_int4(const kv_span *span) noexcept nogil:
    """K and V in 4 bits."""
    attend_span(span, attend_int4, False, False, <uint8_t>0)
    return 0


cdef int span_int4_rotated(const kv_span *span) noexcept nogil:
    """K and V in 4 bits, both rotated."""
    attend_span(span, attend_int4, True, True, <uint8_t>0)
    return 0


cdef int span_int84_rotated(const kv_span *span) noexcept nogil:
    """K in int8, V in 4 bits, both rotated."""
    attend_span(span, attend_int84, True, True, <int8_t>0)
    return 0


def kernels():
    """Page format to its kernel, a ``kv_span_fn`` in a PyCapsule."""
    return {
        "int8rp": PyCapsule_New(<void *>span_int8, KV_KERNEL_CAPSULE, NULL),
        "int4p": PyCapsule_New(<void *>span_int4, KV_KERNEL_CAPSULE, NULL),
        "int4rp": PyCapsule_New(<void *>span_int4_rotated, KV_KERNEL_CAPSULE, NULL),
        "int8r4rp": PyCapsule_New(<void *>span_int84_rotated, KV_KERNEL_CAPSULE, NULL),
    }
