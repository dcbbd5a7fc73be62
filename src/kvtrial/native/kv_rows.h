/* A row format's native half: how one head's row of K or V lies in a page, and how it goes in and out.

   A format is this struct, in a PyCapsule, and a kernel (kv_kernel.h) that reads what `write` leaves; the
   record `kvtrial.hot.formats.RowFormat` names both. Nothing else in a store knows how a row is stored.

   0xFF in every byte of a row must read as NaN: a poisoned store fills rows without content so. */
#ifndef KV_ROWS_H
#define KV_ROWS_H

#include <stdint.h>

typedef struct kv_rows {
    /* Bytes of one element; 0 where elements have none of their own (blocks with a scale). Only rows of
       elements can have K transposed, [head_dim][page_tokens]. */
    int64_t element_bytes;
    /* Bytes of a row of head_dim elements, with its padding: a multiple of the element's. */
    int64_t (*row_bytes)(int64_t head_dim);
    /* Index of the first of n values that the format can't hold, or -1. */
    int64_t (*first_unfit)(const float *values, int64_t n);
    /* A row of head_dim floats into a page and back. Elements are `step` bytes apart: element_bytes, or
       page_tokens times that where K is transposed; blocks lie one after the other. What stands behind
       head_dim stays as it is. Called with the interpreter's lock and, to read, without it: neither takes
       a lock nor allocates. */
    void (*write)(unsigned char *at, int64_t step, const float *row, int64_t head_dim);
    void (*read)(float *row, const unsigned char *at, int64_t step, int64_t head_dim);
} kv_rows;

/* Name of the PyCapsule that hands a kv_rows to a RowFormat. */
#define KV_ROWS_CAPSULE "kvtrial.kv_rows"

#endif
