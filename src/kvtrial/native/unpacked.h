/* Panels (panels.h) unpacked for many positions, four of which go through them at a time: the prefill's products.
 *
 * Of nibbles and of bytes a step takes two vectors: those of two panels, or the high and the low nibbles of one, as
 * 16 * high + low - 128. Weights are 0..15 either way, which leaves room in int16 for a whole unit's sum. Weights of
 * S6 are 0..63: a step takes the vector of one panel, and two steps are summed in int16.
 */
#ifndef KVTRIAL_UNPACKED_H
#define KVTRIAL_UNPACKED_H

#include "panels.h"

#define KV_STEPS 8 /* a unit; four weights of each row */
#define KV_UNPACKED_BYTES (2 * KV_BLOCK * KV_STEPS) /* a unit */
#define KV_UNPACKED_FLOATS (2 * 2 * KV_PANEL_ROWS)  /* a unit: two scales and two offsets of eight rows */
#define KV_QUAD 4                                   /* positions */

/* bytes: OUT (units, KV_STEPS, 2, 32), of S6 (units, KV_STEPS, 32) with as much behind them; heads: OUT (units, 2, 2,
   8). `second` is the panel of the rows that follow, or the first once more; forms that take one have no use for it. */
KV_INLINE void kv_unpack_nibbles(
    const uint8_t *codes, q_f32x8 scale, q_f32x8 offset, int v, uint8_t *bytes, float *heads)
{
    q_store(heads + 16 * v, scale);
    q_store(heads + 16 * v + 8, offset);
    for (int s = 0; s < 4; s++) {
        q_i8x32 both = q_load_i8(codes + 32 * s);
        uint8_t *to = bytes + (2 * s + v) * 32;
        q_store_i8(to, q_low_nibbles(both));
        q_store_i8(to + 8 * 32, q_high_nibbles(both)); /* of four steps further */
    }
}

static void kv_unpack_q4_1(
    const uint8_t *first, const uint8_t *second, ptrdiff_t units, uint8_t *bytes, float *heads)
{
    for (ptrdiff_t u = 0; u < units; u++, bytes += KV_UNPACKED_BYTES, heads += KV_UNPACKED_FLOATS)
        for (int v = 0; v < 2; v++) {
            const uint8_t *at = (v ? second : first) + u * KV_PANEL_ROWS * KV_Q4_1_BYTES;
            kv_unpack_nibbles(at + 32, q_load_f16(at), q_load_f16(at + 16), v, bytes, heads);
        }
}

static void kv_unpack_s4(
    const uint8_t *first, const uint8_t *second, ptrdiff_t units, uint8_t *bytes, float *heads)
{
    for (ptrdiff_t u = 0; u < units; u++, bytes += KV_UNPACKED_BYTES, heads += KV_UNPACKED_FLOATS)
        for (int v = 0; v < 2; v++) {
            const uint8_t *super = (v ? second : first) + u / KV_SUPER_UNITS * KV_PANEL_ROWS * KV_S4_BYTES;
            const uint8_t *at = super + 32 + u % KV_SUPER_UNITS * KV_S4_UNIT;
            q_f32x8 scale = q_mul(q_load_f16(super), q_load_small(at));
            q_f32x8 offset = q_mul(q_load_f16(super + 16), q_load_small(at + 8));
            kv_unpack_nibbles(at + 16, scale, offset, v, bytes, heads);
        }
}

KV_INLINE void kv_unpack_bytes(const uint8_t *codes, q_f32x8 scale, uint8_t *bytes, float *heads)
{
    q_store(heads, scale);
    q_store(heads + 8, q_mul(scale, q_set(-128)));
    for (int s = 0; s < KV_STEPS; s++) {
        q_i8x32 raised = q_flip_signs(q_load_i8(codes + 32 * s)); /* w + 128, unsigned */
        q_store_i8(bytes + 2 * s * 32, q_high_nibbles(raised));
        q_store_i8(bytes + (2 * s + 1) * 32, q_low_nibbles(raised));
    }
}

static void kv_unpack_q8_0(
    const uint8_t *panel, const uint8_t *second, ptrdiff_t units, uint8_t *bytes, float *heads)
{
    for (ptrdiff_t u = 0; u < units; u++, bytes += KV_UNPACKED_BYTES, heads += KV_UNPACKED_FLOATS) {
        kv_unpack_bytes(panel + 16, q_load_f16(panel), bytes, heads);
        panel += KV_PANEL_ROWS * KV_Q8_0_BYTES;
    }
}

static void kv_unpack_s8(
    const uint8_t *panel, const uint8_t *second, ptrdiff_t units, uint8_t *bytes, float *heads)
{
    for (ptrdiff_t u = 0; u < units; u++, bytes += KV_UNPACKED_BYTES, heads += KV_UNPACKED_FLOATS) {
        kv_unpack_bytes(panel + 24, q_mul(q_load_f16(panel), q_load_small(panel + 16)), bytes, heads);
        panel += KV_PANEL_ROWS * KV_S8_BYTES;
    }
}

static void kv_unpack_s6(
    const uint8_t *panel, const uint8_t *second, ptrdiff_t units, uint8_t *bytes, float *heads)
{
    for (ptrdiff_t u = 0; u < units; u++, bytes += KV_UNPACKED_BYTES, heads += KV_UNPACKED_FLOATS) {
        q_f32x8 d = q_load_f16(panel), m = q_load_f16(panel + 16);
        for (int h = 0; h < 2; h++) {
            q_store(heads + 16 * h, q_mul(d, q_load_small(panel + 32 + 8 * h)));
            q_store(heads + 16 * h + 8, q_mul(m, q_load_small(panel + 48 + 8 * h)));
            for (int s = 0; s < 4; s++)
                q_store_i8(bytes + (4 * h + s) * 32, kv_sixes(panel + 64, h, s));
        }
        panel += KV_PANEL_ROWS * KV_S6_BYTES;
    }
}

/* Unrolled, the loop over steps needs more registers than there are: GCC 12 takes 1.2 times as long. */
#ifdef __clang__
#define KV_LOOP _Pragma("clang loop unroll(disable)")
#else
#define KV_LOOP _Pragma("GCC unroll 1")
#endif

/* x: (units, KV_STEPS, KV_QUAD, 4) bytes of four positions; pairs: (units, KV_QUAD, 2), each unit's scale
   and scale * sum of its bytes.
   sums: OUT (2, KV_QUAD, 8) products of each vector's eight rows with each position; of nibbles apart, in the
   first. They stay in memory: all registers are the inner loop's. */
KV_INLINE void kv_dot_quad(
    int nibbles_apart, const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs,
    ptrdiff_t units, float *sums)
{
    const int panels = nibbles_apart ? 1 : 2;
    for (int i = 0; i < panels * KV_QUAD; i++)
        q_store(sums + 8 * i, q_set(0));
    for (ptrdiff_t u = 0; u < units; u++) {
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


/* The products of a panel of S6, a half of the unit at a time; halves: (units, KV_QUAD, 2), scale * sum of 16 bytes. */
KV_INLINE void kv_dot_quad_sixes(
    const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs, const float *halves,
    ptrdiff_t units, float *sums)
{
    for (int i = 0; i < KV_QUAD; i++)
        q_store(sums + 8 * i, q_set(0));
    for (ptrdiff_t u = 0; u < units; u++) {
        KV_LOOP
        for (int h = 0; h < 2; h++) {
            q_f32x8 scale = q_load(heads + 16 * h), offset = q_load(heads + 16 * h + 8);
            q_sums dots[2][KV_QUAD];
            for (int k = 0; k < 2; k++) { /* two steps */
                const uint8_t *w = bytes + 32 * (4 * h + 2 * k);
                const int8_t *at = x + 4 * KV_QUAD * (4 * h + 2 * k);
                q_i8x32 first = q_load_i8(w), second = q_load_i8(w + 32);
                for (int p = 0; p < KV_QUAD; p++) {
                    q_sums one = q_add_sums(q_no_sums(), first, q_load_four(at + 4 * p));
                    dots[k][p] = q_add_sums(one, second, q_load_four(at + 4 * (KV_QUAD + p)));
                }
            }
            for (int p = 0; p < KV_QUAD; p++) {
                q_f32x8 acc = q_fma(offset, q_set(halves[2 * p + h]), q_load(sums + 8 * p));
                q_f32x8 dot = q_sums_both(dots[0][p], dots[1][p]);
                q_store(sums + 8 * p, q_fma(q_mul(scale, q_set(pairs[2 * p])), dot, acc));
            }
        }
        bytes += KV_UNPACKED_BYTES;
        heads += KV_UNPACKED_FLOATS;
        x += KV_BLOCK * KV_QUAD;
        pairs += 2 * KV_QUAD;
        halves += 2 * KV_QUAD;
    }
}

static void kv_dot_quad_nibbles(
    const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs, const float *halves,
    ptrdiff_t units, float *sums)
{
    kv_dot_quad(0, bytes, heads, x, pairs, units, sums);
}

static void kv_dot_quad_bytes(
    const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs, const float *halves,
    ptrdiff_t units, float *sums)
{
    kv_dot_quad(1, bytes, heads, x, pairs, units, sums);
}

/* How a form is unpacked and multiplied, `panels` of it at a time. */
typedef struct {
    int panels;
    void (*unpack)(const uint8_t *first, const uint8_t *second, ptrdiff_t units, uint8_t *bytes, float *heads);
    void (*dot)(
        const uint8_t *bytes, const float *heads, const int8_t *x, const float *pairs, const float *halves,
        ptrdiff_t units, float *sums);
} kv_unpacked;

static const kv_unpacked kv_unpacked_forms[KV_FORMS] = {
    [KV_FORM_Q4_1] = {2, kv_unpack_q4_1, kv_dot_quad_nibbles}, [KV_FORM_S4] = {2, kv_unpack_s4, kv_dot_quad_nibbles},
    [KV_FORM_Q8_0] = {1, kv_unpack_q8_0, kv_dot_quad_bytes},   [KV_FORM_S8] = {1, kv_unpack_s8, kv_dot_quad_bytes},
    [KV_FORM_S6] = {1, kv_unpack_s6, kv_dot_quad_sixes},
};

#endif
