/* bf16 rows: the upper half of each float32, rounded to nearest even. */
#include "attend.h"

static int64_t row_bytes(const kv_rows *format, int64_t head_dim)
{
    return (head_dim + 15) / 16 * 32; /* whole vectors; the padding may hold anything */
}

/* From here on a float32 rounds to infinity. */
static int64_t first_unfit(const kv_rows *format, const float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (fabsf(values[i]) >= 0x1.ffp127f && isfinite(values[i]))
            return i;
    return -1;
}

static void write_row(unsigned char *at, const float *row, int64_t head_dim)
{
    for (int64_t i = 0; i < head_dim; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, 4);
        uint16_t kept = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
        if (isnan(row[i]))
            kept = (uint16_t)(bits >> 16 | 0x40); /* rounding could make an infinity of it */
        memcpy(at + i * 2, &kept, 2);
    }
}

static inline void read_row(float *row, const unsigned char *at, int64_t head_dim)
{
    for (int64_t i = 0; i < head_dim; i++) {
        uint16_t kept;
        memcpy(&kept, at + i * 2, 2);
        uint32_t bits = (uint32_t)kept << 16;
        memcpy(row + i, &bits, 4);
    }
}

ROWS_OF(bf16, row_bytes, first_unfit, write_row, read_row)
