/* The kernels of K1, K2 and K5, or with PANELS those of K1T and K2T, over spans of pages, against attention in double.

   KERNELS is the C file that Cython made of them. It is compiled into this program, which calls its kernels
   and nothing of Python: for machines that can be emulated and have no Python here. */
#include KERNELS

#include <stdlib.h>

#include "check.h"
#include "simd.h"

enum format { FP32, FP16, Q8_0 };
#ifdef PANELS /* K lies [dim][token] */
#define SPAN(format) __pyx_f_7kvtrial_3hot_19_kernels_panel_simd_span_panel_##format
enum { FORMATS = Q8_0, TRANSPOSED = 1 };
static int (*const kernels[])(const kv_span *) = {SPAN(fp32), SPAN(fp16)};
#else
#define SPAN(format) __pyx_f_7kvtrial_3hot_13_kernels_simd_span_##format
enum { FORMATS = Q8_0 + 1, TRANSPOSED = 0 };
static int (*const kernels[])(const kv_span *) = {SPAN(fp32), SPAN(fp16), SPAN(q8)};
#endif
static const int dims[] = {1, 8, 59, 64, 100, 256};
enum { PAGES = 6, MAX_TOKENS = 64, MAX_QUERIES = 16, MAX_KV = 5, DIM = KV_MAX_HEAD_DIM };

/* Rows as they read back from where they are stored: K and V by slot and head. */
static float stored[2][PAGES * MAX_TOKENS][MAX_KV][DIM];

/* Writes a random row and tells what it reads back as. What is no content is NaN. */
static void put_row(enum format format, unsigned char *row, int dim, float *reads_as) {
    if (format == FP32)
        for (int d = 0; d < (dim + 7) / 8 * 8; d++) {
            float x = d < dim ? reads_as[d] = draw_float() : NAN;
            memcpy(row + 4 * d, &x, 4);
        }
    else if (format == FP16)
        for (int d = 0; d < (dim + 7) / 8 * 8; d++) {
            uint16_t x = d < dim ? kv_to_half(draw_float()) : 0x7E00;
            if (d < dim) reads_as[d] = (float)half_value(x);
            memcpy(row + 2 * d, &x, 2);
        }
    else
        for (int d = 0; d < (dim + 31) / 32 * 32; d++) {
            unsigned char *block = row + d / 32 * 34;
            uint16_t scale;
            if (d % 32 == 0) scale = kv_to_half(0.01f + 0.01f * draw_float() / 2), memcpy(block, &scale, 2);
            memcpy(&scale, block, 2);
            int8_t x = (int8_t)(d < dim ? draw_below(255) - 127 : 0);
            memcpy(block + 2 + d % 32, &x, 1);
            if (d < dim) reads_as[d] = (float)(half_value(scale) * x);
        }
}

/* The same for row t of a K tile. */
static void put_key(enum format format, unsigned char *tile, int t, int tokens, int64_t row_bytes, int dim, float *reads_as) {
    unsigned char row[4 * DIM + DIM / 32 * 34];
    int size = format == FP32 ? 4 : 2;
    if (!TRANSPOSED) {
        put_row(format, tile + t * row_bytes, dim, reads_as);
        return;
    }
    put_row(format, row, dim, reads_as);
    for (int d = 0; d < dim; d++) memcpy(tile + (d * tokens + t) * size, row + d * size, (size_t)size);
}

static void compare(const kv_span *span, const uint64_t *valid, double allowed, const char *what) {
    int group = span->group, dim = span->head_dim;
    for (int query = 0; query < span->kv_heads * group; query++) {
        double scores[PAGES * MAX_TOKENS], top = -INFINITY, total = 0, right;
        const float *q = span->q + query * dim;
        int head = query / group;
        for (int64_t slot = span->first_slot; slot < span->last_slot; slot++) {
            scores[slot] = -INFINITY;
            if (!(valid[slot / span->page_tokens] >> slot % span->page_tokens & 1)) continue;
            scores[slot] = 0;
            for (int d = 0; d < dim; d++) scores[slot] += (double)q[d] * stored[0][slot][head][d];
            scores[slot] *= span->scale;
            top = fmax(top, scores[slot]);
        }
        for (int64_t slot = span->first_slot; slot < span->last_slot; slot++)
            total += top == -INFINITY ? 0 : exp(scores[slot] - top);
        check("kernel's maximum", span->max[query], top, allowed * (1 + fabs(top)));
        /* The kernel's maximum is that of its own scores. */
        double moved = total ? exp(top - span->max[query]) : 1;
        check("kernel's sum", span->sum[query], total * moved, allowed * (1 + total));
        for (int d = 0; d < dim; d++) {
            right = 0;
            for (int64_t slot = span->first_slot; slot < span->last_slot; slot++)
                if (scores[slot] != -INFINITY) right += exp(scores[slot] - top) * stored[1][slot][head][d];
            check(what, span->output[query * dim + d], right * moved, allowed * (1 + total));
        }
    }
}

static void attend(enum format format, int queries, int kv_heads, int dim, int tokens, int holes) {
    static const char *names[] = {"an FP32 output", "an FP16 output", "a Q8_0 output"};
    static float q[MAX_QUERIES * DIM], output[MAX_QUERIES * DIM], max[MAX_QUERIES], sum[MAX_QUERIES];
    int64_t row_bytes = format == FP32   ? (dim + 7) / 8 * 32
                        : format == FP16 ? (dim + 7) / 8 * 16
                                         : (dim + 31) / 32 * 34;
    int64_t page_bytes = 2 * kv_heads * tokens * row_bytes;
    int32_t pages[PAGES] = {4, 1, 5, 0, 3, 2};
    uint64_t valid[PAGES];
    unsigned char *pool = malloc((size_t)(PAGES * page_bytes));
    memset(pool, 0xFF, (size_t)(PAGES * page_bytes)); /* NaN in each format that has one */
    for (int page = 0; page < PAGES; page++) {
        valid[page] = ~0ull >> (64 - tokens);
        if (holes) valid[page] = page == 2 ? 0 : valid[page] & draw();
        if (!valid[page]) {
            pages[page] = -1;
            continue;
        }
        for (int t = 0; t < tokens; t++)
            for (int head = 0; head < kv_heads; head++) {
                if (!(valid[page] >> t & 1)) continue;
                unsigned char *k = pool + pages[page] * page_bytes + 2 * head * tokens * row_bytes;
                float *key = stored[0][page * tokens + t][head];
                put_row(format, k + (tokens + t) * row_bytes, dim, stored[1][page * tokens + t][head]);
                put_key(format, k, t, tokens, row_bytes, dim, key);
            }
    }
    for (int i = 0; i < queries * dim; i++) q[i] = draw_float();
    kv_span span = {
        .pool = pool, .page_bytes = page_bytes, .page_ids = pages, .valid = valid,
        .first_slot = holes ? 3 : 0, .last_slot = PAGES * tokens - 5, .row_bytes = row_bytes,
        .page_tokens = tokens, .head_dim = dim, .group = queries / kv_heads, .kv_heads = kv_heads,
        .first_head = 0, .last_head = kv_heads, .scale = 1 / sqrtf((float)dim),
        .q = q, .max = max, .sum = sum, .output = output,
    };
    check("the kernel's code", kernels[format](&span), 0, 0);
    compare(&span, valid, format == Q8_0 ? 2e-4 : 5e-6, names[format]);
    free(pool);
}

int main(void) {
    const int heads[][2] = {{9, 3}, {14, 2}, {5, 5}, {16, 1}};
    for (int format = FP32; format < FORMATS; format++)
        for (int h = 0; h < 4; h++)
            for (int d = 0; d < 6; d++)
                for (int tokens = 16; tokens <= 64; tokens *= 2)
                    for (int holes = 0; holes < 2; holes++)
                        attend((enum format)format, heads[h][0], heads[h][1], dims[d], tokens, holes);
    return finish();
}
