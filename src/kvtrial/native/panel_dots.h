/* Products of many positions with quantised weights: a panel of rows with four positions at a time.
 *
 * A panel is a few weight rows, unpacked once for all positions: step by step the next four weights of
 * each row side by side, so that four bytes of a position, repeated, meet all rows in one multiplication.
 * Two vectors of bytes a step: two times eight rows of Q4_1, or the high and the low nibbles of eight
 * rows of Q8_0, as 16 * high + low - 128. Weights are 0..15 either way, which leaves room in int16 for a
 * whole block's sum.
 */
#ifndef KVTRIAL_PANEL_DOTS_H
#define KVTRIAL_PANEL_DOTS_H

#include "row_dots.h"

#define KV_PANEL_VECTORS 2 /* of bytes, a step */
#define KV_PANEL_STEPS 8   /* a block */
#define KV_PANEL_BYTES (KV_PANEL_VECTORS * KV_BLOCK * KV_PANEL_STEPS) /* a block */
#define KV_PANEL_FLOATS (2 * KV_PANEL_VECTORS * 8) /* of a block: scale and offset of eight rows, by vector */
#define KV_QUAD 4 /* positions that go through a panel together */

/* Unrolled, the loop over steps needs more registers than there are: GCC 12 takes 1.2 times as long. */
#ifdef __clang__
#define KV_LOOP _Pragma("clang loop unroll(disable)")
#else
#define KV_LOOP _Pragma("GCC unroll 1")
#endif

static inline void kv_clear_panel(ptrdiff_t blocks, uint8_t *bytes, float *heads)
{
    memset(bytes, 0, (size_t)blocks * KV_PANEL_BYTES);
    memset(heads, 0, (size_t)blocks * KV_PANEL_FLOATS * sizeof(float));
}

/* One row's block, as bytes, into one vector of a panel's block. */
static inline void kv_put_row(const uint8_t *block, int vector, int row, uint8_t *bytes)
{
    for (int step = 0; step < KV_PANEL_STEPS; step++)
        memcpy(bytes + (step * KV_PANEL_VECTORS + vector) * 32 + 4 * row, block + 4 * step, 4);
}

/* n <= 16 rows of Q4_1, `row_bytes` apart; those missing are zeros.
   bytes: OUT (blocks, KV_PANEL_BYTES), heads: OUT (blocks, KV_PANEL_FLOATS). */
static void kv_pack_q4_1(
    const uint8_t *rows, ptrdiff_t row_bytes, ptrdiff_t n, ptrdiff_t blocks, uint8_t *bytes, float *heads)
{
    int8_t spread[KV_BLOCK];
    if (n < 16)
        kv_clear_panel(blocks, bytes, heads);
    for (ptrdiff_t b = 0; b < blocks; b++)
        for (ptrdiff_t r = 0; r < n; r++) {
            const uint8_t *block = rows + r * row_bytes + b * KV_Q4_1_BYTES;
            float *head = heads + b * KV_PANEL_FLOATS + r / 8 * 16 + r % 8;
            head[0] = q_half(block);
            head[8] = q_half(block + 2);
            q_spread_nibbles(block + 4, spread);
            kv_put_row((const uint8_t *)spread, (int)(r / 8), (int)(r % 8), bytes + b * KV_PANEL_BYTES);
        }
}

/* The same of n <= 8 rows of Q8_0. */
static void kv_pack_q8_0(
    const uint8_t *rows, ptrdiff_t row_bytes, ptrdiff_t n, ptrdiff_t blocks, uint8_t *bytes, float *heads)
{
    uint8_t high[KV_BLOCK], low[KV_BLOCK];
    if (n < 8)
        kv_clear_panel(blocks, bytes, heads);
    for (ptrdiff_t b = 0; b < blocks; b++)
        for (ptrdiff_t r = 0; r < n; r++) {
            const uint8_t *block = rows + r * row_bytes + b * KV_Q8_0_BYTES;
            float *head = heads + b * KV_PANEL_FLOATS + r;
            head[0] = q_half(block);
            head[8] = -128 * head[0];
            for (int i = 0; i < KV_BLOCK; i++) {
                high[i] = (uint8_t)(block[2 + i] ^ 0x80) >> 4; /* of w + 128 */
                low[i] = block[2 + i] & 15;
            }
            kv_put_row(high, 0, (int)r, bytes + b * KV_PANEL_BYTES);
            kv_put_row(low, 1, (int)r, bytes + b * KV_PANEL_BYTES);
        }
}

/* x: (blocks, KV_PANEL_STEPS, KV_QUAD, 4) bytes of four positions; pairs: (blocks, KV_QUAD, 2), each
   block's scale and scale * sum of its bytes.
   sums: OUT (2, KV_QUAD, 8) products of each vector's eight rows with each position; of nibbles, in the first.
   They stay in memory: all registers are the inner loop's. */
KV_INLINE void kv_panel_dot(
    int nibbles_apart, const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs,
    ptrdiff_t blocks, float *sums)
{
    const int rows_of = nibbles_apart ? 1 : KV_PANEL_VECTORS;
    for (int i = 0; i < rows_of * KV_QUAD; i++)
        q_store(sums + 8 * i, q_set(0));
    for (ptrdiff_t b = 0; b < blocks; b++) {
        q_sums dots[KV_PANEL_VECTORS][KV_QUAD];
        for (int v = 0; v < KV_PANEL_VECTORS; v++)
            for (int p = 0; p < KV_QUAD; p++)
                dots[v][p] = q_no_sums();
        KV_LOOP
        for (int step = 0; step < KV_PANEL_STEPS; step++) {
            q_i8x32 w[KV_PANEL_VECTORS];
            for (int v = 0; v < KV_PANEL_VECTORS; v++)
                w[v] = q_load_i8(bytes + (step * KV_PANEL_VECTORS + v) * 32);
            for (int p = 0; p < KV_QUAD; p++) {
                q_i8x32 four = q_load_four(x + (step * KV_QUAD + p) * 4);
                for (int v = 0; v < KV_PANEL_VECTORS; v++)
                    dots[v][p] = q_add_sums(dots[v][p], w[v], four);
            }
        }
        for (int v = 0; v < rows_of; v++) {
            q_f32x8 scale = q_load(heads + 16 * v), offset = q_load(heads + 16 * v + 8);
            for (int p = 0; p < KV_QUAD; p++) {
                float *sum = sums + (v * KV_QUAD + p) * 8;
                q_f32x8 dot = nibbles_apart ? q_sums_join(dots[0][p], dots[1][p]) : q_sums_float(dots[v][p]);
                q_f32x8 acc = q_fma(offset, q_set(pairs[2 * p + 1]), q_load(sum));
                q_store(sum, q_fma(q_mul(scale, q_set(pairs[2 * p])), dot, acc));
            }
        }
        bytes += KV_PANEL_BYTES;
        heads += KV_PANEL_FLOATS;
        x += KV_BLOCK * KV_QUAD;
        pairs += 2 * KV_QUAD;
    }
}

static void kv_panel_dot_q4_1(
    const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs, ptrdiff_t blocks, float *sums)
{
    kv_panel_dot(0, bytes, heads, x, pairs, blocks, sums);
}

static void kv_panel_dot_q8_0(
    const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs, ptrdiff_t blocks, float *sums)
{
    kv_panel_dot(1, bytes, heads, x, pairs, blocks, sums);
}

#endif
