/* simd.h on AArch64: eight floats, or eight int32, are two NEON vectors. They are a struct because GCC keeps
   a vector that is wider than the machine's in memory, and each operation on it would go there and back. */
#ifndef KV_SIMD_NEON_H
#define KV_SIMD_NEON_H

#include <arm_neon.h>

typedef struct { float32x4_t low, high; } kv_vf;
typedef struct { int32x4_t low, high; } kv_vi;

KV_INLINE kv_vf kv_splat(float x) { return (kv_vf){vdupq_n_f32(x), vdupq_n_f32(x)}; }
KV_INLINE kv_vf kv_load(const float *at) { return (kv_vf){vld1q_f32(at), vld1q_f32(at + 4)}; }
KV_INLINE void kv_store(float *at, kv_vf x) { vst1q_f32(at, x.low), vst1q_f32(at + 4, x.high); }

KV_INLINE kv_vf kv_fma(kv_vf a, kv_vf b, kv_vf c) {
    return (kv_vf){vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
KV_INLINE kv_vf kv_mul(kv_vf a, kv_vf b) {
    return (kv_vf){vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}
KV_INLINE kv_vf kv_add(kv_vf a, kv_vf b) {
    return (kv_vf){vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}
KV_INLINE kv_vf kv_sub(kv_vf a, kv_vf b) {
    return (kv_vf){vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)};
}
/* NEON's own maximum is NaN where either is. */
KV_INLINE kv_vf kv_max(kv_vf a, kv_vf b) {
    return (kv_vf){vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low),
                   vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
}

KV_INLINE kv_vf kv_min(kv_vf a, kv_vf b) {
    return (kv_vf){vbslq_f32(vcltq_f32(a.low, b.low), a.low, b.low),
                   vbslq_f32(vcltq_f32(a.high, b.high), a.high, b.high)};
}

/* x where a bit of `keep` is set, else 0. */
KV_INLINE float32x4_t kv_keep(float32x4_t x, uint32x4_t keep) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), keep));
}
KV_INLINE kv_vf kv_head(kv_vf x, int32_t lanes) {
    const int32x4_t index = {0, 1, 2, 3};
    return (kv_vf){kv_keep(x.low, vcltq_s32(index, vdupq_n_s32(lanes))),
                   kv_keep(x.high, vcltq_s32(index, vdupq_n_s32(lanes - 4)))};
}
KV_INLINE kv_vf kv_zero_below(kv_vf x, kv_vf at, float floor) {
    const float32x4_t low = vdupq_n_f32(floor);
    return (kv_vf){kv_keep(x.low, vmvnq_u32(vcltq_f32(at.low, low))),
                   kv_keep(x.high, vmvnq_u32(vcltq_f32(at.high, low)))};
}
KV_INLINE float32x4_t kv_add_exponent_half(float32x4_t x, float32x4_t power) {
    int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(power), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), n));
}
KV_INLINE kv_vf kv_add_exponent(kv_vf x, kv_vf power) {
    return (kv_vf){kv_add_exponent_half(x.low, power.low), kv_add_exponent_half(x.high, power.high)};
}

KV_INLINE float kv_hsum(kv_vf x) { return vaddvq_f32(vaddq_f32(x.low, x.high)); }
KV_INLINE float kv_hmax(kv_vf x) { return vmaxvq_f32(vmaxq_f32(x.low, x.high)); }
KV_INLINE void kv_hsum4(float *at, kv_vf a, kv_vf b, kv_vf c, kv_vf d, float scale) {
    float32x4_t ab = vpaddq_f32(vaddq_f32(a.low, a.high), vaddq_f32(b.low, b.high));
    float32x4_t cd = vpaddq_f32(vaddq_f32(c.low, c.high), vaddq_f32(d.low, d.high));
    vst1q_f32(at, vmulq_n_f32(vpaddq_f32(ab, cd), scale));
}

KV_INLINE kv_vf kv_load_half(const uint16_t *at) {
    float16x8_t half = vreinterpretq_f16_u16(vld1q_u16(at));
    return (kv_vf){vcvt_f32_f16(vget_low_f16(half)), vcvt_high_f32_f16(half)};
}
KV_INLINE kv_vf kv_load_int8(const int8_t *at) {
    int16x8_t wide = vmovl_s8(vld1_s8(at));
    return (kv_vf){vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}
KV_INLINE kv_vi kv_widen_int8(const int8_t *at) {
    int8x16_t bytes = vld1q_s8(at);
    return (kv_vi){vreinterpretq_s32_s16(vmovl_s8(vget_low_s8(bytes))),
                   vreinterpretq_s32_s16(vmovl_high_s8(bytes))};
}
KV_INLINE kv_vi kv_load_int16(const int16_t *at) {
    return (kv_vi){vreinterpretq_s32_s16(vld1q_s16(at)), vreinterpretq_s32_s16(vld1q_s16(at + 8))};
}
KV_INLINE int32x4_t kv_dot_int16_half(int32x4_t a, int32x4_t b) {
    int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
    return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
}
KV_INLINE kv_vi kv_dot_int16(kv_vi a, kv_vi b) {
    return (kv_vi){kv_dot_int16_half(a.low, b.low), kv_dot_int16_half(a.high, b.high)};
}
KV_INLINE kv_vi kv_add_int(kv_vi a, kv_vi b) {
    return (kv_vi){vaddq_s32(a.low, b.low), vaddq_s32(a.high, b.high)};
}
KV_INLINE kv_vf kv_from_int(kv_vi x) { return (kv_vf){vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
KV_INLINE void kv_store_int16(int16_t *at, kv_vf x) {
    int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(x.low));
    vst1q_s16(at, vqmovn_high_s32(low, vcvtnq_s32_f32(x.high)));
}

#endif
