"""native/quants.h for the integer kernels: eight floats, 32 bytes, and sums of integer products."""

from libc.stdint cimport int8_t


cdef extern from "quants.h" nogil:
    ctypedef struct floats "q_f32x8":
        pass
    ctypedef struct codes "q_i8x32":
        pass
    ctypedef struct sums "q_sums":
        pass
    floats q_set(float)
    floats q_load(const float *)
    void q_store(float *, floats)
    floats q_add(floats, floats)
    floats q_mul(floats, floats)
    floats q_fma(floats, floats, floats)
    floats q_max(floats, floats)
    float q_max_lane(floats)
    float q_sum(floats)
    floats q_load_f16(const void *)
    codes q_load_i8(const void *)
    codes q_load_four(const void *)
    codes q_low_nibbles(codes)
    codes q_high_nibbles(codes)
    codes q_widen_i8(const void *)
    sums q_no_sums()
    sums q_add_sums(sums, codes nibbles, codes x)
    floats q_sums_float(sums)
    sums q_add_pairs(sums, codes pairs, codes x)
    floats q_pairs_float(sums)
    codes q_round_i16x16(floats, floats)
    codes q_round_i8x32(floats, floats, floats, floats)
    void q_store_i8(void *, codes)
