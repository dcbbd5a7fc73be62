/* Vector shims for the weight kernels; the loops over them are in panels.h and the .pyx.
 *
 * Eight float lanes (q_f32x8), 32 bytes (q_i8x32). AVX2 + FMA + F16C or NEON (quants_neon.h) where the
 * compiler targets them, else GCC/clang vector types. Loads and stores are unaligned everywhere.
 */
#ifndef KVTRIAL_QUANTS_H
#define KVTRIAL_QUANTS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

typedef __m256 q_f32x8;
typedef __m256i q_i8x32;

static inline q_f32x8 q_set(float a) { return _mm256_set1_ps(a); }
static inline q_f32x8 q_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void q_store(float *p, q_f32x8 a) { _mm256_storeu_ps(p, a); }
static inline q_f32x8 q_add(q_f32x8 a, q_f32x8 b) { return _mm256_add_ps(a, b); }
static inline q_f32x8 q_mul(q_f32x8 a, q_f32x8 b) { return _mm256_mul_ps(a, b); }
static inline q_f32x8 q_div(q_f32x8 a, q_f32x8 b) { return _mm256_div_ps(a, b); }
static inline q_f32x8 q_fma(q_f32x8 a, q_f32x8 b, q_f32x8 c) { return _mm256_fmadd_ps(a, b, c); }

static inline float q_sum(q_f32x8 a)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* Of a NaN and a number, either. */
static inline q_f32x8 q_max(q_f32x8 a, q_f32x8 b) { return _mm256_max_ps(a, b); }
static inline float q_max_lane(q_f32x8 a)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* Eight fp16 to float; one fp16 to float. */
static inline q_f32x8 q_load_f16(const void *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline float q_half(const void *p)
{
    uint16_t bits;
    memcpy(&bits, p, 2);
    return _cvtsh_ss(bits);
}

static inline q_i8x32 q_load_i8(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

static inline void q_store_i8(void *p, q_i8x32 a) { _mm256_storeu_si256((__m256i *)p, a); }
static inline q_i8x32 q_low_nibbles(q_i8x32 a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
static inline q_i8x32 q_high_nibbles(q_i8x32 a) { return q_low_nibbles(_mm256_srli_epi16(a, 4)); }
static inline q_i8x32 q_flip_signs(q_i8x32 a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }
static inline q_i8x32 q_or(q_i8x32 a, q_i8x32 b) { return _mm256_or_si256(a, b); }
/* Bits 2 k and 2 k + 1 of each byte, as its bits 4 and 5. */
static inline q_i8x32 q_two_bits(q_i8x32 a, int k)
{
    __m256i moved = k < 2 ? _mm256_slli_epi16(a, 4 - 2 * k) : _mm256_srli_epi16(a, 2 * k - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8(48));
}
/* Eight int8 to float. */
static inline q_f32x8 q_load_small(const void *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

/* Eight sums of products, each of four bytes of w with the four of x, -127..127. Eight times four products of w in
 * 0..15, 30480 a half, stay inside int16; of w in 0..63 twice four, 32004. */
typedef __m256i q_sums;
static inline q_i8x32 q_load_four(const void *p)
{
    int32_t four;
    memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
static inline q_sums q_no_sums(void) { return _mm256_setzero_si256(); }
static inline q_sums q_add_sums(q_sums sums, q_i8x32 w, q_i8x32 x)
{
    __m256i products = _mm256_maddubs_epi16(w, x);
    /* _mm256_add_epi16, but into the same register: GCC 12 takes another one and copies it back, which
       takes 1.1 times as long. */
    __asm__("vpaddw %1, %0, %0" : "+x"(sums) : "x"(products));
    return sums;
}
static inline q_f32x8 q_sums_float(q_sums a)
{
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(a, _mm256_set1_epi16(1)));
}
/* 16 * high + low. */
static inline q_f32x8 q_sums_join(q_sums high, q_sums low)
{
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(16)),
                                               _mm256_madd_epi16(low, _mm256_set1_epi16(1))));
}

/* The sum of two. */
static inline q_f32x8 q_sums_both(q_sums a, q_sums b)
{
    __m256i ones = _mm256_set1_epi16(1);
    return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)));
}

/* The same for w in -128..127, as |w| * (x * sign w); 2 * 128 * 127 stays inside int16. */
typedef __m256i q_wide_sums;
static inline q_wide_sums q_no_wide_sums(void) { return _mm256_setzero_si256(); }
static inline q_wide_sums q_add_wide_sums(q_wide_sums sums, q_i8x32 w, q_i8x32 x)
{
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline q_f32x8 q_wide_sums_float(q_wide_sums a) { return _mm256_cvtepi32_ps(a); }

/* 16 int8 as int16; eight sums of products, each of two int16 of w with the two of x. */
static inline q_i8x32 q_widen_i8(const void *p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)); }
static inline q_sums q_add_pairs(q_sums sums, q_i8x32 w, q_i8x32 x)
{
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpwssd_epi32(sums, w, x);
#elif defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sums, w, x);
#else
    /* _mm256_add_epi32, but one after the other: as sums of sums they need more registers than there are. */
    __m256i products = _mm256_madd_epi16(w, x);
    __asm__("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));
    return sums;
#endif
}
static inline q_f32x8 q_pairs_float(q_sums a) { return _mm256_cvtepi32_ps(a); }

/* Byte i of each four, signed, to float. */
static inline q_f32x8 q_quarter(q_i8x32 a, int i)
{
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * i), 24));
}

/* Nearest integers (ties to even) of 8 values already inside int8, stored as bytes; their sum. */
static inline int q_round_i8x8(q_f32x8 a, int8_t *out)
{
    __m256i wide = _mm256_cvtps_epi32(a);
    __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i *)out, _mm_packs_epi16(half, half));
    __m128i s = _mm_madd_epi16(half, _mm_set1_epi16(1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

/* The same of two vectors as 16 int16, and of four as 32 int8. */
static inline q_i8x32 q_round_i16x16(q_f32x8 a, q_f32x8 b)
{
    /* Packing works in each half for itself: fours of a and b, and the next ones. */
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)), 0xd8);
}
static inline q_i8x32 q_round_i8x32(q_f32x8 a, q_f32x8 b, q_f32x8 c, q_f32x8 d)
{
    __m256i ab = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
    __m256i cd = _mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

static inline q_f32x8 q_clamp(q_f32x8 a, float low, float high)
{
    /* The bound comes first: min and max give their second operand, the value, when it is NaN. */
    return _mm256_min_ps(_mm256_set1_ps(high), _mm256_max_ps(_mm256_set1_ps(low), a));
}
static inline q_f32x8 q_round(q_f32x8 a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* 2^a for whole a in -126..127. */
static inline q_f32x8 q_power_of_two(q_f32x8 a)
{
    __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}

#elif defined(__aarch64__)

#include "quants_neon.h"

#else

typedef float q_f32x8 __attribute__((vector_size(32)));
typedef int32_t q_i32x8 __attribute__((vector_size(32)));
typedef int8_t q_i8x32 __attribute__((vector_size(32)));

static inline q_f32x8 q_set(float a) { return (q_f32x8){a, a, a, a, a, a, a, a}; }
static inline q_f32x8 q_load(const float *p) { q_f32x8 a; memcpy(&a, p, 32); return a; }
static inline void q_store(float *p, q_f32x8 a) { memcpy(p, &a, 32); }
static inline q_f32x8 q_add(q_f32x8 a, q_f32x8 b) { return a + b; }
static inline q_f32x8 q_mul(q_f32x8 a, q_f32x8 b) { return a * b; }
static inline q_f32x8 q_div(q_f32x8 a, q_f32x8 b) { return a / b; }
static inline q_f32x8 q_fma(q_f32x8 a, q_f32x8 b, q_f32x8 c) { return a * b + c; }
static inline float q_sum(q_f32x8 a)
{
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}
static inline q_f32x8 q_max(q_f32x8 a, q_f32x8 b)
{
    for (int i = 0; i < 8; i++)
        a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
static inline float q_max_lane(q_f32x8 a)
{
    float s = a[0];
    for (int i = 1; i < 8; i++)
        s = a[i] > s ? a[i] : s;
    return s;
}

static inline float q_half(const void *p) { _Float16 h; memcpy(&h, p, 2); return (float)h; }
static inline q_f32x8 q_load_f16(const void *p)
{
    q_f32x8 a;
    for (int i = 0; i < 8; i++)
        a[i] = q_half((const char *)p + 2 * i);
    return a;
}

static inline q_i8x32 q_load_i8(const void *p) { q_i8x32 a; memcpy(&a, p, 32); return a; }
static inline void q_store_i8(void *p, q_i8x32 a) { memcpy(p, &a, 32); }
static inline q_i8x32 q_low_nibbles(q_i8x32 a) { return a & 15; }
static inline q_i8x32 q_high_nibbles(q_i8x32 a) { return a >> 4 & 15; }
static inline q_i8x32 q_flip_signs(q_i8x32 a) { return a ^ -128; }
static inline q_i8x32 q_or(q_i8x32 a, q_i8x32 b) { return a | b; }
static inline q_i8x32 q_two_bits(q_i8x32 a, int k) { return (a >> 2 * k & 3) << 4; }
static inline q_f32x8 q_load_small(const void *p)
{
    q_f32x8 a;
    for (int i = 0; i < 8; i++)
        a[i] = ((const int8_t *)p)[i];
    return a;
}
/* Byte i of each four, signed, to float. */
static inline q_f32x8 q_quarter(q_i8x32 a, int i)
{
    q_f32x8 floats;
    for (int lane = 0; lane < 8; lane++)
        floats[lane] = (float)a[4 * lane + i];
    return floats;
}

typedef q_i32x8 q_sums;
static inline q_i8x32 q_load_four(const void *p)
{
    int8_t bytes[32];
    for (int i = 0; i < 32; i += 4)
        memcpy(bytes + i, p, 4);
    return q_load_i8(bytes);
}
static inline q_sums q_no_sums(void) { return (q_sums){0}; }
static inline q_sums q_add_sums(q_sums sums, q_i8x32 w, q_i8x32 x)
{
    for (int i = 0; i < 32; i++)
        sums[i / 4] += (int)w[i] * (int)x[i];
    return sums;
}
static inline q_f32x8 q_sums_float(q_sums a) { return __builtin_convertvector(a, q_f32x8); }
static inline q_f32x8 q_sums_join(q_sums high, q_sums low) { return q_sums_float(16 * high + low); }
static inline q_f32x8 q_sums_both(q_sums a, q_sums b) { return q_sums_float(a + b); }

static inline q_i8x32 q_widen_i8(const void *p)
{
    const int8_t *bytes = p;
    int16_t wide[16];
    for (int i = 0; i < 16; i++)
        wide[i] = bytes[i];
    return q_load_i8(wide);
}
static inline q_sums q_add_pairs(q_sums sums, q_i8x32 w, q_i8x32 x)
{
    int16_t left[16], right[16];
    memcpy(left, &w, 32);
    memcpy(right, &x, 32);
    for (int i = 0; i < 16; i++)
        sums[i / 2] += left[i] * right[i];
    return sums;
}
static inline q_f32x8 q_pairs_float(q_sums a) { return q_sums_float(a); }

typedef q_i32x8 q_wide_sums;
static inline q_wide_sums q_no_wide_sums(void) { return q_no_sums(); }
static inline q_wide_sums q_add_wide_sums(q_wide_sums sums, q_i8x32 w, q_i8x32 x) { return q_add_sums(sums, w, x); }
static inline q_f32x8 q_wide_sums_float(q_wide_sums a) { return q_sums_float(a); }

static inline int q_round_i8x8(q_f32x8 a, int8_t *out)
{
    int s = 0;
    for (int i = 0; i < 8; i++) {
        out[i] = (int8_t)rintf(a[i]);
        s += out[i];
    }
    return s;
}

static inline q_f32x8 q_clamp(q_f32x8 a, float low, float high)
{
    for (int i = 0; i < 8; i++)
        a[i] = a[i] < low ? low : a[i] > high ? high : a[i];
    return a;
}
static inline q_f32x8 q_round(q_f32x8 a)
{
    for (int i = 0; i < 8; i++)
        a[i] = rintf(a[i]);
    return a;
}
static inline q_f32x8 q_power_of_two(q_f32x8 a)
{
    for (int i = 0; i < 8; i++)
        a[i] = ldexpf(1.0f, (int)a[i]);
    return a;
}

#endif

#if !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
static inline q_i8x32 q_round_i16x16(q_f32x8 a, q_f32x8 b)
{
    float x[16];
    int16_t whole[16];
    q_store(x, a), q_store(x + 8, b);
    for (int i = 0; i < 16; i++)
        whole[i] = (int16_t)rintf(x[i]);
    return q_load_i8(whole);
}
static inline q_i8x32 q_round_i8x32(q_f32x8 a, q_f32x8 b, q_f32x8 c, q_f32x8 d)
{
    int8_t whole[32];
    q_round_i8x8(a, whole), q_round_i8x8(b, whole + 8), q_round_i8x8(c, whole + 16), q_round_i8x8(d, whole + 24);
    return q_load_i8(whole);
}
#endif

/* exp(a) within 2 ulp for a in -87..88, clamped to that range outside; NaN stays NaN. The argument
 * is reduced by a two-part ln 2, the rest is the Taylor polynomial of degree 7 on |r| <= ln(2)/2. */
static inline q_f32x8 q_exp(q_f32x8 a)
{
    a = q_clamp(a, -87.0f, 88.0f);
    q_f32x8 k = q_round(q_mul(a, q_set(1.44269504f)));
    q_f32x8 r = q_fma(k, q_set(-0.693359375f), a);
    r = q_fma(k, q_set(2.12194440e-4f), r);
    q_f32x8 p = q_set(1.0f / 5040);
    p = q_fma(p, r, q_set(1.0f / 720));
    p = q_fma(p, r, q_set(1.0f / 120));
    p = q_fma(p, r, q_set(1.0f / 24));
    p = q_fma(p, r, q_set(1.0f / 6));
    p = q_fma(p, r, q_set(0.5f));
    p = q_fma(p, r, q_set(1.0f));
    p = q_fma(p, r, q_set(1.0f));
    return q_mul(p, q_power_of_two(k));
}

#endif
