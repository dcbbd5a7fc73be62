"""native/simd.h for Cython: vectors of LANES floats, which are 8."""

from libc.stdint cimport int8_t, int16_t, int32_t, uint16_t, uint64_t


cdef extern from "simd.h" nogil:
    enum:
        LANES "KV_LANES"
    ctypedef float vector "kv_vf"
    ctypedef int whole "kv_vi"
    vector kv_zero()
    vector kv_splat(float)
    vector kv_load(const float *)
    vector kv_load_head(const float *, int32_t lanes)
    vector kv_load_half(const uint16_t *)
    vector kv_load_int8(const int8_t *)
    void kv_store(float *, vector)
    void kv_store_head(float *, vector, int32_t lanes)
    vector kv_fma(vector, vector, vector)
    vector kv_mul(vector, vector)
    vector kv_add(vector, vector)
    vector kv_sub(vector, vector)
    vector kv_max(vector, vector)
    vector kv_min(vector, vector)
    vector kv_head(vector, int32_t lanes)
    float kv_hsum(vector)
    float kv_hmax(vector)
    void kv_hsum4(float *, vector, vector, vector, vector, float scale)
    vector kv_exp(vector)
    whole kv_load_int16(const int16_t *)
    whole kv_widen_int8(const int8_t *)
    whole kv_dot_int16(whole, whole)
    whole kv_add_int(whole, whole)
    vector kv_from_int(whole)
    void kv_store_int16(int16_t *, vector)
    uint16_t kv_to_half(float)
    float kv_from_half(uint16_t)
    void kv_prefetch(const void *)
    int32_t kv_lowest_bit(uint64_t)
    int32_t kv_highest_bit(uint64_t)
