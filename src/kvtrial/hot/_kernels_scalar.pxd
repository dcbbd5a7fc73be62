from kvtrial.hot._kernel cimport kv_span

cdef int span_scalar(const kv_span *span) noexcept nogil
