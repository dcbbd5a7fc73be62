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
static inline void q_store_i8(void *p, q_i8x32 a)
{
    int8_t *bytes = p;
    vst1q_s8(bytes, a.low);
    vst1q_s8(bytes + 16, a.high);
}
static inline int8x16_t q_low_half(int8x16_t a) { return vandq_s8(a, vdupq_n_s8(15)); }
static inline int8x16_t q_high_half(int8x16_t a)
{
    return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(a), 4));
}
static inline int8x16_t q_flip_half(int8x16_t a) { return veorq_s8(a, vdupq_n_s8(-128)); }
static inline q_i8x32 q_low_nibbles(q_i8x32 a) { return (q_i8x32){q_low_half(a.low), q_low_half(a.high)}; }
static inline q_i8x32 q_high_nibbles(q_i8x32 a) { return (q_i8x32){q_high_half(a.low), q_high_half(a.high)}; }
static inline q_i8x32 q_flip_signs(q_i8x32 a) { return (q_i8x32){q_flip_half(a.low), q_flip_half(a.high)}; }

static inline q_i8x32 q_or(q_i8x32 a, q_i8x32 b)
{
    return (q_i8x32){vorrq_s8(a.low, b.low), vorrq_s8(a.high, b.high)};
}
/* Bits 2 k and 2 k + 1 of each byte, as its bits 4 and 5. */
static inline int8x16_t q_two_bits_half(int8x16_t a, int k)
{
    int8x16_t moved = vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(a), vdupq_n_s8(4 - 2 * k)));
    return vandq_s8(moved, vdupq_n_s8(48));
}
static inline q_i8x32 q_two_bits(q_i8x32 a, int k)
{
    return (q_i8x32){q_two_bits_half(a.low, k), q_two_bits_half(a.high, k)};
}
/* Eight int8 to float. */
static inline q_f32x8 q_load_small(const void *p)
{
    int16x8_t wide = vmovl_s8(vld1_s8(p));
    return q_pair(vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide)));
}

/* Byte i of each four, signed, to float. */
static inline float32x4_t q_quarter_half(int8x16_t a, int i)
{
    int32x4_t up = vshlq_s32(vreinterpretq_s32_s8(a), vdupq_n_s32(24 - 8 * i));
    return vcvtq_f32_s32(vshrq_n_s32(up, 24));
}
static inline q_f32x8 q_quarter(q_i8x32 a, int i)
{
    return q_pair(q_quarter_half(a.low, i), q_quarter_half(a.high, i));
}

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
    return vpadalq_s16(sums, vpaddq_s16(low, high)); /* two products, 2 * 128 * 127, stay inside int16 */
#endif
}
/* Eight sums of products, each of four bytes of w with the four of x, -127..127. */
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

/* 16 int8 as int16; eight sums of products, each of two int16 of w with the two of x. */
static inline q_i8x32 q_widen_i8(const void *p)
{
    int8x16_t bytes = vld1q_s8((const int8_t *)p);
    return (q_i8x32){vreinterpretq_s8_s16(vmovl_s8(vget_low_s8(bytes))), vreinterpretq_s8_s16(vmovl_high_s8(bytes))};
}
static inline int32x4_t q_add_pairs_half(int32x4_t sums, int8x16_t w, int8x16_t x)
{
    int16x8_t left = vreinterpretq_s16_s8(w), right = vreinterpretq_s16_s8(x);
    return vaddq_s32(sums, vpaddq_s32(vmull_s16(vget_low_s16(left), vget_low_s16(right)), vmull_high_s16(left, right)));
}
static inline q_sums q_add_pairs(q_sums sums, q_i8x32 w, q_i8x32 x)
{
    return (q_sums){q_add_pairs_half(sums.low, w.low, x.low), q_add_pairs_half(sums.high, w.high, x.high)};
}
static inline q_f32x8 q_pairs_float(q_sums a) { return q_sums_float(a); }

/* The sum of two. */
static inline q_f32x8 q_sums_both(q_sums a, q_sums b)
{
    return q_sums_float((q_sums){vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)});
}

/* The same as q_add_sums for w in -128..127. */
typedef q_sums q_wide_sums;
static inline q_wide_sums q_no_wide_sums(void) { return q_no_sums(); }
static inline q_wide_sums q_add_wide_sums(q_wide_sums sums, q_i8x32 w, q_i8x32 x) { return q_add_sums(sums, w, x); }
static inline q_f32x8 q_wide_sums_float(q_wide_sums a) { return q_sums_float(a); }

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
