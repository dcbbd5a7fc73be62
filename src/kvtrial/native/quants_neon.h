/* quants.h on AArch64. Eight floats are two NEON vectors, as in simd_neon.h. */
#ifndef KVTRIAL_QUANTS_NEON_H
#define KVTRIAL_QUANTS_NEON_H

#include <arm_neon.h>

typedef struct { float32x4_t low, high; } q_f32x8;
typedef struct { int8x16_t low, high; } q_i8x32;

static inline q_f32x8 q_pair(float32x4_t low, float32x4_t high) { return (q_f32x8){low, high}; }

static inline q_f32x8 q_set(float a) { return q_pair(vdupq_n_f32(a), vdupq_n_f32(a)); }
static inline q_f32x8 q_load(const float *p) { return q_pair(vld1q_f32(p), vld1q_f32(p + 4)); }
static inline void q_store(float *p, q_f32x8 a)
{
    vst1q_f32(p, a.low);
    vst1q_f32(p + 4, a.high);
}
static inline q_f32x8 q_add(q_f32x8 a, q_f32x8 b)
{
    return q_pair(vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high));
}
static inline q_f32x8 q_mul(q_f32x8 a, q_f32x8 b)
{
    return q_pair(vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high));
}
static inline q_f32x8 q_div(q_f32x8 a, q_f32x8 b)
{
    return q_pair(vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high));
}
static inline q_f32x8 q_fma(q_f32x8 a, q_f32x8 b, q_f32x8 c)
{
    return q_pair(vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high));
}
static inline float q_sum(q_f32x8 a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
static inline q_f32x8 q_max(q_f32x8 a, q_f32x8 b)
{
    return q_pair(vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high));
}
static inline float q_max_lane(q_f32x8 a) { return vmaxvq_f32(vmaxq_f32(a.low, a.high)); }

static inline float q_half(const void *p) { _Float16 h; memcpy(&h, p, 2); return (float)h; }
static inline q_f32x8 q_load_f16(const void *p)
{
    float16x8_t h = vreinterpretq_f16_u8(vld1q_u8(p));
    return q_pair(vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h));
}

static inline q_i8x32 q_load_i8(const void *p)
{
    const int8_t *bytes = p;
    return (q_i8x32){vld1q_s8(bytes), vld1q_s8(bytes + 16)};
}
static inline q_i8x32 q_load_nibbles(const void *p)
{
    uint8x16_t both = vld1q_u8(p);
    return (q_i8x32){vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))),
                     vreinterpretq_s8_u8(vshrq_n_u8(both, 4))};
}
static inline void q_spread_nibbles(const void *p, int8_t *out)
{
    q_i8x32 bytes = q_load_nibbles(p);
    vst1q_s8(out, bytes.low);
    vst1q_s8(out + 16, bytes.high);
}

/* Four sums of four products each, onto `sums`; w in -128..127, x in -127..127. */
static inline int32x4_t q_add_products(int32x4_t sums, int8x16_t w, int8x16_t x)
{
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sums, w, x);
#else
    /* Two products, 2 * 128 * 127, stay inside int16. */
    return vpadalq_s16(sums, vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(x)), w, x));
#endif
}
static inline float32x4_t q_dot4_half(int8x16_t w0, int8x16_t w1, int8x16_t w2, int8x16_t w3, int8x16_t x)
{
    const int32x4_t zero = vdupq_n_s32(0);
    int32x4_t ab = vpaddq_s32(q_add_products(zero, w0, x), q_add_products(zero, w1, x));
    int32x4_t cd = vpaddq_s32(q_add_products(zero, w2, x), q_add_products(zero, w3, x));
    return vcvtq_f32_s32(vpaddq_s32(ab, cd));
}
/* Dots of four rows with x, in two parts each: lanes r and r + 4 add to row r. */
static inline q_f32x8 q_dot4_bytes(const q_i8x32 *w, q_i8x32 x)
{
    return q_pair(q_dot4_half(w[0].low, w[1].low, w[2].low, w[3].low, x.low),
                  q_dot4_half(w[0].high, w[1].high, w[2].high, w[3].high, x.high));
}
static inline q_f32x8 q_dot4_nibbles(const q_i8x32 *w, q_i8x32 x) { return q_dot4_bytes(w, x); }

typedef struct { int32x4_t low, high; } q_sums;
static inline q_i8x32 q_load_four(const void *p)
{
    int32_t four;
    memcpy(&four, p, 4);
    int8x16_t bytes = vreinterpretq_s8_s32(vdupq_n_s32(four));
    return (q_i8x32){bytes, bytes};
}
static inline q_sums q_no_sums(void) { return (q_sums){vdupq_n_s32(0), vdupq_n_s32(0)}; }
static inline int32x4_t q_add_fours(int32x4_t sums, int8x16_t w, int8x16_t x)
{
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sums, w, x);
#else
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return vpadalq_s16(sums, vpaddq_s16(low, high)); /* two products, 2 * 15 * 127, stay inside int16 */
#endif
}
/* Eight sums of products, each of four bytes of w, 0..15, with the four of x, -127..127. */
static inline q_sums q_add_sums(q_sums sums, q_i8x32 w, q_i8x32 x)
{
    return (q_sums){q_add_fours(sums.low, w.low, x.low), q_add_fours(sums.high, w.high, x.high)};
}
static inline q_f32x8 q_sums_float(q_sums a) { return q_pair(vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)); }
/* 16 * high + low. */
static inline q_f32x8 q_sums_join(q_sums high, q_sums low)
{
    return q_sums_float((q_sums){vmlaq_n_s32(low.low, high.low, 16), vmlaq_n_s32(low.high, high.high, 16)});
}

static inline q_f32x8 q_load_i8x8(const void *p)
{
    int16x8_t wide = vmovl_s8(vld1_s8(p));
    return q_pair(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide)));
}

/* The fp16 that four blocks begin with, a row apart. */
static inline float32x4_t q_headers(const uint8_t *block, ptrdiff_t row_bytes)
{
    uint16_t bits[4];
    for (int r = 0; r < 4; r++)
        memcpy(bits + r, block + r * row_bytes, 2);
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(bits)));
}
static inline q_f32x8 q_headers_q8_0(const uint8_t *block, ptrdiff_t row_bytes)
{
    float32x4_t d = q_headers(block, row_bytes);
    return q_pair(d, d);
}
static inline void q_headers_q4_1(
    const uint8_t *block, ptrdiff_t row_bytes, q_f32x8 *scale, q_f32x8 *offset)
{
    *scale = q_headers_q8_0(block, row_bytes);
    *offset = q_pair(vdupq_n_f32(0), q_headers(block + 2, row_bytes));
}
static inline void q_store_halves_sum(float *out, q_f32x8 a) { vst1q_f32(out, vaddq_f32(a.low, a.high)); }

static inline int q_round_i8x8(q_f32x8 a, int8_t *out)
{
    int16x8_t whole = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a.low)), vqmovn_s32(vcvtnq_s32_f32(a.high)));
    vst1_s8(out, vqmovn_s16(whole));
    return vaddlvq_s16(whole);
}

static inline float32x4_t q_clamp_half(float32x4_t a, float low, float high)
{
    return vminq_f32(vmaxq_f32(a, vdupq_n_f32(low)), vdupq_n_f32(high)); /* NaN stays NaN */
}
static inline q_f32x8 q_clamp(q_f32x8 a, float low, float high)
{
    return q_pair(q_clamp_half(a.low, low, high), q_clamp_half(a.high, low, high));
}
static inline q_f32x8 q_round(q_f32x8 a) { return q_pair(vrndnq_f32(a.low), vrndnq_f32(a.high)); }
static inline float32x4_t q_power_of_two_half(float32x4_t a)
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(a), vdupq_n_s32(127)), 23));
}
static inline q_f32x8 q_power_of_two(q_f32x8 a)
{
    return q_pair(q_power_of_two_half(a.low), q_power_of_two_half(a.high));
}

#endif
