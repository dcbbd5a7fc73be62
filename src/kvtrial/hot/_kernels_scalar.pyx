"""A2's kernel: paged, head-major, FP32, group-aware, scalar. Built without the vectorisers.

Each page's rows are read once for all query heads of the group, in two passes over a page: scores
and their maximum, then values. One rescale a page.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.float cimport FLT_MAX
from libc.math cimport INFINITY, expf
from libc.stdint cimport int64_t, uint64_t

from kvtrial.hot._kernel cimport KV_KERNEL_CAPSULE, kv_span
from kvtrial.hot._scalar_dot cimport scalar_dot


cdef int span_scalar(const kv_span *span) noexcept nogil:
    """A partial over one span: see native/kv_kernel.h."""
    cdef float[16 * 64] scores  # KV_MAX_GROUP x the largest page
    cdef int64_t tokens = span.page_tokens, dim = span.head_dim, group = span.group
    cdef int64_t head, page, g, d, t, query, low, high
    cdef int64_t tile = tokens * span.row_bytes
    cdef uint64_t bits
    cdef const unsigned char *at
    cdef const float *k
    cdef const float *v
    cdef const float *q
    cdef float *output
    cdef float top, keep, weight
    for head in range(span.first_head, span.last_head):
        for g in range(group):
            query = head * group + g
            span.max[query] = -INFINITY
            span.sum[query] = 0
            for d in range(dim):
                span.output[query * dim + d] = 0
        for page in range(span.first_slot // tokens, (span.last_slot + tokens - 1) // tokens):
            bits = span.valid[page]
            if not bits:
                continue
            low = span.first_slot - page * tokens
            high = span.last_slot - page * tokens
            if low > 0:
                bits &= ~<uint64_t>0 << low
            if high < 64:
                bits &= ((<uint64_t>1) << high) - 1
            if not bits:
                continue
            at = span.pool + span.page_ids[page] * span.page_bytes + head * 2 * tile
            for t in range(tokens):
                if not bits >> t & 1:
                    continue
                k = <const float *>(at + t * span.row_bytes)
                for g in range(group):
                    q = span.q + (head * group + g) * dim
                    scores[g * 64 + t] = scalar_dot(q, k, dim) * span.scale
            for g in range(group):
                query = head * group + g
                top = span.max[query]
                for t in range(tokens):
                    # A NaN score stays in the maximum, as IEEE arithmetic says.
                    if bits >> t & 1 and not scores[g * 64 + t] <= top:
                        top = scores[g * 64 + t]
                if top == -INFINITY:
                    top = -FLT_MAX
                keep = expf(span.max[query] - top)
                span.max[query] = top
                span.sum[query] *= keep
                output = span.output + query * dim
                for d in range(dim):
                    output[d] *= keep
                for t in range(tokens):
                    if bits >> t & 1:
                        weight = expf(scores[g * 64 + t] - top)
                        scores[g * 64 + t] = weight
                        span.sum[query] += weight
            at += tile
            for t in range(tokens):
                if not bits >> t & 1:
                    continue
                v = <const float *>(at + t * span.row_bytes)
                for g in range(group):
                    weight = scores[g * 64 + t]
                    output = span.output + (head * group + g) * dim
                    for d in range(dim):
                        output[d] += weight * v[d]
    return 0


def kernel():
    """The kernel, a ``kv_span_fn`` in a PyCapsule."""
    return PyCapsule_New(<void *>span_scalar, KV_KERNEL_CAPSULE, NULL)
