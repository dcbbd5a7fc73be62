//! Online softmax that rescales lazily: only when the maximum has grown by more than 8.
//!
//! K1 rescales its output each time the running maximum grows. A weight may as well be exp(score - m)
//! for an older maximum m, as long as it stays small enough to sum: exp(8) is about 3,000.

use std::slice;

/// `kv_span` of kvtrial's native/kv_kernel.h, field by field.
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

const SLACK: f32 = 8.0;
const LANES: usize = 8;

/// Eight sums side by side: strict floating point would otherwise forbid a vector register.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; LANES];
    let (a8, b8) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a8.zip(b8) {
        for i in 0..LANES {
            sums[i] += x[i] * y[i];
        }
    }
    sums.iter().sum::<f32>() + tail
}

/// One query head's running state: `top` is the true maximum, `scale_at` the one that weights are made with.
struct Softmax<'a> {
    top: f32,
    scale_at: f32,
    sum: f32,
    output: &'a mut [f32],
}

impl Softmax<'_> {
    fn rescale(&mut self, to: f32) {
        let keep = (self.scale_at - to).exp();
        self.sum *= keep;
        self.output.iter_mut().for_each(|o| *o *= keep);
        self.scale_at = to;
    }

    fn add(&mut self, score: f32, value: &[f32]) {
        if score == f32::NEG_INFINITY {
            self.top = self.top.max(f32::MIN); // a valid row, whose weight is 0
            return;
        }
        if !(score <= self.top) {
            self.top = score;
            if !(score <= self.scale_at + SLACK) {
                self.rescale(score);
            }
        }
        let weight = (score - self.scale_at).exp();
        self.sum += weight;
        self.output.iter_mut().zip(value).for_each(|(o, v)| *o += weight * v);
    }
}

/// A partial over one span.
///
/// # Safety
/// `span` and what it points to are as kv_kernel.h says, and nobody else writes `max`, `sum` and `output`.
#[no_mangle]
pub unsafe extern "C" fn lazy(span: *const Span) -> i32 {
    let span = &*span;
    let (dim, group, tokens) =
        (span.head_dim as usize, span.group as usize, i64::from(span.page_tokens));
    for head in span.first_head as usize..span.last_head as usize {
        for query in head * group..(head + 1) * group {
            let q = slice::from_raw_parts(span.q.add(query * dim), dim);
            let output = slice::from_raw_parts_mut(span.output.add(query * dim), dim);
            output.fill(0.0);
            let mut state =
                Softmax { top: f32::NEG_INFINITY, scale_at: f32::NEG_INFINITY, sum: 0.0, output };
            for slot in span.first_slot..span.last_slot {
                let (page, t) = ((slot / tokens) as usize, slot % tokens);
                if *span.valid.add(page) >> t & 1 == 0 {
                    continue; // its bytes may be anything, and its page may not be there
                }
                let offset = i64::from(*span.page_ids.add(page)) * span.page_bytes
                    + (2 * head as i64 * tokens + t) * span.row_bytes;
                let k = span.pool.offset(offset as isize);
                let v = k.offset((tokens * span.row_bytes) as isize);
                let score = span.scale * dot(q, slice::from_raw_parts(k.cast(), dim));
                state.add(score, slice::from_raw_parts(v.cast(), dim));
            }
            if state.top > state.scale_at && state.scale_at > f32::NEG_INFINITY {
                state.rescale(state.top);
            }
            *span.max.add(query) = state.top;
            *span.sum.add(query) = state.sum;
        }
    }
    0
}
