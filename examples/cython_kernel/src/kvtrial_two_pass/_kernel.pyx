# cython: boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Two passes over a span: all scores first, then all values.

K1 rescales its sums whenever the running maximum grows. Here the scores of a span (1,024 rows) wait in a
buffer until the maximum is known, so nothing is ever rescaled; the price is the buffer.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport INFINITY, expf
from libc.stdint cimport int64_t, uint64_t

from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE, KV_MAX_GROUP, KV_SPAN_SLOTS, kv_span


cdef uint64_t rows_of(const kv_span *span, int64_t page) noexcept nogil:
    """The page's rows that are valid and inside the span, a bit each."""
    cdef int64_t low = span.first_slot - page * span.page_tokens
    cdef int64_t high = span.last_slot - page * span.page_tokens
    cdef uint64_t rows = span.valid[page]
    if low > 0:
        rows &= ~<uint64_t>0 << low
    if high < 64:
        rows &= (<uint64_t>1 << high) - 1
    return rows


cdef const float *tile(const kv_span *span, int64_t page, int64_t head, int64_t value) noexcept nogil:
    """K rows (value 0) or V rows (value 1) of one head in a page."""
    cdef int64_t bytes = span.page_tokens * span.row_bytes
    return <const float *>(
        span.pool + span.page_ids[page] * span.page_bytes + (2 * head + value) * bytes
    )


cdef float dot(const float *a, const float *b, int64_t n) noexcept nogil:
    cdef float total = 0
    cdef int64_t i
    for i in range(n):
        total += a[i] * b[i]
    return total


cdef int two_pass(const kv_span *span) noexcept nogil:
    """A partial over one span: see kv_kernel.h."""
    cdef float[KV_MAX_GROUP][KV_SPAN_SLOTS] scores
    cdef int64_t tokens = span.page_tokens, dim = span.head_dim, stride = span.row_bytes // 4
    cdef int64_t first = span.first_slot // tokens, last = (span.last_slot + tokens - 1) // tokens
    cdef int64_t head, page, g, t, d, query, slot
    cdef uint64_t rows
    cdef const float *row
    cdef float *output
    cdef float score, top, total
    for head in range(span.first_head, span.last_head):
        query = head * span.group
        for g in range(span.group):
            span.max[query + g] = -INFINITY
        # Each K row is read once, for all query heads of its group.
        for page in range(first, last):
            rows = rows_of(span, page)
            for t in range(tokens):
                if rows >> t & 1:
                    row = tile(span, page, head, 0) + t * stride
                    slot = page * tokens + t - span.first_slot
                    for g in range(span.group):
                        score = span.scale * dot(span.q + (query + g) * dim, row, dim)
                        scores[g][slot] = score
                        if not score <= span.max[query + g]:
                            span.max[query + g] = score
        for g in range(span.group):
            top, total = span.max[query + g], 0
            for page in range(first, last):
                rows = rows_of(span, page)
                for t in range(tokens):
                    if rows >> t & 1:
                        slot = page * tokens + t - span.first_slot
                        # Scores may all be -inf, which is no row's fault: their weights are 0, not NaN.
                        scores[g][slot] = 0 if scores[g][slot] == -INFINITY else expf(scores[g][slot] - top)
                        total += scores[g][slot]
            span.sum[query + g] = total
            for d in range(dim):
                span.output[(query + g) * dim + d] = 0
        for page in range(first, last):
            rows = rows_of(span, page)
            for t in range(tokens):
                if rows >> t & 1:
                    row = tile(span, page, head, 1) + t * stride
                    slot = page * tokens + t - span.first_slot
                    for g in range(span.group):
                        output = span.output + (query + g) * dim
                        for d in range(dim):
                            output[d] += scores[g][slot] * row[d]
    return 0


def capsule():
    """The kernel's address, as `open_paged` takes it."""
    return PyCapsule_New(<void *>two_pass, KV_KERNEL_CAPSULE, NULL)
