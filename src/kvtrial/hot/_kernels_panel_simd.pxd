from kvtrial.hot._kernel cimport kv_span

cdef int span_panel_fp32(const kv_span *span) noexcept nogil
cdef int span_panel_fp16(const kv_span *span) noexcept nogil
