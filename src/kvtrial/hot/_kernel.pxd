"""The structs of native/kv_kernel.h, for Cython."""

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "kv_kernel.h":
    enum:
        KV_SPAN_SLOTS
        KV_MAX_GROUP
        KV_MAX_HEAD_DIM
    const char *KV_KERNEL_CAPSULE

    ctypedef struct kv_span:
        const unsigned char *pool
        int64_t page_bytes
        const int32_t *page_ids
        const uint64_t *valid
        int64_t first_slot, last_slot
        int64_t row_bytes
        int32_t page_tokens, head_dim, group, kv_heads, first_head, last_head
        float scale
        const float *q
        float *max
        float *sum
        float *output

    ctypedef int (*kv_span_fn)(const kv_span *) noexcept nogil
