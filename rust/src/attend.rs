//! The attention kernel: one pass over the pages with an online softmax.
//!
//! Each page is read once for all query lanes of a KV head, which is what `tile` does. Positions are cut
//! into spans of fixed size, which are merged in their order: the thread count changes who computes a
//! span, never what.

use crate::fault::{Code, Fault};
use crate::pool::Shape;
use crate::simd::{Lanes, F8};
use crate::store::low_bits;
use crate::tile::{exp, finite_or_zero, State, Tile, BAND};
use std::ffi::c_void;
use std::ops::Range;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};

/// Positions of a span. Changing it changes results in their last bits.
pub const SPAN: usize = 1024;
/// Query rows that share one pass over the pages.
pub const BLOCK: usize = 8;

/// `parallel_for` of `_threads.pyx`: runs `task(context, i)` for each i in [0, n) on up to `threads` threads, and
/// returns when all are done.
pub type ParallelFor =
    unsafe extern "C" fn(extern "C" fn(*mut c_void, i64), *mut c_void, i64, i32);

/// Who shares the work.
#[derive(Clone, Copy)]
pub struct Threads {
    pub run: Option<ParallelFor>,
    pub count: usize,
}

/// One layer's pages as the kernel reads them.
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    pub shape: Shape,
    pub base: *const f32,
    /// From page to page.
    pub page_floats: usize,
    pub ids: &'a [i32],
    pub bits: &'a [u64],
}

/// A block of query rows. Lanes are (head, row, query head of the group), in this order.
#[derive(Clone, Copy)]
pub struct Query {
    pub rows: usize,
    /// Row i sees the positions [start, limit + i).
    pub start: i64,
    pub limit: i64,
    pub scale: f32,
}

impl Query {
    /// Groups the block's lanes by what they see of a page, whose first position is `first`: runs of
    /// (lanes, mask). The lanes before the runs see nothing; a later row never sees less.
    fn runs<'a>(
        &self,
        first: i64,
        bits: u64,
        group: usize,
        runs: &'a mut [(usize, u64); BLOCK],
    ) -> &'a [(usize, u64)] {
        let below = |end: i64| low_bits((end - first).clamp(0, 64) as usize);
        let mut n = 0;
        for row in 0..self.rows {
            let mask = bits & below(self.limit + row as i64) & !below(self.start);
            if mask == 0 {
                continue;
            }
            if n == 0 || runs[n - 1].1 != mask {
                runs[n] = (0, mask);
                n += 1;
            }
            runs[n - 1].0 += group;
        }
        &runs[..n]
    }
}

/// Work space of one attend: the padded query block, then one state a span.
pub fn scratch_bytes(shape: &Shape, capacity: usize) -> usize {
    let lanes = shape.heads * shape.group * BLOCK;
    let spans = capacity.div_ceil(SPAN);
    size_of::<f32>() * (lanes * shape.stride + spans * State::floats(lanes, shape.stride))
}

/// Where results go. Query heads are the model's; the first of this store is `first_head`.
pub enum Output {
    /// (rows, q_heads, dim)
    Attention { out: *mut f32, q_heads: usize, first_head: usize },
    /// (q_heads,), (q_heads,), (q_heads, dim), of one row
    Partial { max: *mut f32, sum: *mut f32, out: *mut f32, first_head: usize },
}

/// What the units of one attend share.
struct Job<'a> {
    pages: Pages<'a>,
    query: Query,
    q: *const f32,
    states: *mut f32,
    lanes: usize,
    heads: Range<usize>,
    /// Spans [first, first + n) of the layer, each cut into `parts` ranges of heads.
    first_span: usize,
    parts: usize,
    /// A unit panicked.
    failed: AtomicBool,
}

impl Job<'_> {
    /// # Safety
    /// The state of span `span` lies in the scratch.
    unsafe fn state(&self, span: usize) -> State {
        let stride = self.pages.shape.stride;
        // SAFETY: the scratch holds a state for each span of the capacity.
        unsafe {
            let at = self.states.add(span * State::floats(self.lanes, stride));
            State::at(at, self.lanes, stride)
        }
    }
}

extern "C" fn run_unit(context: *mut c_void, unit: i64) {
    // SAFETY: `attend` passes a Job that outlives the parallel loop, and units only read it.
    let job = unsafe { &*context.cast::<Job>() };
    let run = AssertUnwindSafe(|| {
        let (span, part) = (unit as usize / job.parts, unit as usize % job.parts);
        let heads = job.heads.len();
        let cut = |part: usize| job.heads.start + heads * part / job.parts;
        let per_span = SPAN / job.pages.shape.page_tokens;
        let first = (job.first_span + span) * per_span;
        let last = (first + per_span).min(job.pages.ids.len());
        let heads = cut(part)..cut(part + 1);
        let Shape { group, stride, .. } = job.pages.shape;
        let lane = heads.start * job.query.rows * group;
        // SAFETY: a unit writes the lanes of its own heads in the state of its own span.
        unsafe {
            let (q, state) = (job.q.add(lane * stride), job.state(span).skip(lane, stride));
            attend_pages(&job.pages, &job.query, q, state, first..last, heads);
        }
    });
    // A panic must not unwind into the thread pool, which is not Rust.
    if catch_unwind(run).is_err() {
        job.failed.store(true, Ordering::Relaxed);
    }
}

/// Attention of `query.rows` rows over `heads` of one layer.
///
/// # Safety
/// `q` is readable for (rows, q_heads, dim) and `output` writable for its shapes; `scratch` holds
/// `scratch_bytes` and nobody else uses it; every page id lies in the pool behind `pages.base`.
pub unsafe fn attend(
    pages: Pages,
    query: Query,
    (q, q_heads, first_head): (*const f32, usize, usize),
    heads: Range<usize>,
    output: &Output,
    scratch: *mut f32,
    threads: Threads,
) -> Result<(), Fault> {
    let Shape { group, dim, stride, page_tokens, .. } = pages.shape;
    let lanes = pages.shape.heads * query.rows * group;
    let lane = |head: usize, row: usize, g: usize| (head * query.rows + row) * group + g;
    // SAFETY: lanes <= heads * group * BLOCK, for which the scratch was sized; row and query head are
    // inside the caller's q.
    unsafe {
        for head in heads.clone() {
            for row in 0..query.rows {
                for g in 0..group {
                    let from = q.add((row * q_heads + first_head + head * group + g) * dim);
                    let to = scratch.add(lane(head, row, g) * stride);
                    to.copy_from_nonoverlapping(from, dim);
                    to.add(dim).write_bytes(0, stride - dim);
                }
            }
        }
    }
    let end = (query.limit + query.rows as i64 - 1).min((pages.ids.len() * page_tokens) as i64);
    let first_span = query.start as usize / SPAN;
    let spans = (end.max(0) as usize).div_ceil(SPAN).saturating_sub(first_span);
    let parts = if spans >= threads.count { 1 } else { heads.len().min(threads.count) };
    let job = Job {
        pages,
        query,
        q: scratch,
        // SAFETY: the states lie behind the query block.
        states: unsafe { scratch.add(pages.shape.heads * group * BLOCK * stride) },
        lanes,
        heads: heads.clone(),
        first_span,
        parts,
        failed: AtomicBool::new(false),
    };
    let context = (&raw const job).cast_mut().cast::<c_void>();
    let units = (spans * parts) as i64;
    match threads.run {
        // SAFETY: `run` returns after the last unit, so `job` outlives its use.
        Some(run) if threads.count > 1 && units > 1 => unsafe {
            run(run_unit, context, units, threads.count as i32);
        },
        _ => (0..units).for_each(|unit| run_unit(context, unit)),
    }
    if job.failed.load(Ordering::Relaxed) {
        return Err(Fault::of(Code::Panic, 0, 0, 0));
    }
    for head in heads {
        for row in 0..query.rows {
            for g in 0..group {
                let q_head = head * group + g;
                // SAFETY: all units are done; the lane and the output row are inside their arrays.
                unsafe { finish(&job, spans, lane(head, row, g), row, q_head, output) };
            }
        }
    }
    Ok(())
}

/// Merges a lane's spans in their order and writes its row.
///
/// # Safety
/// As `attend`; every unit is done.
unsafe fn finish(
    job: &Job,
    spans: usize,
    lane: usize,
    row: usize,
    q_head: usize,
    output: &Output,
) {
    let Shape { dim, stride, .. } = job.pages.shape;
    let mut total = 0.0;
    let mut top = f32::NEG_INFINITY;
    let mut joined = [0.0_f32; 256];
    // SAFETY: lane < job.lanes, and stride <= 256; output rows as the caller promises.
    unsafe {
        for span in 0..spans {
            top = top.max(*job.state(span).max.add(lane));
        }
        for span in 0..spans {
            let state = job.state(span);
            let sum = *state.sum.add(lane);
            if sum == 0.0 {
                continue;
            }
            let weight = exp(*state.max.add(lane) - finite_or_zero(top));
            total += weight * sum;
            let acc = state.acc.add(lane * stride);
            for (i, x) in joined[..dim].iter_mut().enumerate() {
                *x += weight * *acc.add(i);
            }
        }
        match *output {
            Output::Attention { out, q_heads, first_head } => {
                let out = out.add((row * q_heads + first_head + q_head) * dim);
                for (i, x) in joined[..dim].iter().enumerate() {
                    *out.add(i) = if total == 0.0 { 0.0 } else { x / total };
                }
            }
            Output::Partial { max, sum, out, first_head } => {
                *max.add(first_head + q_head) = top;
                *sum.add(first_head + q_head) = total;
                let out = out.add((first_head + q_head) * dim);
                out.copy_from_nonoverlapping(joined.as_ptr(), dim);
            }
        }
    }
}

/// Attention of all lanes of `heads` over the entries `entries`, from an empty state.
///
/// # Safety
/// `q` holds the padded lanes of `heads`, `state` their state; the pages behind the ids are readable.
pub unsafe fn attend_pages(
    pages: &Pages,
    query: &Query,
    q: *const f32,
    state: State,
    entries: Range<usize>,
    heads: Range<usize>,
) {
    let kernel =
        if pages.shape.transposed { attend_pages_in::<true> } else { attend_pages_in::<false> };
    // SAFETY: passed on.
    unsafe { kernel(pages, query, q, state, entries, heads) }
}

/// `attend_pages` for K tiles that are transposed or not: one kernel a function, since each needs all registers.
///
/// # Safety
/// As `attend_pages`; rows are whole vectors, padding included.
#[inline(never)]
unsafe fn attend_pages_in<const TRANSPOSED: bool>(
    pages: &Pages,
    query: &Query,
    q: *const f32,
    state: State,
    entries: Range<usize>,
    heads: Range<usize>,
) {
    let shape = &pages.shape;
    let (stride, per_head) = (shape.stride, query.rows * shape.group);
    debug_assert!(stride % F8::WIDTH == 0);
    let page_of = |id: i32| pages.base.wrapping_add(id as usize * pages.page_floats);
    // SAFETY: lanes, heads and entries are inside their arrays, as the caller promises.
    unsafe {
        for lane in 0..heads.len() * per_head {
            *state.max.add(lane) = f32::NEG_INFINITY;
            *state.sum.add(lane) = 0.0;
            state.acc.add(lane * stride).write_bytes(0, stride);
        }
        let mut scores = [[0.0_f32; 64]; BAND];
        for index in entries.clone() {
            let first = (index * shape.page_tokens) as i64;
            let mut runs = [(0, 0); BLOCK];
            let runs = query.runs(first, pages.bits[index], shape.group, &mut runs);
            if pages.ids[index] < 0 || runs.is_empty() {
                continue;
            }
            let visible = runs.iter().map(|run| run.0).sum::<usize>();
            let page = page_of(pages.ids[index]);
            let following = match pages.ids.get(index + 1) {
                Some(&id) if id >= 0 && index + 1 < entries.end => page_of(id),
                _ => std::ptr::null(),
            };
            for head in heads.clone() {
                let next = if head + 1 < heads.end {
                    page.add(shape.tile_offset(head + 1))
                } else if following.is_null() {
                    following
                } else {
                    following.wrapping_add(shape.tile_offset(heads.start))
                };
                let k = page.add(shape.tile_offset(head));
                let mut tile = Tile::new(shape, k, query.scale, next, visible);
                let mut lane = (head - heads.start) * per_head + per_head - visible;
                for &(lanes, mask) in runs {
                    tile.mask = mask;
                    let end = lane + lanes;
                    while lane < end {
                        let n = (end - lane).min(BAND);
                        let (q, state) = (q.add(lane * stride), state.skip(lane, stride));
                        if TRANSPOSED {
                            tile.attend_by_panels(q, state, n, &mut scores);
                        } else {
                            tile.attend_by_rows(q, state, n, &mut scores);
                        }
                        lane += n;
                    }
                }
            }
        }
    }
}
