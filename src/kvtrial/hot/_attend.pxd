from libc.stdint cimport int32_t, int64_t

from kvtrial.hot._kernel cimport kv_span, kv_span_fn
from kvtrial.hot._rows cimport Layout

cdef int64_t partial_floats(int64_t queries, int64_t dim) noexcept nogil
cdef void place_partial(kv_span *span, float *at) noexcept nogil
cdef int attend_spans(
    const kv_span *whole, kv_span_fn kernel, float *work, int threads
) noexcept nogil
cdef object narrow(kv_span *span, object spec, object kv_heads, object positions)
cdef int attend_block(
    const kv_span *whole, const Layout *layout, int64_t n, int64_t q_stride, float *out, int threads
) except -1
