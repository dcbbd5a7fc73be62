/* The native arm's boundary. rust/src/ffi.rs defines it.
 *
 * Every call that returns int gives 0, or a kvn_code with its figures in *fault; after one the store is
 * as it was. Positions are absolute; arrays are C-contiguous. H is the store's own KV heads.
 */
#ifndef KVTRIAL_NATIVE_H
#define KVTRIAL_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#include "kv_kernel.h"

typedef struct kvn_store kvn_store;

typedef enum {
    KVN_PANIC = 1,             /* a bug; the store refuses every later call */
    KVN_NO_MEMORY = 2,         /* value: bytes */
    KVN_LAYER = 3,             /* value: layer; high: layers */
    KVN_NOT_ASCENDING = 4,     /* value: position; low: the one before it */
    KVN_POSITION = 5,          /* value: position; allowed: [low, high) */
    KVN_NOT_VALID = 6,         /* value: position without a valid row */
    KVN_HOLE_NOT_ALLOWED = 7,  /* value: position left out or invalidated */
    KVN_NO_PAGES = 8,          /* value: pages needed; low: free; high: in the pool */
    KVN_NO_SLOTS = 9,          /* value: session slots */
    KVN_STALE = 10,            /* value: generation of the handle; low: of the slot */
    KVN_STEP_INCOMPLETE = 11,  /* value: layer; low: where it stands; high: where layer 0 does */
    KVN_LAYER_AHEAD = 12,      /* value: layer; low: where it would stand; high: the one before */
    KVN_BRANCHES_OPEN = 13,    /* value: branches */
    KVN_BRANCH_DIVERGED = 14,  /* value: the fork */
    KVN_NOT_A_BRANCH = 15,
    KVN_COUNT = 16,            /* value: count; allowed: low to high */
    KVN_SLOT_CANCELLED = 17,   /* value: first position */
    KVN_RESTORING = 18,        /* value: rows of the open restore */
    KVN_NOT_RESTORING = 19,
    KVN_NOT_EMPTY = 20,        /* value: length */
    KVN_PAGE_INDEX = 21,       /* value: index; high: pages */
    KVN_HEADS = 22,            /* value: first head; allowed: [low, high] */
    KVN_SHAPE = 23,            /* value: argument; allowed: low to high */
    KVN_BUDGET = 24,           /* value: pages; allowed: low to high */
} kvn_code;

typedef struct {
    int32_t code;
    int64_t value, low, high;
} kvn_fault;

/* A session, or what is left of one. */
typedef struct {
    uint64_t generation;
    uint32_t slot;
} kvn_handle;

/* The rows of one slot: those of the first head, and floats from one thing to the next. */
typedef struct {
    float *k, *v;
    size_t k_element; /* from element to element of a K row; those of a V row are neighbours */
    size_t k_slot, v_slot;
    size_t head; /* from head to head, for both */
} kvn_rows;

/* A query (rows, q_heads, head_dim) and who computes. */
typedef struct {
    const float *q;
    int64_t q_heads;
    int64_t first_head; /* query heads before those of the store's first KV head */
    float scale;
    /* parallel_for of _threads.pyx, so that threads are the same in every arm */
    void (*parallel_for)(void (*task)(void *, int64_t), void *context, int64_t n, int threads);
    int64_t threads;
} kvn_call;

/* Bytes of a page, or 0 for a shape that can't be. */
int64_t kvn_page_nbytes(int64_t heads, int64_t dim, int64_t page_tokens);

/* transposed: K lies [dim][token] within its tile */
int kvn_open(int64_t layers, int64_t heads, int64_t group, int64_t dim, int64_t page_tokens,
             int transposed, int64_t base, int64_t pages, int poison, kvn_store **store,
             kvn_fault *fault);
/* Unmaps the pool: no pointer into it may be used afterwards. */
void kvn_free(kvn_store *store);

int kvn_open_session(kvn_store *, int holes, kvn_handle *handle, kvn_fault *);
int kvn_close_session(kvn_store *, kvn_handle, kvn_fault *);
/* For tests: what every session slot that is free is opened with next. */
int kvn_force_generation(kvn_store *, uint64_t generation, kvn_fault *);

/* k, v: (n, H, head_dim) */
int kvn_append(kvn_store *, kvn_handle, int64_t layer, const int64_t *positions, int64_t n,
               const float *k, const float *v, kvn_fault *);
int kvn_invalidate(kvn_store *, kvn_handle, int64_t layer, const int64_t *positions, int64_t n,
                   kvn_fault *);
/* rows->k: NULL when the slots can't be reserved */
int kvn_reserve(kvn_store *, kvn_handle, int64_t layer, const int64_t *positions, int64_t n,
                kvn_rows *rows, kvn_fault *);
int kvn_commit(kvn_store *, kvn_handle, int64_t layer, const int64_t *positions, int64_t n,
               kvn_fault *);
int kvn_read(kvn_store *, kvn_handle, int64_t layer, const int64_t *positions, int64_t n, float *k,
             float *v, kvn_fault *);

/* out: (q_heads, head_dim), of which the store's own heads are written */
int kvn_attend(kvn_store *, kvn_handle, int64_t layer, kvn_call, float *out, kvn_fault *);
/* out: (rows, q_heads, head_dim) */
int kvn_attend_block(kvn_store *, kvn_handle, int64_t layer, kvn_call, int64_t rows, float *out,
                     kvn_fault *);
/* KV heads [h0, h1) counted from the store's first, positions [p0, p1); max, sum: (q_heads,) */
int kvn_attend_partial(kvn_store *, kvn_handle, int64_t layer, kvn_call, int64_t h0, int64_t h1,
                       int64_t p0, int64_t p1, float *max, float *sum, float *out, kvn_fault *);

int kvn_length(kvn_store *, kvn_handle, int64_t layer, int64_t *length, kvn_fault *);
/* out: length - base bytes */
int kvn_valid(kvn_store *, kvn_handle, int64_t layer, uint8_t *out, kvn_fault *);
/* out: an id for each page that the length spans */
int kvn_page_table(kvn_store *, kvn_handle, int64_t layer, int32_t *out, kvn_fault *);

int kvn_begin_branch(kvn_store *, kvn_handle, kvn_handle *child, kvn_fault *);
int kvn_commit_prefix(kvn_store *, kvn_handle, int64_t k, kvn_fault *);
int kvn_rollback_tail(kvn_store *, kvn_handle, int64_t n, kvn_fault *);
int kvn_abandon_step(kvn_store *, kvn_handle, kvn_fault *);

/* *page: its start, or NULL for a page of holes; *valid: a bit for each of its rows */
int kvn_page(kvn_store *, kvn_handle, int64_t layer, int64_t index, const float **page,
             uint64_t *valid, kvn_fault *);
/* into: a page, with zeros for rows that are not valid */
int kvn_copy_page(kvn_store *, kvn_handle, int64_t layer, int64_t index, float *into, kvn_fault *);
/* valid: (layers, rows) of 0 or 1 */
int kvn_begin_restore(kvn_store *, kvn_handle, const uint8_t *valid, int64_t rows, kvn_fault *);
int kvn_restore_page(kvn_store *, kvn_handle, int64_t layer, int64_t index, float **page,
                     kvn_fault *);
int kvn_finish_restore(kvn_store *, kvn_handle, kvn_fault *);
int kvn_cancel_restore(kvn_store *, kvn_handle, kvn_fault *);

/* K4's kernel: FP32 pages that another owner holds. Nonzero: a bug, nothing to be used. */
int kvn_span_fp32(const kv_span *span);

/* out: a count for each page of the pool */
int kvn_reference_counts(kvn_store *, uint32_t *out, kvn_fault *);
int kvn_pages_free(kvn_store *, int64_t *pages, kvn_fault *);

#endif
