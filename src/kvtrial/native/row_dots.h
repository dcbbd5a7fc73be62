/* Dots of four quantised weight rows with up to KV_DOT_VECTORS vectors of bytes.
 *
 * A weight block is unpacked once for all vectors. The four rows share one accumulator a vector:
 * lanes r and r + 4 belong to row r, so nothing is summed across lanes inside the loop. A vector's
 * operations and their order do not depend on how many others there are; the multiply-adds are
 * explicit because the compiler could otherwise contract each instance in its own way.
 */
#ifndef KVTRIAL_ROW_DOTS_H
#define KVTRIAL_ROW_DOTS_H

#include <stddef.h>

#include "quants.h"

#define KV_BLOCK 32
#define KV_Q4_1_BYTES 20
#define KV_Q8_0_BYTES 34
#define KV_DOT_VECTORS 4
/* Bytes between a load and its prefetch: about a memory latency's worth of streaming. Four rows side
   by side are a pattern that hardware prefetchers lose: without this, half the memory's speed. */
#define KV_PREFETCH_BYTES 3072

/* One vector that weights are multiplied with. */
typedef struct {
    ptrdiff_t cols;
    const float *values; /* (cols,) */
    const int8_t *bytes; /* (cols,) values / scale, rounded */
    const float *pairs;  /* (cols / 32, 2) per block: scale, scale * sum of its bytes */
    const float *sums;   /* (cols / 32,) per block: sum of its values */
} kv_activation;

#define KV_INLINE static inline __attribute__((always_inline))

/* The bytes that the four rows take for a block, ahead of their use. */
KV_INLINE void kv_prefetch_block(const uint8_t *rows, ptrdiff_t block, int block_bytes)
{
    const uint8_t *ahead = rows + KV_PREFETCH_BYTES + 4 * block * block_bytes;
    for (int line = 0; line < 4 * block_bytes; line += 64)
        __builtin_prefetch(ahead + line);
}

/* sums: OUT (n, 4). n is a constant in every instance. */
KV_INLINE void kv_dot4_q4_1(
    const uint8_t *rows, ptrdiff_t row_bytes, const kv_activation *x, int n, float *sums)
{
    q_f32x8 acc[KV_DOT_VECTORS], scale, offset;
    q_i8x32 w[4];
    for (int i = 0; i < n; i++)
        acc[i] = q_set(0);
    for (ptrdiff_t b = 0; b < x->cols / KV_BLOCK; b++) {
        const uint8_t *block = rows + b * KV_Q4_1_BYTES;
        kv_prefetch_block(rows, b, KV_Q4_1_BYTES);
        q_headers_q4_1(block, row_bytes, &scale, &offset);
        for (int r = 0; r < 4; r++)
            w[r] = q_load_nibbles(block + r * row_bytes + 4);
        for (int i = 0; i < n; i++) {
            const float *pair = x[i].pairs + 2 * b;
            q_f32x8 dots = q_dot4_nibbles(w, q_load_i8(x[i].bytes + b * KV_BLOCK));
            acc[i] = q_fma(offset, q_set(pair[1]), acc[i]);
            acc[i] = q_fma(q_mul(scale, q_set(pair[0])), dots, acc[i]);
        }
    }
    for (int i = 0; i < n; i++)
        q_store_halves_sum(sums + 4 * i, acc[i]);
}

KV_INLINE void kv_dot4_q8_0(
    const uint8_t *rows, ptrdiff_t row_bytes, const kv_activation *x, int n, float *sums)
{
    q_f32x8 acc[KV_DOT_VECTORS];
    q_i8x32 w[4];
    for (int i = 0; i < n; i++)
        acc[i] = q_set(0);
    for (ptrdiff_t b = 0; b < x->cols / KV_BLOCK; b++) {
        const uint8_t *block = rows + b * KV_Q8_0_BYTES;
        kv_prefetch_block(rows, b, KV_Q8_0_BYTES);
        q_f32x8 scale = q_headers_q8_0(block, row_bytes);
        for (int r = 0; r < 4; r++)
            w[r] = q_load_i8(block + r * row_bytes + 2);
        for (int i = 0; i < n; i++) {
            q_f32x8 dots = q_dot4_bytes(w, q_load_i8(x[i].bytes + b * KV_BLOCK));
            acc[i] = q_fma(q_mul(scale, q_set(x[i].pairs[2 * b])), dots, acc[i]);
        }
    }
    for (int i = 0; i < n; i++)
        q_store_halves_sum(sums + 4 * i, acc[i]);
}

/* An instance for each n, so that its accumulators stay in registers. */
#define KV_EACH_N(kernel) \
    switch (n) { \
    case 1: kernel(rows, row_bytes, x, 1, sums); break; \
    case 2: kernel(rows, row_bytes, x, 2, sums); break; \
    case 3: kernel(rows, row_bytes, x, 3, sums); break; \
    default: kernel(rows, row_bytes, x, KV_DOT_VECTORS, sums); \
    }

static void kv_dot4_q4_1_bytes(
    const uint8_t *rows, ptrdiff_t row_bytes, const kv_activation *x, ptrdiff_t n, float *sums)
{
    KV_EACH_N(kv_dot4_q4_1)
}

static void kv_dot4_q8_0_bytes(
    const uint8_t *rows, ptrdiff_t row_bytes, const kv_activation *x, ptrdiff_t n, float *sums)
{
    KV_EACH_N(kv_dot4_q8_0)
}

#endif
