/* A row format's native half: how K and V rows of one head lie in a page, and how they go in and out.

   A format is this struct, in a PyCapsule, and a kernel (kv_kernel.h) that reads what `write` leaves; the
   record `kvtrial.hot.formats.RowFormat` names both. Nothing else in a store knows how a row is stored.

   A head's *tiles* in a page are its own: 2 * page_tokens * row_bytes bytes, K's tile first. How rows lie
   there is the format's choice; most have them one after the other, K's and then V's (kv_key_row,
   kv_value_row).

   0xFF in every byte of a row must read as NaN: a poisoned store fills rows without content so. */
#ifndef KV_ROWS_H
#define KV_ROWS_H

#include <stdint.h>

typedef struct kv_tiles {
    int64_t page_tokens, head_dim, row_bytes;
} kv_tiles;

typedef struct kv_rows kv_rows;
struct kv_rows {
    /* Half of the bytes that a K row and its V row take, all of theirs: padding and scales included. */
    int64_t (*row_bytes)(const kv_rows *format, int64_t head_dim);
    /* Index of the first of n values that the format can't hold, or -1. */
    int64_t (*first_unfit)(const kv_rows *format, const float *values, int64_t n);
    /* A token's K and V row of head_dim floats into its tiles and back. Called with the interpreter's lock and,
       to read, without it: neither takes a lock nor allocates. What belongs to other tokens stays as it is. */
    void (*write)(const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, const float *k,
                  const float *v);
    void (*read)(const kv_rows *format, const kv_tiles *tiles, const unsigned char *at, int64_t token, float *k,
                 float *v);
    /* A byte, or as many of its bits, into all that is the token's own. NULL where rows lie one after the other. */
    void (*fill)(const kv_rows *format, const kv_tiles *tiles, unsigned char *at, int64_t token, int byte);
    /* Bytes from the tiles' beginning to an element of a token's K row, where K and V are floats that can be
       written in place; V's rows then lie one after the other. NULL elsewhere. */
    int64_t (*key_offset)(const kv_tiles *tiles, int64_t token, int64_t element);
};

/* Bytes from the tiles' beginning to a row, where rows lie one after the other. */
static inline int64_t kv_key_row(const kv_tiles *tiles, int64_t token) { return token * tiles->row_bytes; }
static inline int64_t kv_value_row(const kv_tiles *tiles, int64_t token)
{
    return (tiles->page_tokens + token) * tiles->row_bytes;
}

/* Name of the PyCapsule that hands a kv_rows to a RowFormat. */
#define KV_ROWS_CAPSULE "kvtrial.kv_rows"

#endif
