/* Quantised weights of GGUF files, 32 at a time: what every kind of block says in one form.
 *
 * Weight i of a unit is (scale * scales[h]) * codes[i] + offset * offsets[h], where h is i / 16. All kinds that a
 * file may have are linear in that way, so nothing is rounded. Layouts are those of ggml's quantisations
 * (llama.cpp, ggml-quants.c).
 */
#ifndef KVTRIAL_UNITS_H
#define KVTRIAL_UNITS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_BLOCK 32      /* weights of a unit */
#define KV_SUPER_UNITS 8 /* units of a super-block of the K kinds */

typedef struct {
    uint16_t scale, offset; /* fp16 */
    int8_t scales[2], offsets[2];
    int8_t codes[KV_BLOCK];
} kv_unit;

/* Unit u of a row of blocks. */
typedef void (*kv_read_fn)(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit);

static inline uint16_t kv_half_bits(const uint8_t *at)
{
    uint16_t bits;
    memcpy(&bits, at, 2);
    return bits;
}

/* -2^power times a half; infinity where that is none. A NaN is none that gets here. */
static inline uint16_t kv_half_minus_shifted(uint16_t bits, int power)
{
    _Float16 value;
    memcpy(&value, &bits, 2);
    value = (_Float16)((float)value * -(float)(1 << power));
    memcpy(&bits, &value, 2);
    return bits;
}

static inline void kv_whole(kv_unit *unit, uint16_t scale, uint16_t offset)
{
    unit->scale = scale, unit->offset = offset;
    unit->scales[0] = unit->scales[1] = unit->offsets[0] = unit->offsets[1] = 1;
}

/* Sixteen bytes at a time, of any alignment, in every instruction set. */
typedef uint8_t kv_sixteen __attribute__((vector_size(16)));

static inline kv_sixteen kv_load_sixteen(const void *at)
{
    kv_sixteen v;
    memcpy(&v, at, 16);
    return v;
}
static inline void kv_store_sixteen(void *at, kv_sixteen v) { memcpy(at, &v, 16); }

/* Bits from `shift` on of 16 bytes, as many as `mask` has: what a word's shift brings in from a neighbour is masked. */
static inline kv_sixteen kv_field(const uint8_t *at, int shift, uint32_t mask)
{
    typedef uint32_t words __attribute__((vector_size(16)));
    words v;
    memcpy(&v, at, 16);
    return (kv_sixteen)(v >> (uint32_t)shift & mask * 0x01010101u);
}

/* Low nibbles of 16 bytes, then their high ones. */
static inline void kv_nibbles(const uint8_t *at, int8_t *codes)
{
    kv_sixteen both = kv_load_sixteen(at);
    kv_store_sixteen(codes, both & 15);
    kv_store_sixteen(codes + 16, both >> 4);
}

/* Bit i of four bytes to code i, eight codes at a time: each byte keeps its own bit, which is carried to its top. */
static inline void kv_fifth_bits(const uint8_t *at, int8_t *codes)
{
    for (int i = 0; i < 4; i++) {
        uint64_t eight, bits = at[i] * 0x0101010101010101u & 0x8040201008040201u;
        bits = (bits + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
        memcpy(&eight, codes + 8 * i, 8);
        eight |= bits << 4;
        memcpy(codes + 8 * i, &eight, 8);
    }
}

static const int8_t kv_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static inline void kv_look_up(int8_t *codes)
{
    for (int i = 0; i < KV_BLOCK; i++)
        codes[i] = kv_iq4[codes[i]];
}

/* ---- blocks of 32 */

static void kv_read_q4_0(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 18 * u;
    kv_whole(unit, kv_half_bits(block), kv_half_minus_shifted(kv_half_bits(block), 3));
    kv_nibbles(block + 2, unit->codes);
}

static void kv_read_q4_1(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 20 * u;
    kv_whole(unit, kv_half_bits(block), kv_half_bits(block + 2));
    kv_nibbles(block + 4, unit->codes);
}

static void kv_read_q5_0(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 22 * u;
    kv_whole(unit, kv_half_bits(block), 0);
    kv_nibbles(block + 6, unit->codes);
    kv_fifth_bits(block + 2, unit->codes);
    for (int i = 0; i < KV_BLOCK; i++)
        unit->codes[i] -= 16;
}

static void kv_read_q5_1(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 24 * u;
    kv_whole(unit, kv_half_bits(block), kv_half_bits(block + 2));
    kv_nibbles(block + 8, unit->codes);
    kv_fifth_bits(block + 4, unit->codes);
}

static void kv_read_q8_0(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 34 * u;
    kv_whole(unit, kv_half_bits(block), 0);
    memcpy(unit->codes, block + 2, KV_BLOCK);
}

static void kv_read_iq4_nl(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 18 * u;
    kv_whole(unit, kv_half_bits(block), 0);
    kv_nibbles(block + 2, unit->codes);
    kv_look_up(unit->codes);
}

/* ---- super-blocks of 256: u is a unit of the row, j one of its super-block */

static void kv_read_q2_k(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 84 * (u / KV_SUPER_UNITS);
    int j = u % KV_SUPER_UNITS;
    unit->scale = kv_half_bits(block + 80);
    unit->offset = kv_half_minus_shifted(kv_half_bits(block + 82), 0);
    for (int h = 0; h < 2; h++) {
        unit->scales[h] = block[2 * j + h] & 15;
        unit->offsets[h] = block[2 * j + h] >> 4;
    }
    for (int i = 0; i < KV_BLOCK; i += 16)
        kv_store_sixteen(unit->codes + i, kv_field(block + 16 + 32 * (j / 4) + i, 2 * (j % 4), 3));
}

/* (q - 4) d is q d + offset, as in Q4_0. */
static void kv_read_q3_k(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 110 * (u / KV_SUPER_UNITS), *s = block + 96;
    int j = u % KV_SUPER_UNITS;
    unit->scale = kv_half_bits(block + 108);
    unit->offset = kv_half_minus_shifted(unit->scale, 2);
    for (int h = 0; h < 2; h++) {
        int k = 2 * j + h, low = k < 8 ? s[k] & 15 : s[k - 8] >> 4, high = s[8 + k % 4] >> 2 * (k / 4) & 3;
        unit->scales[h] = unit->offsets[h] = (int8_t)((low | high << 4) - 32);
    }
    for (int i = 0; i < KV_BLOCK; i += 16)
        kv_store_sixteen(
            unit->codes + i, kv_field(block + 32 + 32 * (j / 4) + i, 2 * (j % 4), 3) | kv_field(block + i, j, 1) << 2);
}

/* Scale and minimum, six bits each, of unit j in 12 bytes. */
static inline void kv_six_bits(const uint8_t *s, int j, kv_unit *unit)
{
    int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
    int low = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    unit->scales[0] = unit->scales[1] = (int8_t)scale;
    unit->offsets[0] = unit->offsets[1] = (int8_t)low;
}

static void kv_read_q4_k(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 144 * (u / KV_SUPER_UNITS);
    int j = u % KV_SUPER_UNITS;
    unit->scale = kv_half_bits(block);
    unit->offset = kv_half_minus_shifted(kv_half_bits(block + 2), 0);
    kv_six_bits(block + 4, j, unit);
    for (int i = 0; i < KV_BLOCK; i += 16)
        kv_store_sixteen(unit->codes + i, kv_field(block + 16 + 32 * (j / 2) + i, 4 * (j % 2), 15));
}

static void kv_read_q5_k(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 176 * (u / KV_SUPER_UNITS);
    int j = u % KV_SUPER_UNITS;
    unit->scale = kv_half_bits(block);
    unit->offset = kv_half_minus_shifted(kv_half_bits(block + 2), 0);
    kv_six_bits(block + 4, j, unit);
    for (int i = 0; i < KV_BLOCK; i += 16)
        kv_store_sixteen(
            unit->codes + i,
            kv_field(block + 48 + 32 * (j / 2) + i, 4 * (j % 2), 15) | kv_field(block + 16 + i, j, 1) << 4);
}

/* (q - 32) d is q d + offset. */
static void kv_read_q6_k(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 210 * (u / KV_SUPER_UNITS);
    int j = u % KV_SUPER_UNITS, quarter = j % 4;
    const uint8_t *low = block + 64 * (j / 4) + 32 * (quarter % 2), *high = block + 128 + 32 * (j / 4);
    unit->scale = kv_half_bits(block + 208);
    unit->offset = kv_half_minus_shifted(unit->scale, 5);
    memcpy(unit->scales, block + 192 + 2 * j, 2);
    memcpy(unit->offsets, unit->scales, 2);
    for (int i = 0; i < KV_BLOCK; i += 16)
        kv_store_sixteen(
            unit->codes + i, kv_field(low + i, 4 * (quarter / 2), 15) | kv_field(high + i, 2 * quarter, 3) << 4);
}

static void kv_read_iq4_xs(const uint8_t *restrict row, ptrdiff_t u, kv_unit *restrict unit)
{
    const uint8_t *block = row + 136 * (u / KV_SUPER_UNITS);
    int j = u % KV_SUPER_UNITS;
    int low = block[4 + j / 2] >> 4 * (j % 2) & 15, high = kv_half_bits(block + 2) >> 2 * j & 3;
    kv_whole(unit, kv_half_bits(block), 0);
    unit->scales[0] = unit->scales[1] = (int8_t)((low | high << 4) - 32);
    kv_nibbles(block + 8 + 16 * j, unit->codes);
    kv_look_up(unit->codes);
}

#endif
