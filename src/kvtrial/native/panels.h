/* Quantised weights in panels of eight rows, and products with them.
 *
 * A panel is packed once, when a model is loaded. Block by block it has what eight rows have there: their
 * scales (and offsets), then four weights of each row in turn:
 *
 *     Q4_1   fp16 d[8], fp16 m[8], 4 vectors of 32 bytes; byte 4 r + i of vector s has element 4 s + i of
 *            row r in its low nibble, element 16 + 4 s + i in the high one
 *     Q8_0   fp16 d[8], 8 vectors of 32 bytes; byte 4 r + i of vector s is element 4 s + i of row r
 *
 * So it takes as many bytes as the rows did, is read front to back, and four bytes of an activation,
 * repeated, meet eight rows in one multiplication; nothing is summed across lanes.
 *
 * A vector's operations and their order do not depend on how many others there are; the multiply-adds are
 * explicit because the compiler could otherwise contract each instance in its own way.
 */
#ifndef KVTRIAL_PANELS_H
#define KVTRIAL_PANELS_H

#include <stddef.h>

#include "quants.h"

#define KV_BLOCK 32
#define KV_Q4_1_BYTES 20
#define KV_Q8_0_BYTES 34
#define KV_PANEL_ROWS 8
#define KV_DOT_VECTORS 4
/* Bytes between a load and its prefetch: about a memory latency's worth of streaming. */
#define KV_PREFETCH_BYTES 4096

/* One vector that weights are multiplied with. */
typedef struct {
    ptrdiff_t cols;
    const float *values; /* (cols,) */
    const int8_t *bytes; /* (cols,) values / scale, rounded */
    const float *pairs;  /* (cols / 32, 2) per block: scale, scale * sum of its bytes */
    const float *sums;   /* (cols / 32,) per block: sum of its values */
} kv_activation;

#define KV_INLINE static inline __attribute__((always_inline))

/* n <= 8 rows of GGUF blocks, `row_bytes` apart, into a panel; rows that are missing are zeros.
   halves: how many fp16 a block begins with. */
KV_INLINE void kv_pack(
    int halves, int block_bytes, const uint8_t *rows, ptrdiff_t row_bytes, ptrdiff_t n, ptrdiff_t blocks,
    uint8_t *panel)
{
    const uint8_t missing[KV_Q8_0_BYTES] = {0};
    for (ptrdiff_t b = 0; b < blocks; b++)
        for (ptrdiff_t r = 0; r < KV_PANEL_ROWS; r++) {
            const uint8_t *block = r < n ? rows + r * row_bytes + b * block_bytes : missing;
            uint8_t *to = panel + b * block_bytes * KV_PANEL_ROWS;
            for (int h = 0; h < halves; h++)
                memcpy(to + 2 * (KV_PANEL_ROWS * h + r), block + 2 * h, 2);
            for (int i = 2 * halves; i < block_bytes; i += 4)
                memcpy(to + KV_PANEL_ROWS * i + 4 * r, block + i, 4);
        }
}

static void kv_pack_q4_1(
    const uint8_t *rows, ptrdiff_t row_bytes, ptrdiff_t n, ptrdiff_t blocks, uint8_t *panel)
{
    kv_pack(2, KV_Q4_1_BYTES, rows, row_bytes, n, blocks, panel);
}

static void kv_pack_q8_0(
    const uint8_t *rows, ptrdiff_t row_bytes, ptrdiff_t n, ptrdiff_t blocks, uint8_t *panel)
{
    kv_pack(1, KV_Q8_0_BYTES, rows, row_bytes, n, blocks, panel);
}

KV_INLINE void kv_prefetch_block(const uint8_t *at, int block_bytes)
{
    for (int line = 0; line < KV_PANEL_ROWS * block_bytes; line += 64)
        __builtin_prefetch(at + KV_PREFETCH_BYTES + line);
}

/* ---- up to four vectors; sums: OUT (n, 8). n is a constant in every instance. */

KV_INLINE void kv_dot_q4_1(const uint8_t *panel, const kv_activation *x, int n, float *sums)
{
    q_f32x8 acc[KV_DOT_VECTORS];
    for (int i = 0; i < n; i++)
        acc[i] = q_set(0);
    for (ptrdiff_t b = 0; b < x->cols / KV_BLOCK; b++) {
        q_f32x8 scale = q_load_f16(panel), offset = q_load_f16(panel + 16);
        q_sums dots[KV_DOT_VECTORS];
        kv_prefetch_block(panel, KV_Q4_1_BYTES);
        for (int i = 0; i < n; i++)
            dots[i] = q_no_sums();
        for (int s = 0; s < 4; s++) {
            q_i8x32 both = q_load_i8(panel + 32 + 32 * s), low = q_low_nibbles(both), high = q_high_nibbles(both);
            for (int i = 0; i < n; i++) {
                const int8_t *at = x[i].bytes + b * KV_BLOCK + 4 * s;
                dots[i] = q_add_sums(dots[i], low, q_load_four(at));
                dots[i] = q_add_sums(dots[i], high, q_load_four(at + 16));
            }
        }
        for (int i = 0; i < n; i++) {
            const float *pair = x[i].pairs + 2 * b;
            acc[i] = q_fma(offset, q_set(pair[1]), acc[i]);
            acc[i] = q_fma(q_mul(scale, q_set(pair[0])), q_sums_float(dots[i]), acc[i]);
        }
        panel += KV_PANEL_ROWS * KV_Q4_1_BYTES;
    }
    for (int i = 0; i < n; i++)
        q_store(sums + 8 * i, acc[i]);
}

KV_INLINE void kv_dot_q8_0(const uint8_t *panel, const kv_activation *x, int n, float *sums)
{
    q_f32x8 acc[KV_DOT_VECTORS];
    for (int i = 0; i < n; i++)
        acc[i] = q_set(0);
    for (ptrdiff_t b = 0; b < x->cols / KV_BLOCK; b++) {
        q_f32x8 scale = q_load_f16(panel);
        q_wide_sums dots[KV_DOT_VECTORS];
        kv_prefetch_block(panel, KV_Q8_0_BYTES);
        for (int i = 0; i < n; i++)
            dots[i] = q_no_wide_sums();
        for (int s = 0; s < 8; s++) {
            q_i8x32 w = q_load_i8(panel + 16 + 32 * s);
            for (int i = 0; i < n; i++)
                dots[i] = q_add_wide_sums(dots[i], w, q_load_four(x[i].bytes + b * KV_BLOCK + 4 * s));
        }
        for (int i = 0; i < n; i++)
            acc[i] = q_fma(q_mul(scale, q_set(x[i].pairs[2 * b])), q_wide_sums_float(dots[i]), acc[i]);
        panel += KV_PANEL_ROWS * KV_Q8_0_BYTES;
    }
    for (int i = 0; i < n; i++)
        q_store(sums + 8 * i, acc[i]);
}

/* ---- the same with activations in float32 */

/* dots: IN/OUT (4,) plus four weights of each row times x (4,). */
KV_INLINE void kv_add_fours(q_i8x32 w, const float *x, q_f32x8 *dots)
{
    dots[0] = q_fma(q_quarter(w, 0), q_set(x[0]), dots[0]);
    dots[1] = q_fma(q_quarter(w, 1), q_set(x[1]), dots[1]);
    dots[2] = q_fma(q_quarter(w, 2), q_set(x[2]), dots[2]);
    dots[3] = q_fma(q_quarter(w, 3), q_set(x[3]), dots[3]);
}

KV_INLINE void kv_dot_floats(int nibbles, const uint8_t *panel, const kv_activation *x, int n, float *sums)
{
    const int block_bytes = nibbles ? KV_Q4_1_BYTES : KV_Q8_0_BYTES;
    q_f32x8 acc[KV_DOT_VECTORS];
    for (int i = 0; i < n; i++)
        acc[i] = q_set(0);
    for (ptrdiff_t b = 0; b < x->cols / KV_BLOCK; b++) {
        q_f32x8 scale = q_load_f16(panel);
        for (int i = 0; i < n; i++) {
            const float *at = x[i].values + b * KV_BLOCK;
            q_f32x8 dots[4] = {q_set(0), q_set(0), q_set(0), q_set(0)};
            for (int s = 0; s < 4; s++) {
                if (nibbles) {
                    q_i8x32 both = q_load_i8(panel + 32 + 32 * s);
                    kv_add_fours(q_low_nibbles(both), at + 4 * s, dots);
                    kv_add_fours(q_high_nibbles(both), at + 16 + 4 * s, dots);
                } else {
                    kv_add_fours(q_load_i8(panel + 16 + 64 * s), at + 8 * s, dots);
                    kv_add_fours(q_load_i8(panel + 48 + 64 * s), at + 8 * s + 4, dots);
                }
            }
            if (nibbles)
                acc[i] = q_fma(q_load_f16(panel + 16), q_set(x[i].sums[b]), acc[i]);
            acc[i] = q_fma(scale, q_add(q_add(dots[0], dots[1]), q_add(dots[2], dots[3])), acc[i]);
        }
        panel += KV_PANEL_ROWS * block_bytes;
    }
    for (int i = 0; i < n; i++)
        q_store(sums + 8 * i, acc[i]);
}

KV_INLINE void kv_dot_floats_q4_1(const uint8_t *panel, const kv_activation *x, int n, float *sums)
{
    kv_dot_floats(1, panel, x, n, sums);
}

KV_INLINE void kv_dot_floats_q8_0(const uint8_t *panel, const kv_activation *x, int n, float *sums)
{
    kv_dot_floats(0, panel, x, n, sums);
}

/* An instance for each n, so that its accumulators stay in registers. row_bytes has no use here: panels have
   a type in common with rows that lie one by one. */
#define KV_DOT8(name, kernel) \
    static void name( \
        const uint8_t *panel, ptrdiff_t row_bytes, const kv_activation *x, ptrdiff_t n, float *sums) \
    { \
        switch (n) { \
        case 1: kernel(panel, x, 1, sums); break; \
        case 2: kernel(panel, x, 2, sums); break; \
        case 3: kernel(panel, x, 3, sums); break; \
        default: kernel(panel, x, KV_DOT_VECTORS, sums); \
        } \
    }
KV_DOT8(kv_dot8_q4_1_bytes, kv_dot_q4_1)
KV_DOT8(kv_dot8_q8_0_bytes, kv_dot_q8_0)
KV_DOT8(kv_dot8_q4_1_floats, kv_dot_floats_q4_1)
KV_DOT8(kv_dot8_q8_0_floats, kv_dot_floats_q8_0)

/* ---- the prefill: panels unpacked for many positions, four of which go through them at a time
 *
 * Two vectors of bytes a step: those of two panels of Q4_1, or the high and the low nibbles of one of
 * Q8_0, as 16 * high + low - 128. Weights are 0..15 either way, which leaves room in int16 for a whole
 * block's sum. */

#define KV_STEPS 8 /* a block; four weights of each row */
#define KV_UNPACKED_BYTES (2 * KV_BLOCK * KV_STEPS)   /* a block */
#define KV_UNPACKED_FLOATS (2 * 2 * KV_PANEL_ROWS)    /* a block: scale and offset of eight rows, twice */
#define KV_QUAD 4                                     /* positions */

/* bytes: OUT (blocks, KV_STEPS, 2, 32); heads: OUT (blocks, 2, 2, 8). `second` is the panel of the rows
   that follow, or the first once more. */
static void kv_unpack_q4_1(
    const uint8_t *first, const uint8_t *second, ptrdiff_t blocks, uint8_t *bytes, float *heads)
{
    for (ptrdiff_t b = 0; b < blocks; b++)
        for (int v = 0; v < 2; v++) {
            const uint8_t *block = (v ? second : first) + b * KV_PANEL_ROWS * KV_Q4_1_BYTES;
            q_store(heads + (2 * b + v) * 16, q_load_f16(block));
            q_store(heads + (2 * b + v) * 16 + 8, q_load_f16(block + 16));
            for (int s = 0; s < 4; s++) {
                q_i8x32 both = q_load_i8(block + 32 + 32 * s);
                uint8_t *to = bytes + b * KV_UNPACKED_BYTES + (2 * s + v) * 32;
                q_store_i8(to, q_low_nibbles(both));
                q_store_i8(to + 8 * 32, q_high_nibbles(both)); /* of four steps further */
            }
        }
}

static void kv_unpack_q8_0(const uint8_t *panel, ptrdiff_t blocks, uint8_t *bytes, float *heads)
{
    for (ptrdiff_t b = 0; b < blocks; b++) {
        const uint8_t *block = panel + b * KV_PANEL_ROWS * KV_Q8_0_BYTES;
        q_f32x8 scale = q_load_f16(block);
        q_store(heads + b * KV_UNPACKED_FLOATS, scale);
        q_store(heads + b * KV_UNPACKED_FLOATS + 8, q_mul(scale, q_set(-128)));
        for (int s = 0; s < KV_STEPS; s++) {
            q_i8x32 raised = q_flip_signs(q_load_i8(block + 16 + 32 * s)); /* w + 128, unsigned */
            uint8_t *to = bytes + b * KV_UNPACKED_BYTES + 2 * s * 32;
            q_store_i8(to, q_high_nibbles(raised));
            q_store_i8(to + 32, q_low_nibbles(raised));
        }
    }
}

/* Unrolled, the loop over steps needs more registers than there are: GCC 12 takes 1.2 times as long. */
#ifdef __clang__
#define KV_LOOP _Pragma("clang loop unroll(disable)")
#else
#define KV_LOOP _Pragma("GCC unroll 1")
#endif

/* x: (blocks, KV_STEPS, KV_QUAD, 4) bytes of four positions; pairs: (blocks, KV_QUAD, 2), each block's scale
   and scale * sum of its bytes.
   sums: OUT (2, KV_QUAD, 8) products of each vector's eight rows with each position; of nibbles apart, in the
   first. They stay in memory: all registers are the inner loop's. */
KV_INLINE void kv_dot_quad(
    int nibbles_apart, const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs,
    ptrdiff_t blocks, float *sums)
{
    const int panels = nibbles_apart ? 1 : 2;
    for (int i = 0; i < panels * KV_QUAD; i++)
        q_store(sums + 8 * i, q_set(0));
    for (ptrdiff_t b = 0; b < blocks; b++) {
        q_sums dots[2][KV_QUAD];
        for (int v = 0; v < 2; v++)
            for (int p = 0; p < KV_QUAD; p++)
                dots[v][p] = q_no_sums();
        KV_LOOP
        for (int s = 0; s < KV_STEPS; s++) {
            q_i8x32 w[2] = {q_load_i8(bytes + 64 * s), q_load_i8(bytes + 64 * s + 32)};
            for (int p = 0; p < KV_QUAD; p++) {
                q_i8x32 four = q_load_four(x + (s * KV_QUAD + p) * 4);
                for (int v = 0; v < 2; v++)
                    dots[v][p] = q_add_sums(dots[v][p], w[v], four);
            }
        }
        for (int v = 0; v < panels; v++) {
            q_f32x8 scale = q_load(heads + 16 * v), offset = q_load(heads + 16 * v + 8);
            for (int p = 0; p < KV_QUAD; p++) {
                float *sum = sums + (v * KV_QUAD + p) * 8;
                q_f32x8 dot = nibbles_apart ? q_sums_join(dots[0][p], dots[1][p]) : q_sums_float(dots[v][p]);
                q_f32x8 acc = q_fma(offset, q_set(pairs[2 * p + 1]), q_load(sum));
                q_store(sum, q_fma(q_mul(scale, q_set(pairs[2 * p])), dot, acc));
            }
        }
        bytes += KV_UNPACKED_BYTES;
        heads += KV_UNPACKED_FLOATS;
        x += KV_BLOCK * KV_QUAD;
        pairs += 2 * KV_QUAD;
    }
}

static void kv_dot_quad_q4_1(
    const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs, ptrdiff_t blocks, float *sums)
{
    kv_dot_quad(0, bytes, heads, x, pairs, blocks, sums);
}

static void kv_dot_quad_q8_0(
    const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs, ptrdiff_t blocks, float *sums)
{
    kv_dot_quad(1, bytes, heads, x, pairs, blocks, sums);
}

#endif
