/* The fixed work of the probes. Plain C with vector types: the compiler's vector width is the
 * machine's, and without -ffast-math it would leave a float loop scalar. */
#ifndef KVTRIAL_PROBE_LOOPS_H
#define KVTRIAL_PROBE_LOOPS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define PROBE_LANES 16
#elif defined(__AVX__)
#define PROBE_LANES 8
#else
#define PROBE_LANES 4
#endif

typedef float probe_float __attribute__((vector_size(PROBE_LANES * 4)));
typedef uint64_t probe_word __attribute__((vector_size(PROBE_LANES * 4), aligned(8), may_alias));

/* A chain in which every multiplication waits for the one before: clock frequency and nothing else. */
static inline uint64_t probe_spin(uint64_t seed, size_t links)
{
    uint64_t x = seed;
    for (size_t i = 0; i < links; i++)
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return x;
}

/* Sum of n 64-bit words (n a multiple of 64), read once in ascending order. */
static inline uint64_t probe_read(const uint64_t *data, size_t n)
{
    const size_t lanes = PROBE_LANES / 2;
    probe_word s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    for (size_t i = 0; i < n; i += 4 * lanes) {
        const probe_word *p = (const probe_word *)(data + i);
        __builtin_prefetch(data + i + 256);
        s0 += p[0];
        s1 += p[1];
        s2 += p[2];
        s3 += p[3];
    }
    s0 += s1 + s2 + s3;
    uint64_t sum = 0;
    for (size_t lane = 0; lane < lanes; lane++)
        sum += s0[lane];
    return sum;
}

/* Floating-point operations of one round of probe_fma: ten chains hide the latency of one. */
#define PROBE_FMA_FLOPS (10 * PROBE_LANES * 2)

/* Each chain starts elsewhere: of equal ones the compiler would compute a single one. */
static inline float probe_fma(float factor, float addend, size_t rounds)
{
    const probe_float f = (probe_float){0} + factor, b = (probe_float){0} + addend;
    probe_float a0 = b, a1 = a0 + b, a2 = a1 + b, a3 = a2 + b, a4 = a3 + b;
    probe_float a5 = a4 + b, a6 = a5 + b, a7 = a6 + b, a8 = a7 + b, a9 = a8 + b;
    for (size_t i = 0; i < rounds; i++) {
        a0 = a0 * f + b; a1 = a1 * f + b; a2 = a2 * f + b; a3 = a3 * f + b; a4 = a4 * f + b;
        a5 = a5 * f + b; a6 = a6 * f + b; a7 = a7 * f + b; a8 = a8 * f + b; a9 = a9 * f + b;
    }
    a0 += a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9;
    return a0[0];
}

#endif
