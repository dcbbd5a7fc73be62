/* Vectors of 8 floats for the kernels: AVX2 + FMA + F16C, NEON (simd_neon.h), and a portable form.

   Loads and stores are unaligned. `kv_vf` is KV_LANES floats and `kv_vi` as many int32; but for NEON they are
   GCC/Clang vectors, so that arithmetic operators and the portable form are one. Where the machine has the
   instruction, a function uses it. */
#ifndef KV_SIMD_H
#define KV_SIMD_H

#include <stdint.h>
#include <string.h>

enum { KV_LANES = 8 };

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define KV_AVX2 1
#elif defined(__aarch64__)
#define KV_NEON 1
#endif

#define KV_INLINE static inline __attribute__((always_inline))

/* binary16, rounding to nearest even; NaN payloads and subnormals as IEEE 754 says. */
KV_INLINE uint16_t kv_to_half(float x) {
#if KV_AVX2
    return (uint16_t)_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
#endif
}

KV_INLINE float kv_from_half(uint16_t bits) {
#if KV_AVX2
    return _cvtsh_ss(bits);
#else
    _Float16 half;
    memcpy(&half, &bits, 2);
    return (float)half;
#endif
}

#if KV_NEON
#include "simd_neon.h"
#else

typedef float kv_vf __attribute__((vector_size(4 * KV_LANES)));
typedef int32_t kv_vi __attribute__((vector_size(4 * KV_LANES)));

KV_INLINE kv_vf kv_splat(float x) { return (kv_vf){x, x, x, x, x, x, x, x}; }
KV_INLINE kv_vf kv_load(const float *at) { kv_vf x; memcpy(&x, at, sizeof x); return x; }
KV_INLINE void kv_store(float *at, kv_vf x) { memcpy(at, &x, sizeof x); }

KV_INLINE kv_vf kv_fma(kv_vf a, kv_vf b, kv_vf c) {
#if KV_AVX2
    return (kv_vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c; /* -ffp-contract=fast fuses it */
#endif
}

KV_INLINE kv_vf kv_mul(kv_vf a, kv_vf b) { return a * b; }
KV_INLINE kv_vf kv_add(kv_vf a, kv_vf b) { return a + b; }
KV_INLINE kv_vf kv_sub(kv_vf a, kv_vf b) { return a - b; }

/* b where either is NaN. */
KV_INLINE kv_vf kv_max(kv_vf a, kv_vf b) {
#if KV_AVX2
    return (kv_vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    kv_vi pick = a > b;
    return (kv_vf)((pick & (kv_vi)a) | (~pick & (kv_vi)b));
#endif
}

KV_INLINE kv_vf kv_min(kv_vf a, kv_vf b) {
#if KV_AVX2
    return (kv_vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    kv_vi pick = a < b;
    return (kv_vf)((pick & (kv_vi)a) | (~pick & (kv_vi)b));
#endif
}

/* Keeps lanes below `lanes` and makes zeros of the rest, whatever they hold. */
KV_INLINE kv_vf kv_head(kv_vf x, int32_t lanes) {
    kv_vi keep = (kv_vi){0, 1, 2, 3, 4, 5, 6, 7} < lanes;
    return (kv_vf)((kv_vi)x & keep);
}

/* x where `at` is not below `floor` or is NaN, else 0. */
KV_INLINE kv_vf kv_zero_below(kv_vf x, kv_vf at, float floor) {
    kv_vi dead = at < kv_splat(floor);
    return (kv_vf)((kv_vi)x & ~dead);
}

/* x with the low bits of `power` added to its exponent. */
KV_INLINE kv_vf kv_add_exponent(kv_vf x, kv_vf power) {
    return (kv_vf)((kv_vi)x + ((kv_vi)power << 23));
}

KV_INLINE float kv_hsum(kv_vf x) {
#if KV_AVX2
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    half = _mm_hadd_ps(half, half);
    return _mm_cvtss_f32(_mm_hadd_ps(half, half));
#else
    return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
#endif
}

/* scale * the sums of a, b, c and d, into four floats. */
KV_INLINE void kv_hsum4(float *at, kv_vf a, kv_vf b, kv_vf c, kv_vf d, float scale) {
#if KV_AVX2
    /* Two shuffles and an addition are quicker than one haddps. */
#define KV_PAIRS(x, y) _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xDD))
    __m256 ab = KV_PAIRS((__m256)a, (__m256)b), cd = KV_PAIRS((__m256)c, (__m256)d);
    __m256 all = KV_PAIRS(ab, cd);
#undef KV_PAIRS
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    _mm_storeu_ps(at, _mm_mul_ps(sums, _mm_set1_ps(scale)));
#else
    at[0] = scale * kv_hsum(a), at[1] = scale * kv_hsum(b);
    at[2] = scale * kv_hsum(c), at[3] = scale * kv_hsum(d);
#endif
}

/* The largest lane; x has no NaN. */
KV_INLINE float kv_hmax(kv_vf x) {
#if KV_AVX2
    __m128 top = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    top = _mm_max_ps(top, _mm_movehl_ps(top, top));
    return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
#else
    float top = x[0];
    for (int i = 1; i < KV_LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
#endif
}

KV_INLINE kv_vf kv_load_half(const uint16_t *at) {
#if KV_AVX2
    return (kv_vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
#else
    kv_vf x;
    for (int i = 0; i < KV_LANES; i++) x[i] = kv_from_half(at[i]);
    return x;
#endif
}

KV_INLINE kv_vf kv_load_int8(const int8_t *at) {
#if KV_AVX2
    return (kv_vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
#else
    kv_vf x;
    for (int i = 0; i < KV_LANES; i++) x[i] = at[i];
    return x;
#endif
}

/* int8 as int16, and int16 as they are: two in each lane of a kv_vi. */
KV_INLINE kv_vi kv_widen_int8(const int8_t *at) {
#if KV_AVX2
    return (kv_vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
#else
    int16_t x[2 * KV_LANES];
    kv_vi pairs;
    for (int i = 0; i < 2 * KV_LANES; i++) x[i] = at[i];
    memcpy(&pairs, x, sizeof pairs);
    return pairs;
#endif
}
KV_INLINE kv_vi kv_load_int16(const int16_t *at) { kv_vi x; memcpy(&x, at, sizeof x); return x; }

/* Products of int16, added in pairs. */
KV_INLINE kv_vi kv_dot_int16(kv_vi a, kv_vi b) {
#if KV_AVX2
    return (kv_vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    /* int16 lanes are taken out of their pair by shifts; little endian or big, pairs match. */
    return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}
KV_INLINE kv_vi kv_add_int(kv_vi a, kv_vi b) { return a + b; }
KV_INLINE kv_vf kv_from_int(kv_vi x) { return __builtin_convertvector(x, kv_vf); }

/* Rounds to nearest, into int16; x lies in [-32767, 32767], or what comes out has no meaning. */
KV_INLINE void kv_store_int16(int16_t *at, kv_vf x) {
#if KV_AVX2
    __m256i whole = _mm256_cvtps_epi32((__m256)x);
    _mm_storeu_si128((__m128i *)at, _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                                    _mm256_extracti128_si256(whole, 1)));
#else
    for (int i = 0; i < KV_LANES; i++) at[i] = x[i] * x[i] < 1.1e9f ? (int16_t)__builtin_rintf(x[i]) : 0;
#endif
}

#endif /* KV_NEON */

KV_INLINE kv_vf kv_zero(void) { return kv_splat(0); }

/* The first `lanes` floats with zeros behind; what lies further is neither read nor written. */
KV_INLINE kv_vf kv_load_head(const float *at, int32_t lanes) {
    kv_vf x = kv_zero();
    memcpy(&x, at, (size_t)lanes * sizeof(float));
    return x;
}
KV_INLINE void kv_store_head(float *at, kv_vf x, int32_t lanes) {
    memcpy(at, &x, (size_t)lanes * sizeof(float));
}

/* exp(x) for x <= 0, within 1 ulp; exactly 0 below -87.3 (no subnormal comes out), NaN for NaN.
   x = n ln 2 + r with |r| <= ln 2 / 2, and 1 + r + r^2 g(r) with g of degree 4, whose largest relative
   error there is the least that its degree allows: 3e-9. */
KV_INLINE kv_vf kv_exp(kv_vf x) {
    const kv_vf bias = kv_splat(12582912.0f); /* 1.5 * 2^23 */
    kv_vf shifted = kv_fma(x, kv_splat(1.44269504f), bias), n = kv_sub(shifted, bias);
    kv_vf r = kv_fma(n, kv_splat(-0.693145752f), x);
    r = kv_fma(n, kv_splat(-1.42860677e-6f), r);
    kv_vf p = kv_splat(0.00138145401f);
    p = kv_fma(p, r, kv_splat(0.0083687452f));
    p = kv_fma(p, r, kv_splat(0.0416683908f));
    p = kv_fma(p, r, kv_splat(0.166665204f));
    p = kv_fma(p, r, kv_splat(0.499999934f));
    p = kv_fma(p, r, kv_splat(1.0f));
    p = kv_fma(p, r, kv_splat(1.0f));
    /* `shifted`, which is at most `bias`, holds n in its low bits. Those of a NaN could make a number of
       p's: `bias` has none. */
    return kv_zero_below(kv_add_exponent(p, kv_min(shifted, bias)), x, -87.3f);
}

KV_INLINE void kv_prefetch(const void *at) { __builtin_prefetch(at, 0, 3); }
KV_INLINE int32_t kv_lowest_bit(uint64_t x) { return __builtin_ctzll(x); }
KV_INLINE int32_t kv_highest_bit(uint64_t x) { return 63 - __builtin_clzll(x); }

#endif
