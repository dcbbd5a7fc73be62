/* The attention kernel's interface: one struct for every paged kernel (Cython SIMD, Cython scalar, Rust).

   Pages. A pool is one array of pages; page i begins at pool + i * page_bytes. A page holds page_tokens
   rows of each local KV head:

       per head:  K tile [page_tokens][row_bytes], then V tile [page_tokens][row_bytes]

   so K and V of one head are neighbours, and head h begins at page + h * 2 * page_tokens * row_bytes.

   K1T and K2T keep their K tile transposed, [head_dim][page_tokens] elements; row_bytes is then of V. K5T, K6
   and K7 have panels, which _panels.pxd describes; row_bytes is then the mean of K's and V's, and where V
   begins their format knows.

   Rows, by format:
     fp32   head_dim floats, padded to a multiple of 8 floats
     fp16   head_dim binary16, padded to a multiple of 8
     q8_0   ceil(head_dim / 32) blocks of a binary16 scale and 32 int8 (34 bytes), tail values 0
   Padding of fp32 and fp16 rows may hold anything, NaN included, and never takes part in a result. Rows
   whose bit in `valid` is 0 may hold anything too, and are skipped.

   Offsets are int64 throughout: page_id * page_bytes passes 2^31 on ordinary pools. */
#ifndef KV_KERNEL_H
#define KV_KERNEL_H

#include <stdint.h>

/* A span never has more slots; attention splits at multiples of it, whatever the thread count. */
#define KV_SPAN_SLOTS 1024
#define KV_MAX_GROUP 16
#define KV_MAX_HEAD_DIM 256

typedef struct kv_span {
    const unsigned char *pool;
    int64_t page_bytes;
    const int32_t *page_ids; /* of the layer, by slot / page_tokens; -1: only holes */
    const uint64_t *valid;   /* of the layer, a word a page: bit t is row t of that page */
    int64_t first_slot;      /* slots [first, last), slot = position - base_position */
    int64_t last_slot;
    int64_t row_bytes;   /* from one row of a tile to the next; a head takes 2 * page_tokens of it */
    int32_t page_tokens; /* 16, 32 or 64 */
    int32_t head_dim;    /* 1 .. KV_MAX_HEAD_DIM */
    int32_t group;       /* query heads per KV head, 1 .. KV_MAX_GROUP */
    int32_t kv_heads;    /* local KV heads, all of those in a page */
    int32_t first_head;  /* local KV heads [first, last) are computed */
    int32_t last_head;
    float scale;
    const float *q; /* (kv_heads * group, head_dim): query heads of the local KV heads */
    /* Out, for query heads [first_head * group, last_head * group) of the same indexing as q. A head
       without a valid row: max -inf, sum 0, output 0. A score of -inf weighs 0: where all are, sum 0 and
       output 0 too, and max is -inf or -FLT_MAX. */
    float *max;    /* (kv_heads * group,) */
    float *sum;    /* (kv_heads * group,) of exp(score - max) */
    float *output; /* (kv_heads * group, head_dim) of exp(score - max) * v, not divided */
} kv_span;

/* 0, or a kernel's own error code. Reads no more than the span's pages; takes no lock; allocates nothing. */
typedef int (*kv_span_fn)(const kv_span *);

/* Name of the PyCapsule that hands a foreign kv_span_fn to PagedStore(kernel=...). */
#define KV_KERNEL_CAPSULE "kvtrial.kv_kernel"

#endif
