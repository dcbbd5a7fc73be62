"""Attention over a layer: spans by a kernel, joined in order; and the causal block by BLAS.

A layer is cut at multiples of KV_SPAN_SLOTS, whatever the number of threads; partials are joined
in the order of their positions, so that results are bitwise the same for any.
"""

cimport numpy as cnp
from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, expf
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from scipy.linalg.cython_blas cimport sgemm

from kvtrial._threads cimport parallel_for
from kvtrial.contract import Partial, PoolExhausted

from kvtrial.hot._door cimport part_of
from kvtrial.hot._kernel cimport KV_SPAN_SLOTS, kv_span, kv_span_fn
from kvtrial.hot._rows cimport Layout, read_pair
from kvtrial.hot._simd cimport (
    kv_add,
    kv_exp,
    kv_hmax,
    kv_hsum,
    kv_load,
    kv_max,
    kv_splat,
    kv_store,
    kv_sub,
    kv_zero,
    vector,
)


cnp.import_array()


ctypedef struct Job:
    const kv_span *whole
    kv_span_fn kernel
    float *partials
    int64_t first_span, head_parts
    int failed


cdef int64_t partial_floats(int64_t queries, int64_t dim) noexcept nogil:
    """Room of one partial: output, max and sum of so many query heads, in whole cache lines.

    So each output begins a line, and a vector load or store of it touches one line, not two.
    """
    return (queries * (dim + 2) + 15) // 16 * 16


cdef void place_partial(kv_span *span, float *at) noexcept nogil:
    """Lets a span write its partial from ``at`` on, for all local query heads."""
    cdef int64_t queries = <int64_t>span.kv_heads * span.group
    span.output = at
    span.max = at + queries * span.head_dim
    span.sum = span.max + queries


cdef void span_task(void *context, int64_t task) noexcept nogil:
    """One span of positions, for all heads or for one."""
    cdef Job *job = <Job *>context
    cdef kv_span span = job.whole[0]
    cdef int64_t part = task // job.head_parts, first = (job.first_span + part) * KV_SPAN_SLOTS
    span.first_slot = max(span.first_slot, first)
    span.last_slot = min(span.last_slot, first + KV_SPAN_SLOTS)
    if job.head_parts > 1:
        span.first_head += <int32_t>(task % job.head_parts)
        span.last_head = span.first_head + 1
    place_partial(
        &span, job.partials + part * partial_floats(span.kv_heads * span.group, span.head_dim)
    )
    if job.kernel(&span):
        job.failed = 1


cdef void join(
    float *top, float *total, float *output, const float *more_top, const float *more_total,
    const float *more_output, int64_t heads, int64_t dim,
) noexcept nogil:
    """Adds a partial of ``heads`` query heads to a running one."""
    cdef int64_t h, d
    cdef float peak, mine, other
    for h in range(heads):
        if more_total[h] == 0 and more_top[h] == -INFINITY:
            continue
        peak = more_top[h] if more_top[h] > top[h] else top[h]
        mine = 0 if top[h] == -INFINITY else expf(top[h] - peak)
        other = expf(more_top[h] - peak)
        top[h] = peak
        total[h] = total[h] * mine + more_total[h] * other
        for d in range(dim):
            output[h * dim + d] = output[h * dim + d] * mine + more_output[h * dim + d] * other


cdef int attend_spans(
    const kv_span *whole, kv_span_fn kernel, float *work, int threads
) noexcept nogil:
    """The partial over all of ``whole``, of any length, into its max, sum and output.

    ``work`` begins at a cache line and has room for one partial a span and one more, where the
    queries are copied to: the caller's may lie across lines. Returns 0, or the kernel's failure.
    """
    cdef Job job
    cdef kv_span aligned = whole[0], partial = whole[0]
    cdef int64_t spans, part, at, dim = whole.head_dim
    cdef int64_t first = whole.first_head * whole.group
    cdef int64_t heads = (whole.last_head - whole.first_head) * whole.group
    cdef int64_t room = partial_floats(whole.kv_heads * whole.group, dim)
    for at in range(first, first + heads):
        whole.max[at] = -INFINITY
        whole.sum[at] = 0
    memset(whole.output + first * dim, 0, heads * dim * sizeof(float))
    if whole.first_slot >= whole.last_slot or not heads:
        return 0
    memcpy(work + first * dim, whole.q + first * dim, heads * dim * sizeof(float))
    aligned.q = work
    job.whole, job.kernel, job.partials, job.failed = &aligned, kernel, work + room, 0
    job.first_span = whole.first_slot // KV_SPAN_SLOTS
    spans = (whole.last_slot + KV_SPAN_SLOTS - 1) // KV_SPAN_SLOTS - job.first_span
    job.head_parts = whole.last_head - whole.first_head if threads > 1 else 1
    parallel_for(span_task, &job, spans * job.head_parts, threads)
    for part in range(spans):
        place_partial(&partial, job.partials + part * room)
        join(
            whole.max + first, whole.sum + first, whole.output + first * dim,
            partial.max + first, partial.sum + first, partial.output + first * dim, heads, dim,
        )
    return job.failed


cdef object narrow(kv_span *span, object spec, object kv_heads, object positions):
    """Cuts a layer's whole span to a part; the new `Partial` that it writes to from now on."""
    cdef int64_t first_query = spec.heads[0] * spec.group
    span.first_head, span.last_head, span.first_slot, span.last_slot = part_of(
        spec, span.last_slot, kv_heads, positions
    )
    part = Partial.empty(spec.q_heads, spec.head_dim)
    span.max = <float *>cnp.PyArray_DATA(part.max) + first_query
    span.sum = <float *>cnp.PyArray_DATA(part.sum) + first_query
    span.output = <float *>cnp.PyArray_DATA(part.output) + first_query * span.head_dim
    return part


# The causal block ---------------------------------------------------------------------------------

cdef enum:
    COLUMNS = 256  # cached rows that one pair of matrix products takes
    QUERIES = 64  # block rows that it takes
    TASK_ROWS = 128  # block rows of a task, whatever the number of threads


ctypedef struct BlockJob:
    const kv_span *whole
    const Layout *layout
    int64_t n, q_stride
    float *out
    int failed


cdef int64_t gather(
    const kv_span *span, const Layout *layout, int64_t head, int64_t first, int64_t last,
    float *k, float *v, int64_t *slots,
) noexcept nogil:
    """Valid rows of slots [first, last) of one head as FP32 (rows, head_dim); their number."""
    cdef int64_t tokens = span.page_tokens, slot, n = 0
    cdef const unsigned char *at
    for slot in range(first, last):
        if span.valid[slot // tokens] >> (slot % tokens) & 1:
            at = span.pool + span.page_ids[slot // tokens] * span.page_bytes
            at += head * layout.pair_bytes
            read_pair(
                layout, k + n * span.head_dim, v + n * span.head_dim, at, slot % tokens
            )
            slots[n] = slot
            n += 1
    return n


cdef void soften_row(
    float *scores, int64_t n, float *top, float *total, float *output, int64_t dim
) noexcept nogil:
    """Scores of one query over n columns become weights; its output is rescaled."""
    cdef int64_t i, whole = n // 8 * 8
    cdef float peak = top[0], keep
    cdef vector most = kv_splat(top[0]), sums = kv_zero()
    if not n:
        return
    for i in range(0, whole, 8):
        most = kv_max(kv_load(scores + i), most)
    peak = kv_hmax(most)
    for i in range(whole, n):
        peak = max(peak, scores[i])
    if peak < -FLT_MAX:
        peak = -FLT_MAX
    if peak > top[0]:
        keep = expf(top[0] - peak)
        total[0] *= keep
        for i in range(dim):
            output[i] *= keep
        top[0] = peak
    for i in range(0, whole, 8):
        most = kv_exp(kv_sub(kv_load(scores + i), kv_splat(peak)))
        kv_store(scores + i, most)
        sums = kv_add(sums, most)
    total[0] += kv_hsum(sums)
    for i in range(whole, n):
        scores[i] = expf(scores[i] - peak)
        total[0] += scores[i]


cdef void block_head(
    const kv_span *span, const Layout *layout, int64_t head, int64_t n, int64_t q_stride,
    float *out, float *work,
) noexcept nogil:
    """All n query rows of one KV head's group; q and out rows are ``q_stride`` floats apart."""
    cdef int64_t dim = span.head_dim, group = span.group
    cdef float *k = work
    cdef float *v = k + COLUMNS * dim
    cdef float *scores = v + COLUMNS * dim
    cdef float *q = scores + QUERIES * group * COLUMNS
    cdef float *output = q + n * group * dim
    cdef float *top = output + n * group * dim
    cdef float *total = top + n * group
    cdef int64_t[256] slots  # COLUMNS
    cdef int64_t first, row, rows, i, seen, m, columns, r, g, c, at, tile, part
    cdef int64_t begin = span.last_slot - n
    cdef int lines, width, depth = <int>dim, leading = COLUMNS
    cdef float weight, one = 1, zero = 0, scale = span.scale
    for i in range(n):
        memcpy(
            q + i * group * dim, span.q + i * q_stride + head * group * dim,
            group * dim * sizeof(float),
        )
    memset(output, 0, n * group * dim * sizeof(float))
    for i in range(n * group):
        top[i], total[i] = -INFINITY, 0
    for tile in range((span.last_slot + COLUMNS - 1) // COLUMNS):
        first = tile * COLUMNS
        columns = gather(
            span, layout, head, first, min(first + COLUMNS, span.last_slot), k, v, slots
        )
        if not columns:
            continue
        for part in range((n + QUERIES - 1) // QUERIES):
            row = part * QUERIES
            rows = min(n - row, <int64_t>QUERIES)
            # Columns that the newest of these rows sees.
            m = columns
            while m and slots[m - 1] > begin + row + rows - 1:
                m -= 1
            if not m:
                continue
            lines, width = <int>(rows * group), <int>m
            # Row-major S (lines, m) = Q K^T is column-major S^T (m, lines).
            sgemm(b"T", b"N", &width, &lines, &depth, &scale, k, &depth,
                  q + row * group * dim, &depth, &zero, scores, &leading)
            seen = m
            for r in range(rows - 1, -1, -1):
                while seen and slots[seen - 1] > begin + row + r:
                    seen -= 1
                for g in range(group):
                    i = (row + r) * group + g
                    soften_row(scores + (r * group + g) * COLUMNS, seen, top + i, total + i,
                               output + i * dim, dim)
            # Columns that every row sees go through one product, those of the diagonal one by one:
            # a weight of 0 would not keep NaN out.
            width = <int>seen
            if seen:
                sgemm(b"N", b"N", &depth, &lines, &width, &one, v, &depth, scores, &leading, &one,
                      output + row * group * dim, &depth)
            for r in range(rows):
                for c in range(width, m):
                    if slots[c] > begin + row + r:
                        break
                    for g in range(group):
                        i = (row + r) * group + g
                        weight = scores[(r * group + g) * COLUMNS + c]
                        for at in range(dim):
                            output[i * dim + at] += weight * v[c * dim + at]
    for i in range(n * group):
        for r in range(dim):
            out[i // group * q_stride + (head * group + i % group) * dim + r] = (
                output[i * dim + r] / total[i] if total[i] != 0 else 0
            )


cdef void block_task(void *context, int64_t task) noexcept nogil:
    """TASK_ROWS rows of the block, for one KV head; those with most to look at come first.

    A prefill is no decode step, so a task allocates its work space: two tiles, their scores, and
    queries and outputs of its rows.
    """
    cdef BlockJob *job = <BlockJob *>context
    cdef kv_span span = job.whole[0]
    cdef int64_t dim = span.head_dim, group = span.group
    cdef int64_t first = (job.n - 1) // TASK_ROWS * TASK_ROWS - task // span.kv_heads * TASK_ROWS
    cdef int64_t rows = min(job.n - first, <int64_t>TASK_ROWS)
    cdef float *work = <float *>malloc(
        sizeof(float) * (
            2 * COLUMNS * dim + QUERIES * group * COLUMNS + rows * group * (2 * dim + 2)
        )
    )
    if work is NULL:
        job.failed = 1
        return
    span.q += first * job.q_stride
    span.last_slot -= job.n - first - rows
    block_head(
        &span, job.layout, task % span.kv_heads, rows, job.q_stride,
        job.out + first * job.q_stride, work,
    )
    free(work)


cdef int attend_block(
    const kv_span *whole, const Layout *layout, int64_t n, int64_t q_stride, float *out, int threads
) except -1:
    """Causal attention of the newest n rows, as the contract says of the verb.

    ``whole.q`` and ``out`` begin at the store's first query head.
    """
    cdef BlockJob job
    job.whole, job.layout, job.n, job.q_stride, job.out = whole, layout, n, q_stride, out
    job.failed = 0
    # The interpreter's lock stays held, as in every verb: it is what keeps other threads of Python
    # from the store meanwhile.
    parallel_for(block_task, &job, (n + TASK_ROWS - 1) // TASK_ROWS * whole.kv_heads, threads)
    if job.failed:
        raise PoolExhausted("no work space for the block; open the store with fewer threads")
    return 0
