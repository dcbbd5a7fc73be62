/* Values against what they should be; a program ends with `finish`. */
#ifndef CHECK_H
#define CHECK_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>

static long checks, failures;

/* NaN is right where NaN is wanted; `allowed` is absolute. */
static void check(const char *what, double got, double wanted, double allowed) {
    checks++;
    if (isnan(wanted) ? isnan(got) : got == wanted || fabs(got - wanted) <= allowed) return;
    if (++failures <= 20) printf("%s: %.9g, not %.9g\n", what, got, wanted);
}

static int finish(void) {
    printf("%ld checks, %ld failures\n", checks, failures);
    return failures != 0;
}

/* Numbers that are the same on every machine: xorshift. */
static uint64_t state = 88172645463325252u;
static uint64_t draw(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state >> 11;
}
static float draw_float(void) { return (float)((double)draw() / (1ll << 51) - 2); }
static int draw_below(int n) { return (int)(draw() % (uint64_t)n); }

/* What a binary16 says, from its bits. */
static double half_value(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double size = exponent == 0    ? ldexp(fraction, -24)
                  : exponent == 31 ? (fraction ? NAN : INFINITY)
                                   : ldexp(1024 + fraction, exponent - 25);
    return bits >> 15 ? -size : size;
}

#endif
