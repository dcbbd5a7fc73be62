/* XXH3-64 with seed 0, for inputs longer than KV_XXH3_SHORT bytes: the check of a page on its way from the
   disk. Written from the published specification of XXH3; tests compare it with the `xxhash` package.

   Eight 64-bit lanes take a stripe of 64 bytes at a time. 16 stripes are a block, after which the lanes are
   scrambled; the last stripe ends at the last byte and may overlap the one before. The bytes are read as
   little-endian words, so this is for little-endian machines. */
#ifndef KV_XXH3_H
#define KV_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"

#define KV_XXH3_SHORT 240

enum { KV_XXH3_STRIPE = 64, KV_XXH3_BLOCK_STRIPES = 16, KV_XXH3_BLOCK = 1024 };

/* The specification's default secret, as 24 words. */
static const uint64_t kv_xxh3_secret[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

#define KV_P32_1 0x9E3779B1u
#define KV_P32_2 0x85EBCA77u
#define KV_P32_3 0xC2B2AE3Du
#define KV_P64_1 0x9E3779B185EBCA87u
#define KV_P64_2 0xC2B2AE3D27D4EB4Fu
#define KV_P64_3 0x165667B19E3779F9u
#define KV_P64_4 0x85EBCA77C2B2AE63u
#define KV_P64_5 0x27D4EB2F165667C5u

#if KV_AVX2
#define KV_XXH3_LANES 4
#else
#define KV_XXH3_LANES 2
#endif
#define KV_XXH3_VECTORS (8 / KV_XXH3_LANES)

typedef uint64_t kv_words __attribute__((vector_size(8 * KV_XXH3_LANES)));

KV_INLINE kv_words kv_words_at(const void *at) { kv_words x; memcpy(&x, at, sizeof x); return x; }

/* The lower half of each word times its upper half. */
KV_INLINE kv_words kv_fold(kv_words x) {
#if KV_AVX2
    return (kv_words)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
#elif KV_NEON
    uint64x2_t w = (uint64x2_t)x;
    return (kv_words)vmull_u32(vmovn_u64(w), vshrn_n_u64(w, 32));
#else
    return (x & 0xFFFFFFFFu) * (x >> 32);
#endif
}

/* Each word changes place with its neighbour. */
KV_INLINE kv_words kv_swap(kv_words x) {
#if KV_AVX2
    return (kv_words)_mm256_shuffle_epi32((__m256i)x, 0x4E);
#else
    return (kv_words){x[1], x[0]};
#endif
}

/* Words to a place that nobody reads soon: past the caches where the machine can. `at` is aligned to them. */
KV_INLINE void kv_stream(void *at, kv_words words) {
#if KV_AVX2
    _mm256_stream_si256((__m256i *)at, (__m256i)words);
#else
    memcpy(at, &words, sizeof words);
#endif
}

/* To be called before another thread may look at what was streamed. */
static void kv_streamed(void) {
#if KV_AVX2
    _mm_sfence();
#endif
}

/* Takes a stripe, streams it to `into` unless that is null, and gives where the next one goes. */
KV_INLINE uint8_t *kv_xxh3_stripe(kv_words lanes[KV_XXH3_VECTORS], const uint8_t *data, const uint8_t *secret,
                                  uint8_t *into) {
    for (int v = 0; v < KV_XXH3_VECTORS; v++) {
        kv_words words = kv_words_at(data + v * sizeof(kv_words));
        if (into) kv_stream(into + v * sizeof(kv_words), words);
        lanes[v] += kv_swap(words) + kv_fold(words ^ kv_words_at(secret + v * sizeof(kv_words)));
    }
    return into ? into + KV_XXH3_STRIPE : 0;
}

KV_INLINE uint64_t kv_word_at(const uint8_t *at) { uint64_t x; memcpy(&x, at, 8); return x; }

KV_INLINE uint64_t kv_xxh3_passing(const uint8_t *data, size_t n, uint8_t *into) {
    const uint8_t *secret = (const uint8_t *)kv_xxh3_secret;
    uint64_t flat[8] = {KV_P32_3, KV_P64_1, KV_P64_2, KV_P64_3, KV_P64_4, KV_P32_2, KV_P64_5, KV_P32_1};
    kv_words lanes[KV_XXH3_VECTORS];
    memcpy(lanes, flat, sizeof flat);

    const uint8_t *last = data + n - KV_XXH3_STRIPE;
    size_t blocks = (n - 1) / KV_XXH3_BLOCK, stripes = (n - 1) % KV_XXH3_BLOCK / KV_XXH3_STRIPE;
    for (size_t b = 0; b < blocks; b++, data += KV_XXH3_BLOCK) {
        for (int s = 0; s < KV_XXH3_BLOCK_STRIPES; s++)
            into = kv_xxh3_stripe(lanes, data + s * KV_XXH3_STRIPE, secret + 8 * s, into);
        for (int v = 0; v < KV_XXH3_VECTORS; v++) {
            kv_words x = lanes[v] ^ (lanes[v] >> 47) ^ kv_words_at(secret + 128 + v * sizeof(kv_words));
            lanes[v] = x * KV_P32_1;
        }
    }
    for (size_t s = 0; s < stripes; s++)
        into = kv_xxh3_stripe(lanes, data + s * KV_XXH3_STRIPE, secret + 8 * s, into);
    if (into) memcpy(into, data + stripes * KV_XXH3_STRIPE, (n - 1) % KV_XXH3_STRIPE + 1);
    kv_xxh3_stripe(lanes, last, secret + 121, 0);

    memcpy(flat, lanes, sizeof flat);
    uint64_t sum = n * KV_P64_1;
    for (int i = 0; i < 8; i += 2) {
        const uint8_t *at = secret + 11 + 8 * i;
        unsigned __int128 product =
            (unsigned __int128)(flat[i] ^ kv_word_at(at)) * (flat[i + 1] ^ kv_word_at(at + 8));
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9u;
    return sum ^ sum >> 32;
}

static uint64_t kv_xxh3(const uint8_t *data, size_t n) { return kv_xxh3_passing(data, n, 0); }

/* The same, and the bytes are streamed to `into` as they pass; `kv_streamed` is to follow. */
static uint64_t kv_xxh3_copy(const uint8_t *data, size_t n, uint8_t *into) {
    if ((uintptr_t)into % sizeof(kv_words) == 0) return kv_xxh3_passing(data, n, into);
    memcpy(into, data, n);
    return kv_xxh3(data, n);
}

#endif
