"""The Rust library's boundary (rust/kvtrial_native.h), for Cython."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from kvtrial._threads cimport kv_task_fn
from kvtrial.hot._kernel cimport kv_span


cdef extern from "kvtrial_native.h":
    ctypedef struct kvn_store:
        pass
    ctypedef struct kvn_fault:
        int32_t code
        int64_t value, low, high
    ctypedef struct kvn_handle:
        uint64_t generation
        uint32_t slot
    ctypedef struct kvn_rows:
        float *k
        float *v
        size_t k_element, k_slot, v_slot, head
    ctypedef struct kvn_call:
        const float *q
        int64_t q_heads, first_head
        float scale
        void (*parallel_for)(kv_task_fn, void *, int64_t, int) noexcept nogil
        int64_t threads

    enum:
        KVN_PANIC, KVN_NO_MEMORY, KVN_LAYER, KVN_NOT_ASCENDING, KVN_POSITION, KVN_NOT_VALID
        KVN_HOLE_NOT_ALLOWED, KVN_NO_PAGES, KVN_NO_SLOTS, KVN_STALE, KVN_STEP_INCOMPLETE
        KVN_LAYER_AHEAD, KVN_BRANCHES_OPEN, KVN_BRANCH_DIVERGED, KVN_NOT_A_BRANCH, KVN_COUNT
        KVN_SLOT_CANCELLED, KVN_RESTORING, KVN_NOT_RESTORING, KVN_NOT_EMPTY, KVN_PAGE_INDEX
        KVN_HEADS, KVN_SHAPE, KVN_BUDGET

    int64_t kvn_page_nbytes(int64_t heads, int64_t dim, int64_t page_tokens) nogil
    int kvn_open(
        int64_t layers, int64_t heads, int64_t group, int64_t dim, int64_t page_tokens,
        int transposed, int64_t base, int64_t pages, int poison, kvn_store **store, kvn_fault *,
    ) nogil
    void kvn_free(kvn_store *) nogil
    int kvn_open_session(kvn_store *, int, kvn_handle *, kvn_fault *) nogil
    int kvn_close_session(kvn_store *, kvn_handle, kvn_fault *) nogil
    int kvn_force_generation(kvn_store *, uint64_t, kvn_fault *) nogil
    int kvn_append(
        kvn_store *, kvn_handle, int64_t, const int64_t *, int64_t, const float *, const float *,
        kvn_fault *,
    ) nogil
    int kvn_invalidate(
        kvn_store *, kvn_handle, int64_t, const int64_t *, int64_t, kvn_fault *
    ) nogil
    int kvn_reserve(
        kvn_store *, kvn_handle, int64_t, const int64_t *, int64_t, kvn_rows *, kvn_fault *
    ) nogil
    int kvn_commit(kvn_store *, kvn_handle, int64_t, const int64_t *, int64_t, kvn_fault *) nogil
    int kvn_read(
        kvn_store *, kvn_handle, int64_t, const int64_t *, int64_t, float *, float *, kvn_fault *
    ) nogil
    int kvn_attend(kvn_store *, kvn_handle, int64_t, kvn_call, float *, kvn_fault *) nogil
    int kvn_attend_block(
        kvn_store *, kvn_handle, int64_t, kvn_call, int64_t, float *, kvn_fault *
    ) nogil
    int kvn_attend_partial(
        kvn_store *, kvn_handle, int64_t, kvn_call, int64_t, int64_t, int64_t, int64_t,
        float *, float *, float *, kvn_fault *,
    ) nogil
    int kvn_length(kvn_store *, kvn_handle, int64_t, int64_t *, kvn_fault *) nogil
    int kvn_valid(kvn_store *, kvn_handle, int64_t, uint8_t *, kvn_fault *) nogil
    int kvn_page_table(kvn_store *, kvn_handle, int64_t, int32_t *, kvn_fault *) nogil
    int kvn_begin_branch(kvn_store *, kvn_handle, kvn_handle *, kvn_fault *) nogil
    int kvn_commit_prefix(kvn_store *, kvn_handle, int64_t, kvn_fault *) nogil
    int kvn_rollback_tail(kvn_store *, kvn_handle, int64_t, kvn_fault *) nogil
    int kvn_abandon_step(kvn_store *, kvn_handle, kvn_fault *) nogil
    int kvn_page(
        kvn_store *, kvn_handle, int64_t, int64_t, const float **, uint64_t *, kvn_fault *
    ) nogil
    int kvn_copy_page(
        kvn_store *, kvn_handle, int64_t, int64_t, float *, kvn_fault *
    ) nogil
    int kvn_begin_restore(kvn_store *, kvn_handle, const uint8_t *, int64_t, kvn_fault *) nogil
    int kvn_restore_page(
        kvn_store *, kvn_handle, int64_t, int64_t, float **, kvn_fault *
    ) nogil
    int kvn_finish_restore(kvn_store *, kvn_handle, kvn_fault *) nogil
    int kvn_cancel_restore(kvn_store *, kvn_handle, kvn_fault *) nogil
    int kvn_reference_counts(kvn_store *, uint32_t *, kvn_fault *) nogil
    int kvn_pages_free(kvn_store *, int64_t *, kvn_fault *) nogil
    int kvn_span_fp32(const kv_span *) nogil
