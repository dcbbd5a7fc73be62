/* A format of rows that lie one after the other, from the functions that write one and read it back; and a
   kernel for it: each row is decoded once, for all query heads of its group. `read` is a constant of the
   kernel, so that it is inlined. */
#ifndef ATTEND_H
#define ATTEND_H

#include <float.h>
#include <math.h>
#include <string.h>

#include "kv_kernel.h"
#include "kv_rows.h"

#define LARGEST_PAGE 64

typedef void (*read_fn)(float *row, const unsigned char *at, int64_t head_dim);

/* The page's rows that are valid and inside the span, a bit each. */
static inline uint64_t rows_of(const kv_span *span, int64_t page)
{
    int64_t low = span->first_slot - page * span->page_tokens;
    int64_t high = span->last_slot - page * span->page_tokens;
    uint64_t rows = span->valid[page];
    if (low > 0)
        rows &= ~(uint64_t)0 << low;
    if (high < 64)
        rows &= ((uint64_t)1 << high) - 1;
    return rows;
}

/* Scores of a page become weights, and what a head has so far shrinks where its maximum rises. */
static inline void soften(const kv_span *span, int query, uint64_t rows, float *scores)
{
    float top = span->max[query], sum = 0;
    float *output = span->output + (int64_t)query * span->head_dim;
    for (int t = 0; t < span->page_tokens; t++)
        if (rows >> t & 1 && !(scores[t] <= top))
            top = scores[t]; /* a NaN too, as IEEE arithmetic says */
    if (top == -INFINITY)
        top = -FLT_MAX; /* -inf - -inf would be NaN */
    float keep = expf(span->max[query] - top);
    span->max[query] = top;
    for (int d = 0; d < span->head_dim; d++)
        output[d] *= keep;
    for (int t = 0; t < span->page_tokens; t++)
        if (rows >> t & 1)
            sum += scores[t] = expf(scores[t] - top);
    span->sum[query] = span->sum[query] * keep + sum;
}

static inline __attribute__((always_inline)) int attend(const kv_span *span, read_fn read)
{
    float row[KV_MAX_HEAD_DIM], scores[KV_MAX_GROUP][LARGEST_PAGE];
    int64_t dim = span->head_dim, tile = span->page_tokens * span->row_bytes;
    int64_t first = span->first_slot / span->page_tokens;
    int64_t last = (span->last_slot + span->page_tokens - 1) / span->page_tokens;
    for (int head = span->first_head; head < span->last_head; head++) {
        int query = head * span->group;
        for (int g = 0; g < span->group; g++) {
            span->max[query + g] = -INFINITY;
            span->sum[query + g] = 0;
            memset(span->output + (query + g) * dim, 0, dim * sizeof(float));
        }
        for (int64_t page = first; page < last; page++) {
            uint64_t rows = rows_of(span, page);
            if (!rows)
                continue; /* its page id may be -1 */
            const unsigned char *keys = span->pool + span->page_ids[page] * span->page_bytes + 2 * head * tile;
            for (int t = 0; t < span->page_tokens; t++) {
                if (!(rows >> t & 1))
                    continue; /* its bytes may be anything */
                read(row, keys + t * span->row_bytes, dim);
                for (int g = 0; g < span->group; g++) {
                    const float *q = span->q + (query + g) * dim;
                    float dot = 0;
                    for (int64_t d = 0; d < dim; d++)
                        dot += q[d] * row[d];
                    scores[g][t] = dot * span->scale;
                }
            }
            for (int g = 0; g < span->group; g++)
                soften(span, query + g, rows, scores[g]);
            for (int t = 0; t < span->page_tokens; t++) {
                if (!(rows >> t & 1))
                    continue;
                read(row, keys + tile + t * span->row_bytes, dim);
                for (int g = 0; g < span->group; g++) {
                    float *output = span->output + (query + g) * dim;
                    for (int64_t d = 0; d < dim; d++)
                        output[d] += scores[g][t] * row[d];
                }
            }
        }
    }
    return 0;
}

/* NAME_rows and NAME_attend. */
#define ROWS_OF(name, row_bytes, first_unfit, write_row, read_row) \
    static void write(const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, \
                      const float *k, const float *v) \
    { \
        write_row(at + kv_key_row(tiles, token), k, tiles->head_dim); \
        write_row(at + kv_value_row(tiles, token), v, tiles->head_dim); \
    } \
    static void read(const kv_rows *format, const kv_tiles *tiles, const unsigned char *at, int64_t token, \
                     float *k, float *v) \
    { \
        read_row(k, at + kv_key_row(tiles, token), tiles->head_dim); \
        read_row(v, at + kv_value_row(tiles, token), tiles->head_dim); \
    } \
    const kv_rows name##_rows = { \
        .row_bytes = row_bytes, .first_unfit = first_unfit, .write = write, .read = read}; \
    int name##_attend(const kv_span *span) { return attend(span, read_row); }

#endif
