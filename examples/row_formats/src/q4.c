/* 4-bit rows: blocks of 32 elements, a float32 step and 32 nibbles in whole steps, -7 to 7, stored with 8
   added. Element i of a block shares its byte with element i + 16. */
#include "attend.h"

#define BLOCK 32
#define BLOCK_BYTES 20

static int64_t row_bytes(const kv_rows *format, int64_t head_dim)
{
    return (head_dim + BLOCK - 1) / BLOCK * BLOCK_BYTES;
}

static int64_t first_unfit(const kv_rows *format, const float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(values[i]))
            return i;
    return -1;
}

static void write_row(unsigned char *at, const float *row, int64_t head_dim)
{
    for (int64_t first = 0; first < head_dim; first += BLOCK, at += BLOCK_BYTES) {
        int64_t n = head_dim - first < BLOCK ? head_dim - first : BLOCK;
        unsigned char nibbles[BLOCK];
        float most = 0;
        for (int64_t i = 0; i < n; i++)
            most = fmaxf(most, fabsf(row[first + i]));
        float size = most / 7;
        memcpy(at, &size, 4);
        for (int64_t i = 0; i < BLOCK; i++) {
            float steps = i < n && size > 0 ? rintf(row[first + i] / size) : 0;
            nibbles[i] = (unsigned char)(8 + fminf(fmaxf(steps, -7), 7));
        }
        for (int64_t i = 0; i < BLOCK / 2; i++)
            at[4 + i] = (unsigned char)(nibbles[i] | nibbles[i + BLOCK / 2] << 4);
    }
}

static inline void read_row(float *row, const unsigned char *at, int64_t head_dim)
{
    for (int64_t first = 0; first < head_dim; first += BLOCK, at += BLOCK_BYTES) {
        int64_t n = head_dim - first < BLOCK ? head_dim - first : BLOCK;
        float values[BLOCK], size;
        memcpy(&size, at, 4);
        for (int64_t i = 0; i < BLOCK / 2; i++) {
            values[i] = size * (float)((at[4 + i] & 15) - 8);
            values[i + BLOCK / 2] = size * (float)((at[4 + i] >> 4) - 8);
        }
        memcpy(row + first, values, n * sizeof(float));
    }
}

ROWS_OF(q4, row_bytes, first_unfit, write_row, read_row)
