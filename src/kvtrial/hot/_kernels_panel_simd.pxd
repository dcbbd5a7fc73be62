from kvtrial.hot._kernel cimport kv_span

cdef int span_panel(const kv_span *span) noexcept nogil
