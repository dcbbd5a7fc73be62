from libc.stdint cimport int32_t, int64_t

from kvtrial.hot._kernel cimport kv_span, kv_span_fn
from kvtrial.hot._rows cimport Format

cdef int attend_spans(
    const kv_span *whole, kv_span_fn kernel, float *partials, int threads
) noexcept nogil
cdef void join(
    float *top, float *total, float *output, const float *more_top, const float *more_total,
    const float *more_output, int64_t heads, int64_t dim,
) noexcept nogil
cdef int attend_block(
    const kv_span *whole, Format form, int64_t n, int64_t q_stride, float *out
) except -1
