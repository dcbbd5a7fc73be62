//! What the kernels share: a tile, its mask, softmax and prefetch.
//!
//! The scores of the whole K tile come first, then one new maximum and at most one rescale a lane, then the
//! V tile. All the while the lines of the next tile are asked for, at an even pace: each step of four rows
//! asks for as much as its share of the tile's arithmetic, so that memory neither idles nor waits in line.

use crate::pool::Shape;
use crate::simd::{prefetch, Lanes, F8};
use crate::store::low_bits;

/// Lanes whose scores are kept at a time.
pub const BAND: usize = 16;
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

/// The exponential that the tiles use, one at a time.
pub fn exp(x: f32) -> f32 {
    let mut out = [0.0; F8::WIDTH];
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

/// One head of a page, for lanes that see the same slots.
pub struct Tile {
    pub k: *const f32,
    pub dim: usize,
    pub stride: usize,
    pub tokens: usize,
    pub mask: u64,
    pub scale: f32,
    /// Of the tile that is read next, lines before `asked` were asked for, those before `due` should be.
    asked: *const f32,
    due: *const f32,
    /// Floats to ask for while `sharing` lanes are done with a row; 0 without a next tile.
    pub ahead: usize,
    pub sharing: usize,
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

    /// Floats of the next tile to ask for with so many multiply-adds of vectors, rounded up: what is asked
    /// for beyond it is read soon too.
    ///
    /// A row's scores are as many for a lane as it has vectors, and its values too; its part of the softmax
    /// takes the time of two.
    #[inline(always)]
    pub fn share(&self, work: usize) -> usize {
        (work * self.ahead).div_ceil(self.sharing * (self.stride / F8::WIDTH + 1))
    }

    /// Prefetches lines of the next tile until `floats` more of it are asked for.
    #[inline(always)]
    pub fn ask_for(&mut self, floats: usize) {
        self.due = self.due.wrapping_add(floats);
        while self.asked < self.due {
            prefetch(self.asked);
            self.asked = self.asked.wrapping_add(LINE);
        }
    }

    /// Slots outside the mask score -inf, whatever lies there.
    #[inline(always)]
    pub fn hide(&self, scores: &mut [[f32; 64]]) {
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
    ///
    /// # Safety
    /// The lanes lie in the state.
    #[inline(always)]
    pub unsafe fn weigh(&mut self, scores: &mut [[f32; 64]], state: State) {
        let chunks = (0..self.tokens).step_by(F8::WIDTH);
        let pace = self.share(2 * self.tokens);
        for (first, four) in (0..).step_by(4).zip(scores.chunks_mut(4)) {
            // The maxima of four lanes first: one by one, each exp would wait for its own.
            let mut tops = [F8::splat(f32::NEG_INFINITY); 4];
            let mut sums = [F8::splat(0.0); 4];
            // SAFETY: `tokens` is a multiple of sixteen, at most 64; the lanes lie in the state.
            unsafe {
                for (lane, top) in four.iter().zip(&mut tops) {
                    for at in chunks.clone() {
                        *top = F8::load(lane.as_ptr().add(at)).max(*top);
                    }
                }
                let tops = F8::max4(tops);
                for (n, lane) in four.iter_mut().enumerate() {
                    self.ask_for(pace);
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
            for column in (0..self.stride).step_by(F8::WIDTH) {
                let at = state.acc.add(lane * self.stride + column);
                F8::load(at).mul(F8::splat(keep)).store(at);
            }
        }
    }
}
