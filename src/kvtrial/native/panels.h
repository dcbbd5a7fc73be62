/* Quantised weights in panels of eight rows, and products with them.
 *
 * A panel is packed once, when a model is loaded, from whatever kind the file has (units.h). Unit by unit, 32
 * columns each, it has what eight rows have there: their scales (and offsets), then four weights of each row in
 * turn. Byte 4 r + i of vector s is of row r:
 *
 *     Q4_1   fp16 d[8], fp16 m[8], 4 vectors of 32 bytes: element 4 s + i in the low nibble, element 16 + 4 s + i
 *            in the high one. A weight is d q + m
 *     Q8_0   fp16 d[8], 8 vectors: element 4 s + i, signed. d q
 *     S4     the same nibbles; d and m are of eight units, and each has int8 a[8], b[8]: d a q + m b
 *     S8     Q8_0 with int8 a[8] after d: d a q
 *     S6     fp16 d[8], fp16 m[8], int8 a[2][8], b[2][8] of 16 columns each, nibbles as Q4_1, then 2 vectors of two
 *            bits: bits 2 k of vector h belong to element 16 h + 4 k + i. d a q + m b with q in 0..63
 *
 * So it takes about as many bytes as the rows did, is read front to back, and four bytes of an activation,
 * repeated, meet eight rows in one multiplication; nothing is summed across lanes.
 *
 * A vector's operations and their order do not depend on how many others there are; the multiply-adds are
 * explicit because the compiler could otherwise contract each instance in its own way.
 */
#ifndef KVTRIAL_PANELS_H
#define KVTRIAL_PANELS_H

#include <stddef.h>

#include "quants.h"
#include "units.h"

/* Bytes of a row's unit; of S4, of a row's eight units. */
#define KV_Q4_1_BYTES 20
#define KV_Q8_0_BYTES 34
#define KV_S4_BYTES 148
#define KV_S6_BYTES 32
#define KV_S8_BYTES 35
#define KV_PANEL_ROWS 8
#define KV_DOT_VECTORS 4
/* Bytes between a load and its prefetch: about a memory latency's worth of streaming. */
#define KV_PREFETCH_BYTES 4096

/* One vector that weights are multiplied with. */
typedef struct {
    ptrdiff_t cols;
    const float *values; /* (cols,) */
    const int8_t *bytes; /* (cols,) values / scale, rounded */
    const float *pairs;  /* (cols / 32, 2) per unit: scale, scale * sum of its bytes */
    const float *sums;   /* (cols / 32,) per unit: sum of its values */
    const float *halves; /* (cols / 32, 2) of 16 each: scale * sum of its bytes, or sum of its values */
} kv_activation;

#define KV_INLINE static inline __attribute__((always_inline))

/* ---- packing: a unit of row r into where the panel has it; 1 where an offset is none that fp16 holds */

static inline void kv_put_half(uint8_t *at, int r, uint16_t bits) { memcpy(at + 2 * r, &bits, 2); }

static inline void kv_put_nibbles(const kv_unit *restrict unit, int r, uint8_t *restrict vectors)
{
    uint8_t both[16];
    kv_store_sixteen(both, (kv_load_sixteen(unit->codes) & 15) | kv_load_sixteen(unit->codes + 16) << 4);
    for (int s = 0; s < 4; s++)
        memcpy(vectors + 32 * s + 4 * r, both + 4 * s, 4);
}

static inline void kv_put_bytes(const kv_unit *restrict unit, int r, uint8_t *restrict vectors)
{
    for (int s = 0; s < 8; s++)
        memcpy(vectors + 32 * s + 4 * r, unit->codes + 4 * s, 4);
}

static void kv_put_q4_1(const kv_unit *restrict unit, ptrdiff_t u, int r, uint8_t *restrict panel)
{
    uint8_t *at = panel + u * KV_PANEL_ROWS * KV_Q4_1_BYTES;
    kv_put_half(at, r, unit->scale);
    kv_put_half(at + 16, r, unit->offset);
    kv_put_nibbles(unit, r, at + 32);
}

static void kv_put_q8_0(const kv_unit *restrict unit, ptrdiff_t u, int r, uint8_t *restrict panel)
{
    uint8_t *at = panel + u * KV_PANEL_ROWS * KV_Q8_0_BYTES;
    kv_put_half(at, r, unit->scale);
    kv_put_bytes(unit, r, at + 16);
}

#define KV_S4_UNIT 144 /* of eight rows, behind 32 bytes of a super-block's */
static void kv_put_s4(const kv_unit *restrict unit, ptrdiff_t u, int r, uint8_t *restrict panel)
{
    uint8_t *super = panel + u / KV_SUPER_UNITS * KV_PANEL_ROWS * KV_S4_BYTES;
    uint8_t *at = super + 32 + u % KV_SUPER_UNITS * KV_S4_UNIT;
    kv_put_half(super, r, unit->scale);
    kv_put_half(super + 16, r, unit->offset);
    at[r] = (uint8_t)unit->scales[0];
    at[8 + r] = (uint8_t)unit->offsets[0];
    kv_put_nibbles(unit, r, at + 16);
}

static void kv_put_s6(const kv_unit *restrict unit, ptrdiff_t u, int r, uint8_t *restrict panel)
{
    uint8_t *at = panel + u * KV_PANEL_ROWS * KV_S6_BYTES, *high = at + 64 + 128;
    kv_put_half(at, r, unit->scale);
    kv_put_half(at + 16, r, unit->offset);
    for (int h = 0; h < 2; h++) {
        at[32 + 8 * h + r] = (uint8_t)unit->scales[h];
        at[48 + 8 * h + r] = (uint8_t)unit->offsets[h];
    }
    kv_put_nibbles(unit, r, at + 64);
    for (int h = 0; h < 2; h++) { /* bits 4 and 5 of four codes at a time */
        uint32_t w[4], bits;
        memcpy(w, unit->codes + 16 * h, 16);
        bits = (w[0] >> 4 & 0x03030303) | (w[1] >> 2 & 0x0C0C0C0C) | (w[2] & 0x30303030) | (w[3] << 2 & 0xC0C0C0C0);
        memcpy(high + 32 * h + 4 * r, &bits, 4);
    }
}

static void kv_put_s8(const kv_unit *restrict unit, ptrdiff_t u, int r, uint8_t *restrict panel)
{
    uint8_t *at = panel + u * KV_PANEL_ROWS * KV_S8_BYTES;
    kv_put_half(at, r, unit->scale);
    at[16 + r] = (uint8_t)unit->scales[0];
    kv_put_bytes(unit, r, at + 24);
}

/* n <= 8 rows of a file's blocks, `row_bytes` apart, into a panel; rows that are missing are zeros. 1 where an
   offset left fp16. Inlined with constants: an instance for each pair of kind and form. */
KV_INLINE int kv_pack(
    kv_read_fn read, void (*put)(const kv_unit *, ptrdiff_t, int, uint8_t *), const uint8_t *rows,
    ptrdiff_t row_bytes, ptrdiff_t n, ptrdiff_t units, uint8_t *panel)
{
    kv_unit unit;
    int left = 0;
    for (ptrdiff_t u = 0; u < units; u++)
        for (int r = 0; r < KV_PANEL_ROWS; r++) {
            if (r < n)
                read(rows + r * row_bytes, u, &unit);
            else
                memset(&unit, 0, sizeof unit);
            left |= (unit.offset & 0x7C00) == 0x7C00;
            put(&unit, u, r, panel);
        }
    return left;
}

typedef int (*kv_pack_fn)(
    const uint8_t *rows, ptrdiff_t row_bytes, ptrdiff_t n, ptrdiff_t units, uint8_t *panel);

#define KV_PACK(kind, form) \
    static int kv_pack_##kind( \
        const uint8_t *rows, ptrdiff_t row_bytes, ptrdiff_t n, ptrdiff_t units, uint8_t *panel) \
    { \
        return kv_pack(kv_read_##kind, kv_put_##form, rows, row_bytes, n, units, panel); \
    }
KV_PACK(q4_0, q4_1)
KV_PACK(q4_1, q4_1)
KV_PACK(q5_0, q8_0)
KV_PACK(q8_0, q8_0)
KV_PACK(iq4_nl, q8_0)
KV_PACK(q4_k, s4)
KV_PACK(q5_1, s6)
KV_PACK(q2_k, s6)
KV_PACK(q3_k, s6)
KV_PACK(q5_k, s6)
KV_PACK(q6_k, s6)
KV_PACK(iq4_xs, s8)

/* ---- one row as float32: out (32 * units,) */

static inline float kv_half_at(const uint8_t *at, int r) { return q_half(at + 2 * r); }

static inline int kv_nibble_at(const uint8_t *vectors, int r, int i)
{
    return vectors[32 * (i % 16 / 4) + 4 * r + i % 4] >> 4 * (i / 16) & 15;
}

static void kv_row_q4_1(const uint8_t *panel, int r, ptrdiff_t units, float *out)
{
    for (ptrdiff_t u = 0; u < units; u++, panel += KV_PANEL_ROWS * KV_Q4_1_BYTES, out += KV_BLOCK)
        for (int i = 0; i < KV_BLOCK; i++)
            out[i] = kv_half_at(panel, r) * kv_nibble_at(panel + 32, r, i) + kv_half_at(panel + 16, r);
}

static void kv_row_q8_0(const uint8_t *panel, int r, ptrdiff_t units, float *out)
{
    for (ptrdiff_t u = 0; u < units; u++, panel += KV_PANEL_ROWS * KV_Q8_0_BYTES, out += KV_BLOCK)
        for (int i = 0; i < KV_BLOCK; i++)
            out[i] = kv_half_at(panel, r) * (int8_t)panel[16 + 32 * (i / 4) + 4 * r + i % 4];
}

static void kv_row_s4(const uint8_t *panel, int r, ptrdiff_t units, float *out)
{
    for (ptrdiff_t u = 0; u < units; u++, out += KV_BLOCK) {
        const uint8_t *super = panel + u / KV_SUPER_UNITS * KV_PANEL_ROWS * KV_S4_BYTES;
        const uint8_t *at = super + 32 + u % KV_SUPER_UNITS * KV_S4_UNIT;
        float scale = kv_half_at(super, r) * (int8_t)at[r], offset = kv_half_at(super + 16, r) * (int8_t)at[8 + r];
        for (int i = 0; i < KV_BLOCK; i++)
            out[i] = scale * kv_nibble_at(at + 16, r, i) + offset;
    }
}

static void kv_row_s6(const uint8_t *panel, int r, ptrdiff_t units, float *out)
{
    for (ptrdiff_t u = 0; u < units; u++, panel += KV_PANEL_ROWS * KV_S6_BYTES, out += KV_BLOCK)
        for (int i = 0; i < KV_BLOCK; i++) {
            int h = i / 16, high = panel[192 + 32 * h + 4 * r + i % 4] >> 2 * (i % 16 / 4) & 3;
            float scale = kv_half_at(panel, r) * (int8_t)panel[32 + 8 * h + r];
            float offset = kv_half_at(panel + 16, r) * (int8_t)panel[48 + 8 * h + r];
            out[i] = scale * (kv_nibble_at(panel + 64, r, i) | high << 4) + offset;
        }
}

static void kv_row_s8(const uint8_t *panel, int r, ptrdiff_t units, float *out)
{
    for (ptrdiff_t u = 0; u < units; u++, panel += KV_PANEL_ROWS * KV_S8_BYTES, out += KV_BLOCK) {
        float scale = kv_half_at(panel, r) * (int8_t)panel[16 + r];
        for (int i = 0; i < KV_BLOCK; i++)
            out[i] = scale * (int8_t)panel[24 + 32 * (i / 4) + 4 * r + i % 4];
    }
}

KV_INLINE void kv_prefetch_block(const uint8_t *at, int block_bytes)
{
    for (int line = 0; line < KV_PANEL_ROWS * block_bytes; line += 64)
        __builtin_prefetch(at + KV_PREFETCH_BYTES + line);
}

/* ---- up to four vectors; sums: OUT (n, 8). n is a constant in every instance. */

/* A unit of nibbles with the bytes of each vector. */
KV_INLINE void kv_add_nibbles(
    const uint8_t *codes, q_f32x8 scale, q_f32x8 offset, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    q_sums dots[KV_DOT_VECTORS];
    for (int i = 0; i < n; i++)
        dots[i] = q_no_sums();
    for (int s = 0; s < 4; s++) {
        q_i8x32 both = q_load_i8(codes + 32 * s), low = q_low_nibbles(both), high = q_high_nibbles(both);
        for (int i = 0; i < n; i++) {
            const int8_t *at = x[i].bytes + u * KV_BLOCK + 4 * s;
            dots[i] = q_add_sums(dots[i], low, q_load_four(at));
            dots[i] = q_add_sums(dots[i], high, q_load_four(at + 16));
        }
    }
    for (int i = 0; i < n; i++) {
        const float *pair = x[i].pairs + 2 * u;
        acc[i] = q_fma(offset, q_set(pair[1]), acc[i]);
        acc[i] = q_fma(q_mul(scale, q_set(pair[0])), q_sums_float(dots[i]), acc[i]);
    }
}

/* A unit of signed bytes. */
KV_INLINE void kv_add_bytes(
    const uint8_t *codes, q_f32x8 scale, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    q_wide_sums dots[KV_DOT_VECTORS];
    for (int i = 0; i < n; i++)
        dots[i] = q_no_wide_sums();
    for (int s = 0; s < 8; s++) {
        q_i8x32 w = q_load_i8(codes + 32 * s);
        for (int i = 0; i < n; i++)
            dots[i] = q_add_wide_sums(dots[i], w, q_load_four(x[i].bytes + u * KV_BLOCK + 4 * s));
    }
    for (int i = 0; i < n; i++)
        acc[i] = q_fma(q_mul(scale, q_set(x[i].pairs[2 * u])), q_wide_sums_float(dots[i]), acc[i]);
}

/* Weights 0..63 of vector s in half h of a unit of S6. */
KV_INLINE q_i8x32 kv_sixes(const uint8_t *codes, int h, int s)
{
    q_i8x32 both = q_load_i8(codes + 32 * s);
    return q_or(h ? q_high_nibbles(both) : q_low_nibbles(both), q_two_bits(q_load_i8(codes + 128 + 32 * h), s));
}

/* A unit of S6. Of 63 * 127 two fours stay inside int16, so a half has two sums. */
KV_INLINE void kv_add_sixes(const uint8_t *unit, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    q_f32x8 d = q_load_f16(unit), m = q_load_f16(unit + 16);
    for (int h = 0; h < 2; h++) {
        q_f32x8 scale = q_mul(d, q_load_small(unit + 32 + 8 * h)), offset = q_mul(m, q_load_small(unit + 48 + 8 * h));
        q_sums dots[2][KV_DOT_VECTORS];
        for (int s = 0; s < 4; s++) {
            q_i8x32 w = kv_sixes(unit + 64, h, s);
            for (int i = 0; i < n; i++) {
                q_sums so_far = s % 2 ? dots[s / 2][i] : q_no_sums();
                dots[s / 2][i] = q_add_sums(so_far, w, q_load_four(x[i].bytes + u * KV_BLOCK + 16 * h + 4 * s));
            }
        }
        for (int i = 0; i < n; i++) {
            acc[i] = q_fma(offset, q_set(x[i].halves[2 * u + h]), acc[i]);
            acc[i] = q_fma(q_mul(scale, q_set(x[i].pairs[2 * u])), q_sums_both(dots[0][i], dots[1][i]), acc[i]);
        }
    }
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

KV_INLINE q_f32x8 kv_join(const q_f32x8 *dots) { return q_add(q_add(dots[0], dots[1]), q_add(dots[2], dots[3])); }

KV_INLINE void kv_add_nibbles_floats(
    const uint8_t *codes, q_f32x8 scale, q_f32x8 offset, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    for (int i = 0; i < n; i++) {
        const float *at = x[i].values + u * KV_BLOCK;
        q_f32x8 dots[4] = {q_set(0), q_set(0), q_set(0), q_set(0)};
        for (int s = 0; s < 4; s++) {
            q_i8x32 both = q_load_i8(codes + 32 * s);
            kv_add_fours(q_low_nibbles(both), at + 4 * s, dots);
            kv_add_fours(q_high_nibbles(both), at + 16 + 4 * s, dots);
        }
        acc[i] = q_fma(offset, q_set(x[i].sums[u]), acc[i]);
        acc[i] = q_fma(scale, kv_join(dots), acc[i]);
    }
}

KV_INLINE void kv_add_bytes_floats(
    const uint8_t *codes, q_f32x8 scale, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    for (int i = 0; i < n; i++) {
        const float *at = x[i].values + u * KV_BLOCK;
        q_f32x8 dots[4] = {q_set(0), q_set(0), q_set(0), q_set(0)};
        for (int s = 0; s < 8; s++)
            kv_add_fours(q_load_i8(codes + 32 * s), at + 4 * s, dots);
        acc[i] = q_fma(scale, kv_join(dots), acc[i]);
    }
}

KV_INLINE void kv_add_sixes_floats(const uint8_t *unit, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    q_f32x8 d = q_load_f16(unit), m = q_load_f16(unit + 16);
    for (int h = 0; h < 2; h++) {
        q_f32x8 scale = q_mul(d, q_load_small(unit + 32 + 8 * h)), offset = q_mul(m, q_load_small(unit + 48 + 8 * h));
        for (int i = 0; i < n; i++) {
            q_f32x8 dots[4] = {q_set(0), q_set(0), q_set(0), q_set(0)};
            for (int s = 0; s < 4; s++)
                kv_add_fours(kv_sixes(unit + 64, h, s), x[i].values + u * KV_BLOCK + 16 * h + 4 * s, dots);
            acc[i] = q_fma(offset, q_set(x[i].halves[2 * u + h]), acc[i]);
            acc[i] = q_fma(scale, kv_join(dots), acc[i]);
        }
    }
}

/* ---- a unit of each form, with the bytes or the floats of n vectors; gives where the next one's panel is */

typedef const uint8_t *(*kv_step_fn)(int, const uint8_t *, const kv_activation *, ptrdiff_t, int, q_f32x8 *);

KV_INLINE void kv_step_nibbles(
    int floats, const uint8_t *codes, q_f32x8 scale, q_f32x8 offset, const kv_activation *x, ptrdiff_t u, int n,
    q_f32x8 *acc)
{
    (floats ? kv_add_nibbles_floats : kv_add_nibbles)(codes, scale, offset, x, u, n, acc);
}

KV_INLINE const uint8_t *kv_step_q4_1(
    int floats, const uint8_t *panel, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    kv_prefetch_block(panel, KV_Q4_1_BYTES);
    kv_step_nibbles(floats, panel + 32, q_load_f16(panel), q_load_f16(panel + 16), x, u, n, acc);
    return panel + KV_PANEL_ROWS * KV_Q4_1_BYTES;
}

KV_INLINE const uint8_t *kv_step_s4(
    int floats, const uint8_t *panel, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    const uint8_t *at = panel + 32 + u % KV_SUPER_UNITS * KV_S4_UNIT;
    q_f32x8 scale = q_mul(q_load_f16(panel), q_load_small(at));
    q_f32x8 offset = q_mul(q_load_f16(panel + 16), q_load_small(at + 8));
    kv_prefetch_block(at, KV_S4_BYTES / KV_SUPER_UNITS + 1);
    kv_step_nibbles(floats, at + 16, scale, offset, x, u, n, acc);
    return u % KV_SUPER_UNITS == KV_SUPER_UNITS - 1 ? panel + KV_PANEL_ROWS * KV_S4_BYTES : panel;
}

KV_INLINE const uint8_t *kv_step_q8_0(
    int floats, const uint8_t *panel, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    kv_prefetch_block(panel, KV_Q8_0_BYTES);
    (floats ? kv_add_bytes_floats : kv_add_bytes)(panel + 16, q_load_f16(panel), x, u, n, acc);
    return panel + KV_PANEL_ROWS * KV_Q8_0_BYTES;
}

KV_INLINE const uint8_t *kv_step_s8(
    int floats, const uint8_t *panel, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    q_f32x8 scale = q_mul(q_load_f16(panel), q_load_small(panel + 16));
    kv_prefetch_block(panel, KV_S8_BYTES);
    (floats ? kv_add_bytes_floats : kv_add_bytes)(panel + 24, scale, x, u, n, acc);
    return panel + KV_PANEL_ROWS * KV_S8_BYTES;
}

KV_INLINE const uint8_t *kv_step_s6(
    int floats, const uint8_t *panel, const kv_activation *x, ptrdiff_t u, int n, q_f32x8 *acc)
{
    kv_prefetch_block(panel, KV_S6_BYTES);
    (floats ? kv_add_sixes_floats : kv_add_sixes)(panel, x, u, n, acc);
    return panel + KV_PANEL_ROWS * KV_S6_BYTES;
}

KV_INLINE void kv_dot(
    kv_step_fn step, int floats, const uint8_t *panel, const kv_activation *x, int n, float *sums)
{
    q_f32x8 acc[KV_DOT_VECTORS];
    for (int i = 0; i < n; i++)
        acc[i] = q_set(0);
    for (ptrdiff_t u = 0; u < x->cols / KV_BLOCK; u++)
        panel = step(floats, panel, x, u, n, acc);
    for (int i = 0; i < n; i++)
        q_store(sums + 8 * i, acc[i]);
}

/* An instance for each n, so that its accumulators stay in registers. row_bytes has no use here: panels have
   a type in common with rows that lie one by one. */
#define KV_DOT8(name, step, floats) \
    static void name( \
        const uint8_t *panel, ptrdiff_t row_bytes, const kv_activation *x, ptrdiff_t n, float *sums) \
    { \
        switch (n) { \
        case 1: kv_dot(step, floats, panel, x, 1, sums); break; \
        case 2: kv_dot(step, floats, panel, x, 2, sums); break; \
        case 3: kv_dot(step, floats, panel, x, 3, sums); break; \
        default: kv_dot(step, floats, panel, x, KV_DOT_VECTORS, sums); \
        } \
    }
#define KV_DOT8_BOTH(form) \
    KV_DOT8(kv_dot8_##form##_bytes, kv_step_##form, 0) \
    KV_DOT8(kv_dot8_##form##_floats, kv_step_##form, 1)
KV_DOT8_BOTH(q4_1)
KV_DOT8_BOTH(q8_0)
KV_DOT8_BOTH(s4)
KV_DOT8_BOTH(s6)
KV_DOT8_BOTH(s8)

/* ---- what a form is, and which one a kind is packed into */

typedef struct {
    const char *name;
    int units, bytes; /* of a row's block: units of 32 weights, and their bytes */
    void (*with_bytes)(const uint8_t *, ptrdiff_t, const kv_activation *, ptrdiff_t, float *);
    void (*with_floats)(const uint8_t *, ptrdiff_t, const kv_activation *, ptrdiff_t, float *);
    void (*row)(const uint8_t *panel, int r, ptrdiff_t units, float *out);
} kv_form;

#define KV_FORM(name, form, units, bytes) \
    {name, units, bytes, kv_dot8_##form##_bytes, kv_dot8_##form##_floats, kv_row_##form}
enum { KV_FORM_Q4_1, KV_FORM_Q8_0, KV_FORM_S4, KV_FORM_S6, KV_FORM_S8, KV_FORMS };
static const kv_form kv_forms[KV_FORMS] = {
    KV_FORM("Q4_1", q4_1, 1, KV_Q4_1_BYTES), KV_FORM("Q8_0", q8_0, 1, KV_Q8_0_BYTES),
    KV_FORM("S4", s4, KV_SUPER_UNITS, KV_S4_BYTES), KV_FORM("S6", s6, 1, KV_S6_BYTES),
    KV_FORM("S8", s8, 1, KV_S8_BYTES),
};

typedef struct {
    const char *name;
    int form;
    int units, bytes; /* of a block in the file */
    kv_pack_fn pack;
} kv_kind;

enum { KV_KINDS = 12 };
static const kv_kind kv_kinds[KV_KINDS] = {
    {"Q4_0", KV_FORM_Q4_1, 1, 18, kv_pack_q4_0}, {"Q4_1", KV_FORM_Q4_1, 1, 20, kv_pack_q4_1},
    {"Q5_0", KV_FORM_Q8_0, 1, 22, kv_pack_q5_0}, {"Q8_0", KV_FORM_Q8_0, 1, 34, kv_pack_q8_0},
    {"IQ4_NL", KV_FORM_Q8_0, 1, 18, kv_pack_iq4_nl}, {"Q5_1", KV_FORM_S6, 1, 24, kv_pack_q5_1},
    {"Q2_K", KV_FORM_S6, KV_SUPER_UNITS, 84, kv_pack_q2_k}, {"Q3_K", KV_FORM_S6, KV_SUPER_UNITS, 110, kv_pack_q3_k},
    {"Q4_K", KV_FORM_S4, KV_SUPER_UNITS, 144, kv_pack_q4_k}, {"Q5_K", KV_FORM_S6, KV_SUPER_UNITS, 176, kv_pack_q5_k},
    {"Q6_K", KV_FORM_S6, KV_SUPER_UNITS, 210, kv_pack_q6_k},
    {"IQ4_XS", KV_FORM_S8, KV_SUPER_UNITS, 136, kv_pack_iq4_xs},
};

#endif
