from libc.stdint cimport int64_t

ctypedef struct FlatRows:
    const float *k  # of the first KV head at the first position
    const float *v
    int64_t rows
    int64_t row_floats  # from one position to the next
    int64_t head_dim, group, first_head, last_head
    const float *q  # (local query heads, head_dim), as max, sum and output
    float scale
    float *scores  # work: group x rows
    float *max
    float *sum
    float *output

cdef void attend_per_query(const FlatRows *at) noexcept nogil
cdef void attend_grouped(const FlatRows *at) noexcept nogil
