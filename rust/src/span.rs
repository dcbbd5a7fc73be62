//! K4's door to the kernel: a span of pages that another owner holds (`kv_kernel.h`).

use crate::attend::{attend_pages, Pages, Query};
use crate::pool::Shape;
use crate::tile::State;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::slice;

const MAX_GROUP: usize = 16;
const MAX_HEAD_DIM: usize = 256;

/// The rows of one group, each vector in one cache line.
#[repr(align(64))]
struct Rows([f32; MAX_GROUP * MAX_HEAD_DIM]);

/// `kv_span`.
#[repr(C)]
pub struct Span {
    pool: *const u8,
    page_bytes: i64,
    page_ids: *const i32,
    valid: *const u64,
    first_slot: i64,
    last_slot: i64,
    row_bytes: i64,
    page_tokens: i32,
    head_dim: i32,
    group: i32,
    kv_heads: i32,
    first_head: i32,
    last_head: i32,
    scale: f32,
    q: *const f32,
    max: *mut f32,
    sum: *mut f32,
    output: *mut f32,
}

/// # Safety
/// The span is as `kv_kernel.h` describes it, with FP32 rows.
#[no_mangle]
pub unsafe extern "C" fn kvn_span_fp32(span: *const Span) -> i32 {
    // SAFETY: the caller's promise.
    let run = AssertUnwindSafe(|| unsafe { attend_span(&*span) });
    i32::from(catch_unwind(run).is_err())
}

/// # Safety
/// As `kvn_span_fp32`.
unsafe fn attend_span(span: &Span) {
    let (dim, group) = (span.head_dim as usize, span.group as usize);
    let shape = Shape {
        layers: 1,
        heads: span.kv_heads as usize,
        group,
        dim,
        stride: span.row_bytes as usize / 4,
        page_tokens: span.page_tokens as usize,
        transposed: false,
    };
    let first = span.first_slot as usize / shape.page_tokens;
    let last = shape.pages_for(span.last_slot);
    // SAFETY: the tables reach to the page of the last slot.
    let (ids, bits) = unsafe {
        (slice::from_raw_parts(span.page_ids, last), slice::from_raw_parts(span.valid, last))
    };
    let page_floats = span.page_bytes as usize / 4;
    let pages = Pages { shape, base: span.pool.cast(), page_floats, ids, bits };
    let query =
        Query { rows: 1, start: span.first_slot, limit: span.last_slot, scale: span.scale };
    let Rows(q) = &mut Rows([0.0; MAX_GROUP * MAX_HEAD_DIM]);
    let Rows(acc) = &mut Rows([0.0; MAX_GROUP * MAX_HEAD_DIM]);
    for head in span.first_head as usize..span.last_head as usize {
        // SAFETY: group and dim are inside the header's limits, and so the lanes inside q and acc;
        // the rows of this head lie in the caller's arrays.
        unsafe {
            for g in 0..group {
                let from = span.q.add((head * group + g) * dim);
                q.as_mut_ptr().add(g * shape.stride).copy_from_nonoverlapping(from, dim);
            }
            let (max, sum) = (span.max.add(head * group), span.sum.add(head * group));
            let state = State { max, sum, acc: acc.as_mut_ptr() };
            attend_pages(&pages, &query, q.as_ptr(), state, first..last, head..head + 1);
            for g in 0..group {
                let to = span.output.add((head * group + g) * dim);
                to.copy_from_nonoverlapping(acc.as_ptr().add(g * shape.stride), dim);
            }
        }
    }
}
