//! The kernel on one tile: the K and V rows of one head in one page, into a running softmax.
//!
//! Up to three lanes share the registers of a step. The scores of the whole K tile come first, then one
//! new maximum and at most one rescale a lane, then the V tile, four vectors of columns at a time. All
//! the while the lines of the next tile are asked for, at an even pace: each step of four rows asks for
//! as much as its share of the tile's arithmetic, so that memory neither idles nor waits in line.

use crate::pool::Shape;
use crate::simd::{F8, WIDTH};
use crate::store::low_bits;

/// Lanes whose scores are kept at a time.
pub const BAND: usize = 16;
/// Lanes that share the registers of a step.
const STEP: usize = 3;
/// Floats of a cache line.
const LINE: usize = 16;

/// Scores of a band, and then weights.
pub type Scores = [[f32; 64]; BAND];

/// Running softmax of all lanes: maximum, sum, and the weighted V rows, not divided.
#[derive(Clone, Copy)]
pub struct State {
    pub max: *mut f32,
    pub sum: *mut f32,
    pub acc: *mut f32,
}

impl State {
    /// The state from lane `lane` on.
    pub fn skip(self, lane: usize, stride: usize) -> State {
        State {
            max: self.max.wrapping_add(lane),
            sum: self.sum.wrapping_add(lane),
            acc: self.acc.wrapping_add(lane * stride),
        }
    }

    /// In whole cache lines: a vector of `acc` then lies in one line, not in two.
    pub fn floats(lanes: usize, stride: usize) -> usize {
        (lanes * (stride + 2)).next_multiple_of(LINE)
    }

    /// # Safety
    /// `at` is writable for `State::floats(lanes, stride)`.
    pub unsafe fn at(at: *mut f32, lanes: usize, stride: usize) -> State {
        // SAFETY: the three arrays fill the caller's space one after the other.
        unsafe { State { acc: at, max: at.add(lanes * stride), sum: at.add(lanes * (stride + 1)) } }
    }
}

/// The same exponential as the tiles use.
pub fn exp(x: f32) -> f32 {
    let mut out = [0.0; WIDTH];
    // SAFETY: `out` holds eight floats.
    unsafe { F8::splat(x).exp().store(out.as_mut_ptr()) };
    out[0]
}

/// What scores are compared with: where all of them are -inf, 0 keeps inf - inf away.
pub fn finite_or_zero(max: f32) -> f32 {
    if max == f32::NEG_INFINITY {
        0.0
    } else {
        max
    }
}

/// Lanes [0, n) in steps of (first, how many): 4 make two pairs rather than 3 and 1.
fn steps(n: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let lanes = if n - at == 4 { 2 } else { (n - at).min(STEP) };
        at += lanes;
        (lanes > 0).then_some((at - lanes, lanes))
    })
}

/// One head of a page, for lanes that see the same slots.
pub struct Tile {
    k: *const f32,
    dim: usize,
    stride: usize,
    tokens: usize,
    pub mask: u64,
    scale: f32,
    /// Of the tile that is read next, lines before `asked` were asked for, those before `due` should be.
    asked: *const f32,
    due: *const f32,
    /// Floats to ask for while `sharing` lanes are done with a row; 0 without a next tile.
    ahead: usize,
    sharing: usize,
}

impl Tile {
    /// The tile at `k`; the one at `next`, or null, is read after `sharing` lanes are done with this.
    pub fn new(shape: &Shape, k: *const f32, scale: f32, next: *const f32, sharing: usize) -> Tile {
        Tile {
            k,
            dim: shape.dim,
            stride: shape.stride,
            tokens: shape.page_tokens,
            mask: 0,
            scale,
            asked: next,
            due: next,
            ahead: if next.is_null() { 0 } else { shape.stride },
            sharing,
        }
    }

    /// Adds the tile to `n` lanes, at most `BAND`.
    ///
    /// # Safety
    /// The tile is readable; `q` and `state` hold n lanes.
    #[inline(always)]
    pub unsafe fn attend(&mut self, q: *const f32, state: State, n: usize, scores: &mut Scores) {
        // SAFETY: passed on.
        unsafe {
            for (lane, lanes) in steps(n) {
                let (q, scores) = (q.add(lane * self.stride), &mut scores[lane..lane + lanes]);
                match lanes {
                    3 => self.score::<3>(q, scores),
                    2 => self.score::<2>(q, scores),
                    _ => self.score::<1>(q, scores),
                }
            }
            self.hide(&mut scores[..n]);
            self.weigh(&mut scores[..n], state);
            let mut column = 0;
            while column + 4 * WIDTH <= self.stride {
                self.gather_all::<4>(state.acc, column, &scores[..n]);
                column += 4 * WIDTH;
            }
            while column < self.stride {
                self.gather_all::<1>(state.acc, column, &scores[..n]);
                column += WIDTH;
            }
        }
    }

    /// Prefetches lines of the next tile until `floats` more of it are asked for.
    #[inline(always)]
    fn ask_for(&mut self, floats: usize) {
        self.due = self.due.wrapping_add(floats);
        while self.asked < self.due {
            F8::prefetch(self.asked);
            self.asked = self.asked.wrapping_add(LINE);
        }
    }

    /// Adds the products of 8 columns of 4 rows with N lanes.
    #[inline(always)]
    unsafe fn dot<const N: usize>(
        &self,
        quad: usize,
        d: usize,
        q: *const f32,
        acc: &mut [[F8; 4]; N],
        keep: impl Fn(F8) -> F8,
    ) {
        for r in 0..4 {
            // SAFETY: the rows and columns lie in the tile; a lane of q is `stride` long.
            unsafe {
                let k = keep(F8::load(self.k.add((quad + r) * self.stride + d)));
                for n in 0..N {
                    acc[n][r] = acc[n][r].fma(k, F8::load(q.add(n * self.stride + d)));
                }
            }
        }
    }

    /// Scores of all slots that the mask shows.
    #[inline(always)]
    unsafe fn score<const N: usize>(&mut self, q: *const f32, scores: &mut [[f32; 64]]) {
        let pace = 4 * N * self.ahead / self.sharing;
        for quad in (0..self.tokens).step_by(4) {
            self.ask_for(pace);
            if self.mask >> quad & 0xF == 0 {
                continue;
            }
            let mut acc = [[F8::splat(0.0); 4]; N];
            let whole = self.dim / WIDTH * WIDTH;
            for d in (0..whole).step_by(WIDTH) {
                // SAFETY: rows [quad, quad + 4) and columns [d, d + 8) lie in the tile.
                unsafe { self.dot(quad, d, q, &mut acc, |k| k) };
            }
            if whole < self.dim {
                // Padding may hold anything, NaN included.
                let tail = self.dim - whole;
                // SAFETY: as above, since rows are padded to whole vectors.
                unsafe { self.dot(quad, whole, q, &mut acc, |k| k.first(tail)) };
            }
            for n in 0..N {
                let sums = F8::sum4(acc[n]).map(|x| x * self.scale);
                // SAFETY: quad + 4 <= tokens <= 64.
                unsafe { scores[n].as_mut_ptr().add(quad).cast::<[f32; 4]>().write(sums) };
            }
        }
    }

    /// Slots outside the mask score -inf, whatever lies there.
    #[inline(always)]
    fn hide(&self, scores: &mut [[f32; 64]]) {
        let mut hidden = !self.mask & low_bits(self.tokens);
        while hidden != 0 {
            let slot = hidden.trailing_zeros() as usize;
            for lane in &mut *scores {
                lane[slot] = f32::NEG_INFINITY;
            }
            hidden &= hidden - 1;
        }
    }

    /// Turns scores into weights and updates each lane's maximum and sum; where the maximum rises, what
    /// was gathered before shrinks.
    #[inline(always)]
    unsafe fn weigh(&self, scores: &mut [[f32; 64]], state: State) {
        let chunks = (0..self.tokens).step_by(WIDTH);
        for (first, four) in (0..).step_by(4).zip(scores.chunks_mut(4)) {
            // The maxima of four lanes first: one by one, each exp would wait for its own.
            let mut tops = [F8::splat(f32::NEG_INFINITY); 4];
            let mut sums = [F8::splat(0.0); 4];
            // SAFETY: `tokens` is a multiple of eight, at most 64; the lanes lie in the state.
            unsafe {
                for (lane, top) in four.iter().zip(&mut tops) {
                    for at in chunks.clone() {
                        *top = F8::load(lane.as_ptr().add(at)).max(*top);
                    }
                }
                let tops = F8::max4(tops);
                for (n, lane) in four.iter_mut().enumerate() {
                    let max = state.max.add(first + n);
                    // f32::max leaves NaN out; a NaN score shows in the sum.
                    let top = (*max).max(tops[n]);
                    if top > *max {
                        self.shrink(state, first + n, exp(*max - top));
                        *max = top;
                    }
                    let shift = F8::splat(finite_or_zero(top));
                    for at in chunks.clone() {
                        let score = lane.as_mut_ptr().add(at);
                        let weights = F8::load(score).sub(shift).exp();
                        weights.store(score);
                        sums[n] = sums[n].add(weights);
                    }
                }
                for (n, sum) in F8::sum4(sums).into_iter().take(four.len()).enumerate() {
                    *state.sum.add(first + n) += sum;
                }
            }
        }
    }

    /// Multiplies what a lane has gathered by `keep`.
    #[inline(always)]
    unsafe fn shrink(&self, state: State, lane: usize, keep: f32) {
        // SAFETY: the lane lies in the state.
        unsafe {
            *state.sum.add(lane) *= keep;
            for column in (0..self.stride).step_by(WIDTH) {
                let at = state.acc.add(lane * self.stride + column);
                F8::load(at).mul(F8::splat(keep)).store(at);
            }
        }
    }

    /// `gather` for every lane.
    #[inline(always)]
    unsafe fn gather_all<const C: usize>(
        &mut self,
        acc: *mut f32,
        column: usize,
        weights: &[[f32; 64]],
    ) {
        for (lane, lanes) in steps(weights.len()) {
            // SAFETY: passed on.
            unsafe {
                let (acc, weights) = (acc.add(lane * self.stride), &weights[lane..lane + lanes]);
                match lanes {
                    3 => self.gather::<3, C>(acc, column, weights),
                    2 => self.gather::<2, C>(acc, column, weights),
                    _ => self.gather::<1, C>(acc, column, weights),
                }
            }
        }
    }

    /// Adds the weighted V rows to N lanes, C vectors from `column` on.
    #[inline(always)]
    unsafe fn gather<const N: usize, const C: usize>(
        &mut self,
        acc: *mut f32,
        column: usize,
        weights: &[[f32; 64]],
    ) {
        let stride = self.stride;
        let pace = 4 * N * C * WIDTH * self.ahead / (self.sharing * stride);
        let at = |n: usize, c: usize| n * stride + column + c * WIDTH;
        let mut sums = [[F8::splat(0.0); C]; N];
        // SAFETY: slots of the mask and columns below stride lie in the tile and in the lanes.
        unsafe {
            for n in 0..N {
                for c in 0..C {
                    sums[n][c] = F8::load(acc.add(at(n, c)));
                }
            }
            for quad in (0..self.tokens).step_by(4) {
                self.ask_for(pace);
                let mut left = self.mask >> quad & 0xF;
                if left == 0xF {
                    for slot in quad..quad + 4 {
                        self.add_row(slot, column, weights, &mut sums);
                    }
                    continue;
                }
                while left != 0 {
                    let slot = quad + left.trailing_zeros() as usize;
                    self.add_row(slot, column, weights, &mut sums);
                    left &= left - 1;
                }
            }
            for n in 0..N {
                for c in 0..C {
                    sums[n][c].store(acc.add(at(n, c)));
                }
            }
        }
    }

    /// One weighted V row onto the sums.
    #[inline(always)]
    unsafe fn add_row<const N: usize, const C: usize>(
        &self,
        slot: usize,
        column: usize,
        weights: &[[f32; 64]],
        sums: &mut [[F8; C]; N],
    ) {
        // SAFETY: as for `gather`; slot < tokens <= 64.
        unsafe {
            let row = self.k.add((self.tokens + slot) * self.stride + column);
            let weight: [F8; N] =
                std::array::from_fn(|n| F8::splat(*weights[n].as_ptr().add(slot)));
            for c in 0..C {
                let value = F8::load(row.add(c * WIDTH));
                for n in 0..N {
                    sums[n][c] = sums[n][c].fma(weight[n], value);
                }
            }
        }
    }
}
