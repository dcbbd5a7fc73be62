"""The kernels of K0 and A1: scalar, plain two-pass softmax. Built without the vectorisers.

Both give the partial (max, sum, output) of every query head over ``rows`` positions.
"""

from libc.math cimport INFINITY, expf
from libc.stdint cimport int64_t

from kvtrial.hot._scalar_dot cimport scalar_dot


cdef inline void weigh(float *scores, int64_t n, float *top, float *total) noexcept nogil:
    """Scores become exp(score - max); NaN stays, as IEEE arithmetic says, and -inf becomes 0."""
    cdef int64_t t
    cdef float peak = -INFINITY
    total[0] = 0
    for t in range(n):
        if not scores[t] <= peak:
            peak = scores[t]
    top[0] = peak
    if peak == -INFINITY:
        peak = 0  # not inf - inf
    for t in range(n):
        scores[t] = expf(scores[t] - peak)
        total[0] += scores[t]


cdef void attend_per_query(const FlatRows *at) noexcept nogil:
    """K0: every query head goes through its KV head's rows by itself."""
    cdef int64_t h, t, d, dim = at.head_dim
    cdef const float *k
    cdef const float *v
    cdef float *output
    for h in range(at.first_head * at.group, at.last_head * at.group):
        k = at.k + h // at.group * dim
        v = at.v + h // at.group * dim
        output = at.output + h * dim
        for t in range(at.rows):
            at.scores[t] = scalar_dot(at.q + h * dim, k + t * at.row_floats, dim) * at.scale
        weigh(at.scores, at.rows, at.max + h, at.sum + h)
        for d in range(dim):
            output[d] = 0
        for t in range(at.rows):
            for d in range(dim):
                output[d] += at.scores[t] * v[t * at.row_floats + d]


cdef void attend_grouped(const FlatRows *at) noexcept nogil:
    """A1: each row is read once for all query heads of its group."""
    cdef int64_t head, g, h, t, d, dim = at.head_dim
    cdef const float *k
    cdef const float *v
    cdef float *output
    for head in range(at.first_head, at.last_head):
        h = head * at.group
        for t in range(at.rows):
            k = at.k + t * at.row_floats + head * dim
            for g in range(at.group):
                at.scores[g * at.rows + t] = scalar_dot(at.q + (h + g) * dim, k, dim) * at.scale
        for g in range(at.group):
            weigh(at.scores + g * at.rows, at.rows, at.max + h + g, at.sum + h + g)
        for d in range(at.group * dim):
            at.output[h * dim + d] = 0
        for t in range(at.rows):
            v = at.v + t * at.row_floats + head * dim
            for g in range(at.group):
                output = at.output + (h + g) * dim
                for d in range(dim):
                    output[d] += at.scores[g * at.rows + t] * v[d]
