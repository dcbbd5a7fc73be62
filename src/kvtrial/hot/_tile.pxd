"""What the SIMD kernels share: the walk over the tiles of a span, masks, softmax and prefetch.

A tile is the K and V rows of one KV head in one page. Pages are read once and in the order in which
they lie in memory, K and V tile of each head in turn. A tile goes into the running softmax of all
query heads of its group, with one maximum and one rescale. All the while the lines of the next tile
are asked for, at the pace of the arithmetic, so that memory neither idles nor waits in line.
"""

from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, expf
from libc.stdint cimport int16_t, int32_t, int64_t, uint64_t
from libc.string cimport memset

from kvtrial.hot._kernel cimport kv_span
from kvtrial.hot._simd cimport (
    LANES,
    kv_add,
    kv_exp,
    kv_hmax,
    kv_hsum,
    kv_load,
    kv_lowest_bit,
    kv_max,
    kv_prefetch,
    kv_splat,
    kv_store,
    kv_sub,
    kv_zero,
    vector,
)


cdef enum:
    ROWS = 64  # rows of the largest page

# What is constant while a kernel runs is here too, so that it is inlined as one thing.
ctypedef struct Tile:
    const unsigned char *k
    const unsigned char *v
    # Of the tile that is read next, lines before `asked` were asked for, those before `due` should be.
    const unsigned char *asked
    const unsigned char *due
    int64_t row_bytes
    int32_t ahead  # bytes to ask for while the group is done with a row; 0 without a next tile
    int32_t tokens, dim, group
    int32_t first_query  # of the tile's group, counted from the span's first
    uint64_t mask
    float scale
    # For integer scores: the span's rounded queries (queries, blocks * 32) and their steps times `scale`, as
    # the kernel keeps them; for q8_0 the scales of the tile's rows too, for integer panels V's.
    const int16_t *q
    const float *q_scales
    float[8 * 64] row_scales  # blocks of the longest row x ROWS


# One tile into the running softmax of its group; q and output are (group, dim).
ctypedef void (*tile_fn)(
    Tile *tile, const float *q, float *top, float *total, float *output
) noexcept nogil


cdef inline void ask_for(Tile *tile, int64_t nbytes) noexcept nogil:
    """Prefetches lines of the next tile until ``nbytes`` more of it are asked for."""
    tile.due += nbytes
    while tile.asked < tile.due:
        kv_prefetch(tile.asked)
        tile.asked += 64


cdef inline int64_t share(const Tile *tile, int32_t work) noexcept nogil:
    """Bytes to ask for with so many multiply-adds of vectors.

    A row's scores are as many for a query head as it has vectors, and its values too; its part of
    the softmax takes the time of two.
    """
    cdef int32_t vectors = (tile.dim + LANES - 1) // LANES
    return work * tile.ahead // (tile.group * (vectors + 1))


cdef inline int32_t heads_together(int32_t left) noexcept nogil:
    """How many of so many heads share a panel's vectors next, five at most.

    An odd group begins with five: what is left is even, and no three or one is among it.
    """
    if left > 4:
        return 5 if left % 2 else 4
    return left


cdef inline void hide(const Tile *tile, float *scores) noexcept nogil:
    """Rows outside the mask score -inf, whatever lies in them."""
    cdef uint64_t hidden = ~tile.mask
    cdef int32_t row, h
    if tile.tokens < 64:
        hidden &= ((<uint64_t>1) << tile.tokens) - 1
    while hidden:
        row = kv_lowest_bit(hidden)
        hidden &= hidden - 1
        for h in range(tile.group):
            scores[h * ROWS + row] = -INFINITY


cdef inline void soften(
    Tile *tile, float *scores, float *top, float *total, float *output
) noexcept nogil:
    """Scores become weights; where they raise a head's maximum, its output shrinks."""
    cdef float[16] peaks  # KV_MAX_GROUP
    cdef float keep
    cdef int32_t h, i
    cdef int64_t pace = share(tile, 2 * tile.tokens)
    cdef vector weights, most, sums
    # All maxima first: one after the other, each exp would wait for its own.
    for h in range(tile.group):
        most = kv_splat(-INFINITY)
        for i in range(tile.tokens // LANES):
            # A NaN score is left out here, and shows in the sum.
            most = kv_max(kv_load(scores + h * ROWS + LANES * i), most)
        peaks[h] = kv_hmax(most)
    for h in range(tile.group):
        ask_for(tile, pace)
        # -inf would make inf - inf of rows whose scores all are -inf.
        if peaks[h] < -FLT_MAX:
            peaks[h] = -FLT_MAX
        if peaks[h] > top[h]:
            keep = expf(top[h] - peaks[h])
            top[h] = peaks[h]
            total[h] *= keep
            for i in range(tile.dim):
                output[h * tile.dim + i] *= keep
        most = kv_splat(top[h])
        sums = kv_zero()
        for i in range(tile.tokens // LANES):
            weights = kv_exp(kv_sub(kv_load(scores + h * ROWS + LANES * i), most))
            kv_store(scores + h * ROWS + LANES * i, weights)
            sums = kv_add(sums, weights)
        total[h] += kv_hsum(sums)


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


cdef inline void walk_page(
    const kv_span *span, const unsigned char *page, const unsigned char *following, Tile *tile,
    tile_fn attend,
) noexcept nogil:
    """All heads of a page; ``following`` is the page that is read next, or NULL."""
    cdef int64_t tile_bytes = span.page_tokens * span.row_bytes
    cdef int32_t head, query
    cdef const unsigned char *upcoming
    for head in range(span.first_head, span.last_head):
        tile.k = page + head * 2 * tile_bytes
        tile.v = tile.k + tile_bytes
        upcoming = NULL
        if head + 1 < span.last_head:
            upcoming = tile.v + tile_bytes
        elif following is not NULL:
            upcoming = following + span.first_head * 2 * tile_bytes
        tile.ahead = <int32_t>span.row_bytes if upcoming is not NULL else 0
        tile.asked = tile.due = upcoming
        query = head * span.group
        tile.first_query = query - span.first_head * span.group
        attend(tile, span.q + query * span.head_dim, span.max + query, span.sum + query,
               span.output + query * span.head_dim)
        if upcoming is not NULL:
            # What holes and rounding have left.
            tile.due = upcoming
            ask_for(tile, 2 * tile_bytes)


cdef inline void walk(const kv_span *span, Tile *tile, tile_fn attend) noexcept nogil:
    """A partial over one span, tile by tile: see native/kv_kernel.h."""
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
    tile.group, tile.scale = span.group, span.scale
    page = span.first_slot // tokens
    tile.mask = rows_of(span, page)
    for page in range(page, (span.last_slot + tokens - 1) // tokens):
        next_rows = rows_of(span, page + 1)
        if tile.mask:
            following = NULL
            if next_rows:
                following = span.pool + span.page_ids[page + 1] * span.page_bytes
            walk_page(
                span, span.pool + span.page_ids[page] * span.page_bytes, following, tile, attend
            )
        tile.mask = next_rows
