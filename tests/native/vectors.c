/* Each function of simd.h, the weight kernels' shims, the page check and the thread pool, against plain C.

   Says which form of simd.h it was compiled with; test_vectors.py compiles it for several machines. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "simd.h"
#include "thread_pool.h"
#include "unpacked.h"
#include "xxh3.h"

#if KV_AVX2
#define FORM "avx2"
#elif KV_NEON
#define FORM "neon"
#else
#define FORM "portable"
#endif
#if KV_AVX2 || KV_NEON
#define FUSED 1
#else
#define FUSED 0
#endif

/* The end of a page behind which nothing may be touched. */
static char *end_of_memory(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *two = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (two == MAP_FAILED || mprotect(two + page, page, PROT_NONE)) abort();
    return two + page;
}
static char *edge;

static const float ODD[] = {0, -0.0f, 1, -1, 1e-40f, -1e-40f, 3e38f, -3e38f, INFINITY, -INFINITY, NAN};
enum { ODDS = sizeof ODD / sizeof *ODD };

static void draw_floats(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = draw_float();
}

static void each_lane(const char *what, kv_vf got, const float *wanted, double allowed) {
    float x[KV_LANES + 1];
    kv_store(x + 1, got);
    for (int i = 0; i < KV_LANES; i++) check(what, x[i + 1], wanted[i], allowed);
}

static void moves(void) {
    float x[KV_LANES + 1], wanted[KV_LANES] = {0};
    each_lane("kv_zero", kv_zero(), wanted, 0);
    for (int i = 0; i < KV_LANES; i++) wanted[i] = -1.25f;
    each_lane("kv_splat", kv_splat(-1.25f), wanted, 0);
    draw_floats(x, KV_LANES + 1);
    each_lane("kv_load", kv_load(x + 1), x + 1, 0);
    for (int lanes = 0; lanes <= KV_LANES; lanes++) {
        float *at = (float *)edge - lanes, full[KV_LANES];
        for (int i = 0; i < KV_LANES; i++) full[i] = i % 3 ? NAN : INFINITY, wanted[i] = 0;
        for (int i = 0; i < lanes; i++) at[i] = full[i] = wanted[i] = draw_float();
        each_lane("kv_load_head", kv_load_head(at, lanes), wanted, 0);
        each_lane("kv_head", kv_head(kv_load(full), lanes), wanted, 0);
        for (int i = 0; i < lanes; i++) at[i] = 0;
        kv_store_head(at, kv_load(full), lanes);
        for (int i = 0; i < lanes; i++) check("kv_store_head", at[i], wanted[i], 0);
        kv_prefetch(at);
    }
    kv_prefetch(NULL);
    kv_prefetch(edge);
}

static void arithmetic(void) {
    float a[KV_LANES], b[KV_LANES], c[KV_LANES], wanted[KV_LANES], sums[4];
    kv_vf x, y, z;
    for (int round = 0; round < 1000; round++) {
        draw_floats(a, KV_LANES), draw_floats(b, KV_LANES), draw_floats(c, KV_LANES);
        x = kv_load(a), y = kv_load(b), z = kv_load(c);
        for (int i = 0; i < KV_LANES; i++) wanted[i] = (float)((double)a[i] + b[i]);
        each_lane("kv_add", kv_add(x, y), wanted, 0);
        for (int i = 0; i < KV_LANES; i++) wanted[i] = (float)((double)a[i] - b[i]);
        each_lane("kv_sub", kv_sub(x, y), wanted, 0);
        for (int i = 0; i < KV_LANES; i++) wanted[i] = (float)((double)a[i] * b[i]);
        each_lane("kv_mul", kv_mul(x, y), wanted, 0);
        for (int i = 0; i < KV_LANES; i++) wanted[i] = fmaf(a[i], b[i], c[i]);
        each_lane("kv_fma", kv_fma(x, y, z), wanted, FUSED ? 0 : 1e-6);
        double sum[4] = {0}, top = a[0];
        for (int i = 0; i < KV_LANES; i++) {
            sum[0] += a[i], sum[1] += b[i], sum[2] += c[i], sum[3] += wanted[i];
            if (a[i] > top) top = a[i];
        }
        check("kv_hsum", kv_hsum(x), sum[0], KV_LANES * 5e-7);
        check("kv_hmax", kv_hmax(x), top, 0);
        kv_hsum4(sums, x, y, z, kv_load(wanted), 0.5f);
        for (int i = 0; i < 4; i++) check("kv_hsum4", sums[i], sum[i] / 2, KV_LANES * 5e-7);
    }
    for (int i = 0; i < ODDS; i++)
        for (int j = 0; j < ODDS; j++) {
            for (int k = 0; k < KV_LANES; k++) wanted[k] = ODD[i] > ODD[j] ? ODD[i] : ODD[j];
            each_lane("kv_max", kv_max(kv_splat(ODD[i]), kv_splat(ODD[j])), wanted, 0);
            for (int k = 0; k < KV_LANES; k++) wanted[k] = ODD[i] < ODD[j] ? ODD[i] : ODD[j];
            each_lane("kv_min", kv_min(kv_splat(ODD[i]), kv_splat(ODD[j])), wanted, 0);
            for (int k = 0; k < KV_LANES; k++) wanted[k] = ODD[i] < ODD[j] ? 0 : 1.5f;
            if (!isnan(ODD[j]))
                each_lane("kv_zero_below", kv_zero_below(kv_splat(1.5f), kv_splat(ODD[i]), ODD[j]), wanted, 0);
        }
    for (int n = -100; n <= 100; n++) {
        for (int k = 0; k < KV_LANES; k++) wanted[k] = ldexpf(1.25f, n);
        each_lane("kv_add_exponent", kv_add_exponent(kv_splat(1.25f), kv_splat(12582912.0f + n)), wanted, 0);
    }
}

static void exponentials(void) {
    float x[KV_LANES], got[KV_LANES];
    for (int i = 0; i < 80000; i++) {
        for (int k = 0; k < KV_LANES; k++) x[k] = -87.29f * ((float)i + (float)k / KV_LANES) / 80000;
        kv_store(got, kv_exp(kv_load(x)));
        for (int k = 0; k < KV_LANES; k++) {
            double right = exp((double)x[k]);
            double ulp = nextafterf((float)right, INFINITY) - (float)right;
            check("kv_exp", got[k], right, (FUSED ? 1 : 2) * ulp);
        }
        q_store(got, q_exp(q_load(x)));
        double right = exp(fmax(x[3], -87)), ulp = nextafterf((float)right, INFINITY) - (float)right;
        check("q_exp", got[3], right, (FUSED ? 2 : 3) * ulp);
    }
    const float ends[8] = {0, -87.4f, -1e6f, -INFINITY, NAN, -103, -3e38f, -0.0f};
    const float wanted[8] = {1, 0, 0, 0, NAN, 0, 0, 1};
    each_lane("kv_exp's ends", kv_exp(kv_load(ends)), wanted, 0);
    uint32_t payloads[] = {0x7FC00000, 0x7FC00001, 0x7FC12345, 0xFFFFFFFF};
    for (int i = 0; i < 4; i++) {
        float nan;
        memcpy(&nan, payloads + i, 4);
        kv_store(got, kv_exp(kv_splat(nan)));
        check("kv_exp of a NaN with a payload", isnan(got[i]) != 0, 1, 0);
    }
    check("q_exp of NaN", q_max_lane(q_exp(q_set(NAN))), NAN, 0);
}

static void halves(void) {
    uint16_t *at = (uint16_t *)edge - KV_LANES;
    float wanted[KV_LANES];
    for (int bits = 0; bits < 65536; bits++) {
        double right = half_value((uint16_t)bits);
        float value = kv_from_half((uint16_t)bits);
        check("kv_from_half", value, right, 0);
        check("q_half", q_half(&(uint16_t){(uint16_t)bits}), right, 0);
        at[bits % KV_LANES] = (uint16_t)bits, wanted[bits % KV_LANES] = (float)right;
        if (bits % KV_LANES == KV_LANES - 1) {
            each_lane("kv_load_half", kv_load_half(at), wanted, 0);
            float got[8];
            q_store(got, q_load_f16(at));
            for (int i = 0; i < 8; i++) check("q_load_f16", got[i], wanted[i], 0);
        }
        if (!isnan(right)) check("kv_to_half", kv_to_half(value), bits, 0);
        /* Between this one and the next: to the nearer, and of two as near to the even one. */
        if ((bits & 0x7FFF) >= 0x7C00) continue;
        double next = (bits & 0x7FFF) == 0x7BFF ? copysign(65536, right) : half_value((uint16_t)(bits + 1));
        float middle = (float)((right + next) / 2);
        check("kv_to_half, a tie", kv_to_half(middle), bits + (bits & 1), 0);
        check("kv_to_half, below", kv_to_half(nextafterf(middle, (float)right)), bits, 0);
        check("kv_to_half, above", kv_to_half(nextafterf(middle, (float)next)), bits + 1, 0);
    }
    check("kv_to_half of NaN", kv_from_half(kv_to_half(NAN)), NAN, 0);
    check("kv_to_half of the tiniest", kv_to_half(1e-45f), 0, 0);
    check("kv_to_half of -inf", kv_to_half(-INFINITY), 0xFC00, 0);
}

static void integers(void) {
    enum { WORDS = 2 * KV_LANES };
    int8_t *bytes = (int8_t *)edge - WORDS;
    int16_t *words = (int16_t *)(edge - 64) - WORDS;
    float wanted[KV_LANES];
    for (int round = 0; round < 1000; round++) {
        for (int i = 0; i < WORDS; i++) {
            bytes[i] = (int8_t)(round ? draw_below(256) - 128 : -128);
            words[i] = (int16_t)(round ? draw_below(65535) - 32767 : 32767);
        }
        for (int i = 0; i < KV_LANES; i++) wanted[i] = bytes[KV_LANES + i];
        each_lane("kv_load_int8", kv_load_int8(bytes + KV_LANES), wanted, 0);
        kv_vi sums = kv_dot_int16(kv_widen_int8(bytes), kv_load_int16(words));
        for (int i = 0; i < KV_LANES; i++)
            wanted[i] = (float)(bytes[2 * i] * words[2 * i] + bytes[2 * i + 1] * words[2 * i + 1]);
        each_lane("kv_dot_int16", kv_from_int(sums), wanted, 0);
        for (int i = 0; i < KV_LANES; i++) wanted[i] *= 2;
        each_lane("kv_add_int", kv_from_int(kv_add_int(sums, sums)), wanted, 0);
    }
    const float odd[] = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 32767, -32767, 32766.4f, -32766.6f, 0.49999997f, 7, -7,
                         1e-30f, -2.5f, 100.5f, -3.49f};
    for (int i = 0; i < 16; i += KV_LANES) {
        int16_t *at = (int16_t *)edge - KV_LANES;
        kv_store_int16(at, kv_load(odd + i));
        for (int k = 0; k < KV_LANES; k++) check("kv_store_int16", at[k], rint((double)odd[i + k]), 0);
    }
    for (int low = 0; low < 64; low++)
        for (int high = low; high < 64; high++) {
            uint64_t bits = 1ull << low | 1ull << high;
            check("kv_lowest_bit", kv_lowest_bit(bits), low, 0);
            check("kv_highest_bit", kv_highest_bit(bits), high, 0);
        }
}

static void weight_shims(void) {
    float a[8], b[8], c[8], got[8];
    int8_t bytes[8];
    for (int round = 0; round < 1000; round++) {
        draw_floats(a, 8), draw_floats(b, 8), draw_floats(c, 8);
        q_f32x8 x = q_load(a), y = q_load(b);
        double sum = 0, top = a[0];
        for (int i = 0; i < 8; i++) sum += a[i], top = fmax(top, a[i]);
        check("q_sum", q_sum(x), sum, 4e-6);
        check("q_max_lane", q_max_lane(x), top, 0);
#define EACH(what, made, right, allowed) \
    q_store(got, made); \
    for (int i = 0; i < 8; i++) check(what, got[i], right, allowed)
        EACH("q_add", q_add(x, y), (float)((double)a[i] + b[i]), 0);
        EACH("q_mul", q_mul(x, y), (float)((double)a[i] * b[i]), 0);
        EACH("q_div", q_div(x, y), (float)((double)a[i] / b[i]), 0);
        EACH("q_max", q_max(x, y), fmaxf(a[i], b[i]), 0);
        EACH("q_fma", q_fma(x, y, q_load(c)), fmaf(a[i], b[i], c[i]), FUSED ? 0 : 1e-6);
        for (int i = 0; i < 8; i++) a[i] = round % 2 ? 60 * a[i] : (float)(draw_below(254) - 127) + 0.5f;
        sum = 0;
        for (int i = 0; i < 8; i++) sum += rint((double)a[i]);
        check("q_round_i8x8's sum", q_round_i8x8(q_load(a), bytes), sum, 0);
        for (int i = 0; i < 8; i++) check("q_round_i8x8", bytes[i], rint((double)a[i]), 0);
        int16_t pairs[16];
        int8_t four[32];
        q_store_i8(pairs, q_round_i16x16(x, q_mul(q_load(a), q_set(256))));
        for (int i = 0; i < 8; i++) check("q_round_i16x16", pairs[8 + i], rint(256 * (double)a[i]), 0);
        q_store_i8(four, q_round_i8x32(q_load(a), q_round(x), q_set(-127), q_mul(q_load(a), q_set(-1))));
        for (int i = 0; i < 8; i++) {
            check("q_round_i8x32", four[i], rint((double)a[i]), 0);
            check("q_round_i8x32", four[16 + i], -127, 0);
            check("q_round_i8x32", four[24 + i], rint(-(double)a[i]), 0);
        }
        EACH("q_round", q_round(q_load(a)), rint((double)a[i]), 0);
    }
    for (int round = 0; round < 1000; round++) {
        int8_t codes[16];
        int16_t factors[16];
        int64_t right[8] = {0};
        q_sums sums = q_no_sums();
        for (int n = 0; n < 16; n++) { /* a block's depth, two at a time: the first round at the integers' bounds */
            for (int i = 0; i < 16; i++) {
                codes[i] = (int8_t)(round ? draw_below(255) - 127 : -127);
                factors[i] = (int16_t)(round ? draw_below(65535) - 32767 : 32767);
                right[i / 2] += codes[i] * factors[i];
            }
            sums = q_add_pairs(sums, q_widen_i8(codes), q_load_i8(factors));
        }
        EACH("q_add_pairs", q_pairs_float(sums), (float)right[i], 0);
    }
    for (int n = -126; n <= 127; n++) {
        EACH("q_power_of_two", q_power_of_two(q_set((float)n)), ldexp(1, n), 0);
    }
    for (int k = 0; k < ODDS; k++) {
        double right = isnan(ODD[k]) ? NAN : fmin(fmax(ODD[k], -2), 3);
        EACH("q_clamp", q_clamp(q_set(ODD[k]), -2, 3), right, 0);
    }
}

/* Units of weights that a form can hold and vectors of bytes at random, but for the first row and the first vector,
   which are at the integers' bounds; and what their products are, with the sizes of what is added up. */
enum { UNITS = 8, COLS = 32 * UNITS, ROWS = 16, VECTORS = 4 };
static struct {
    kv_unit rows[ROWS][UNITS];
    float values[VECTORS][COLS], pairs[VECTORS][2 * UNITS], sums[VECTORS][UNITS], halves[VECTORS][2 * UNITS];
    float sums_of_halves[VECTORS][2 * UNITS];
    int8_t bytes[VECTORS][COLS];
    double weights[ROWS][COLS], weights_size[ROWS][COLS];
    double right[VECTORS][ROWS], size[VECTORS][ROWS], floats[VECTORS][ROWS], floats_size[VECTORS][ROWS];
} drawn;

static void draw_vectors(void) {
    for (int v = 0; v < VECTORS; v++)
        for (int u = 0; u < UNITS; u++) {
            int sum[2] = {0, 0};
            double total[2] = {0, 0};
            for (int i = 0; i < 32; i++) {
                int value = v ? draw_below(255) - 127 : u % 2 ? -127 : 127;
                drawn.bytes[v][32 * u + i] = (int8_t)value, sum[i / 16] += value;
                total[i / 16] += drawn.values[v][32 * u + i] = draw_float();
            }
            float scale = 0.01f + fabsf(draw_float());
            drawn.sums[v][u] = (float)(total[0] + total[1]);
            drawn.pairs[v][2 * u] = scale;
            drawn.pairs[v][2 * u + 1] = scale * (float)(sum[0] + sum[1]);
            for (int h = 0; h < 2; h++) {
                drawn.halves[v][2 * u + h] = scale * (float)sum[h];
                drawn.sums_of_halves[v][2 * u + h] = (float)total[h];
            }
        }
}

/* Codes from low to high; small: scales of scales; offset: what is added; halves: those of 16 differ. */
static void draw_products(int low, int high, int small, int offset, int halves) {
    memset(&drawn, 0, sizeof drawn);
    draw_vectors();
    for (int r = 0; r < ROWS; r++)
        for (int u = 0; u < UNITS; u++) {
            kv_unit *unit = &drawn.rows[r][u];
            int super = u / KV_SUPER_UNITS * KV_SUPER_UNITS; /* whose numbers its units share */
            unit->scale = u % KV_SUPER_UNITS && small && !halves ? drawn.rows[r][super].scale : kv_to_half(draw_float());
            unit->offset = offset ? kv_to_half(draw_float()) : 0;
            if (u % KV_SUPER_UNITS && small && !halves) unit->offset = drawn.rows[r][super].offset;
            for (int h = 0; h < 2; h++) {
                unit->scales[h] = (int8_t)(small ? (r ? draw_below(256) - 128 : -128) : 1);
                unit->offsets[h] = (int8_t)(small ? (r ? draw_below(256) - 128 : 127) : 1);
            }
            if (!halves) unit->scales[1] = unit->scales[0], unit->offsets[1] = unit->offsets[0];
            double d = half_value(unit->scale), m = half_value(unit->offset);
            for (int i = 0; i < 32; i++) {
                int q = r ? low + draw_below(high - low + 1) : u % 2 ? low : high, h = i / 16;
                unit->codes[i] = (int8_t)q;
                double scale = d * unit->scales[h], shift = m * unit->offsets[h], weight = scale * q + shift;
                drawn.weights[r][32 * u + i] = weight;
                drawn.weights_size[r][32 * u + i] = fabs(scale * q) + fabs(shift);
                for (int v = 0; v < VECTORS; v++) {
                    double x = (double)drawn.pairs[v][2 * u] * drawn.bytes[v][32 * u + i];
                    drawn.right[v][r] += weight * x;
                    /* The nibbles of signed bytes are of w + 128: what is taken off again counts. */
                    drawn.size[v][r] += (fabs(scale * (low < 0 ? 256 : q)) + fabs(shift)) * fabs(x);
                    x = drawn.values[v][32 * u + i];
                    drawn.floats[v][r] += weight * x;
                    drawn.floats_size[v][r] += (fabs(scale * q) + fabs(shift)) * fabs(x);
                }
            }
        }
}

/* Rows [0, n) in one or two panels, the last of which is short, by the decode's kernels and by the prefill's. */
static void panels(int form, int n) {
    static const struct {
        int low, high, small, offset, halves;
        void (*put)(const kv_unit *, ptrdiff_t, int, uint8_t *);
    } of[KV_FORMS] = {
        [KV_FORM_Q4_1] = {0, 15, 0, 1, 0, kv_put_q4_1}, [KV_FORM_Q8_0] = {-128, 127, 0, 0, 0, kv_put_q8_0},
        [KV_FORM_S4] = {0, 15, 1, 1, 0, kv_put_s4},     [KV_FORM_S6] = {0, 63, 1, 1, 1, kv_put_s6},
        [KV_FORM_S8] = {-128, 127, 1, 0, 0, kv_put_s8},
    };
    static uint8_t packed[2][UNITS * KV_PANEL_ROWS * KV_S8_BYTES], unpacked[UNITS * KV_UNPACKED_BYTES];
    static float heads[UNITS * KV_UNPACKED_FLOATS], got[2 * KV_QUAD * 8], row[COLS];
    static float pairs[UNITS * KV_QUAD * 2], halves[UNITS * KV_QUAD * 2];
    static int8_t quad[UNITS * 32 * KV_QUAD];
    int count = n > 8 ? 2 : 1, together = kv_unpacked_forms[form].panels;
    kv_activation x[2][VECTORS];
    draw_products(of[form].low, of[form].high, of[form].small, of[form].offset, of[form].halves);
    for (int r = 0; r < 8 * count; r++)
        for (int u = 0; u < UNITS; u++) {
            const kv_unit none = {0};
            of[form].put(r < n ? &drawn.rows[r][u] : &none, u, r % 8, packed[r / 8]);
        }
    for (int r = 0; r < n; r++) {
        kv_forms[form].row(packed[r / 8], r % 8, UNITS, row);
        for (int i = 0; i < COLS; i++)
            check("a weight of a row", row[i], drawn.weights[r][i], 3e-7 * drawn.weights_size[r][i]);
    }
    for (int v = 0; v < VECTORS; v++) {
        x[0][v] = (kv_activation){COLS, drawn.values[v], drawn.bytes[v], drawn.pairs[v], drawn.sums[v], drawn.halves[v]};
        x[1][v] = x[0][v];
        x[1][v].halves = drawn.sums_of_halves[v];
        for (int i = 0; i < COLS; i++) quad[(i / 4 * KV_QUAD + v) * 4 + i % 4] = drawn.bytes[v][i];
        for (int i = 0; i < 2 * UNITS; i++) {
            pairs[(i / 2 * KV_QUAD + v) * 2 + i % 2] = drawn.pairs[v][i];
            halves[(i / 2 * KV_QUAD + v) * 2 + i % 2] = drawn.halves[v][i];
        }
    }
    for (int p = 0; p < count; p++)
        for (int vectors = 1; vectors <= VECTORS; vectors++)
            for (int floats = 0; floats < 2; floats++) {
                (floats ? kv_forms[form].with_floats : kv_forms[form].with_bytes)(packed[p], 0, x[floats], vectors, got);
                for (int v = 0; v < vectors; v++)
                    for (int r = 8 * p; r < 8 * p + 8; r++) {
                        double right = (floats ? drawn.floats : drawn.right)[v][r];
                        double size = (floats ? drawn.floats_size : drawn.size)[v][r];
                        check("a row of a panel", got[8 * v + r - 8 * p], r < n ? right : 0, 1e-6 * size);
                    }
            }
    kv_unpacked_forms[form].unpack(packed[0], packed[count - 1], UNITS, unpacked, heads);
    kv_unpacked_forms[form].dot(unpacked, heads, quad, pairs, halves, UNITS, got);
    for (int r = 0; r < (together == 2 ? n : 8); r++)
        for (int v = 0; v < VECTORS; v++)
            check("a row of an unpacked panel", got[(r / 8 * KV_QUAD + v) * 8 + r % 8], r < n ? drawn.right[v][r] : 0,
                  1e-6 * drawn.size[v][r]);
}

static void count_task(void *context, int64_t task) { __atomic_fetch_add((int *)context + task, 1, __ATOMIC_RELAXED); }
static void threads(void) {
    for (int n_threads = 1; n_threads <= 5; n_threads += 2)
        for (int round = 0; round < 50; round++) {
            int done[97] = {0};
            kv_parallel_for(count_task, done, 97, n_threads);
            for (int i = 0; i < 97; i++) check("kv_parallel_for", done[i], 1, 0);
        }
}

/* For the test to compare with another implementation. */
static void page_checks(void) {
    static uint8_t bytes[5000];
    for (int i = 0; i < 5000; i++) bytes[i] = (uint8_t)(i * 131 + (i >> 8));
    for (int n = KV_XXH3_SHORT + 1; n <= 5000; n += 59)
        printf("xxh3 %d %016llx\n", n, (unsigned long long)kv_xxh3(bytes, (size_t)n));
}

int main(void) {
    printf("form %s\n", FORM);
    edge = end_of_memory();
    moves();
    arithmetic();
    exponentials();
    halves();
    integers();
    weight_shims();
    for (int round = 0; round < 200; round++) panels(round % KV_FORMS, 1 + round / KV_FORMS % 16);
    threads();
    page_checks();
    return finish();
}
