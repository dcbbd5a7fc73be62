//! The kernel for K that lies `[token][dim]`: scores are sums across vectors.
//!
//! Up to three lanes share the registers of a step: the scores of all rows, four at a time, and after the
//! softmax the values, four vectors of columns at a time.

use crate::simd::{Lanes, F8};
use crate::tile::{Scores, State, Tile};

/// Lanes that share the registers of a step.
const STEP: usize = 3;

/// Lanes [0, n) in steps of (first, how many): 4 make two pairs rather than 3 and 1.
fn steps(n: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let lanes = if n - at == 4 { 2 } else { (n - at).min(STEP) };
        at += lanes;
        (lanes > 0).then_some((at - lanes, lanes))
    })
}

impl Tile {
    /// Adds the tile to `n` lanes, at most `BAND`.
    ///
    /// # Safety
    /// The tile is readable and its K tile not transposed; `q` and `state` hold n lanes.
    #[inline(always)]
    pub unsafe fn attend_by_rows(
        &mut self,
        q: *const f32,
        state: State,
        n: usize,
        scores: &mut Scores,
    ) {
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
            while column + 4 * F8::WIDTH <= self.stride {
                self.gather_all::<4>(state.acc, column, &scores[..n]);
                column += 4 * F8::WIDTH;
            }
            while column < self.stride {
                self.gather_all::<1>(state.acc, column, &scores[..n]);
                column += F8::WIDTH;
            }
        }
    }

    /// Adds the products of a vector of columns of 4 rows with N lanes.
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
        let pace = self.share(4 * N * self.stride / F8::WIDTH);
        for quad in (0..self.tokens).step_by(4) {
            self.ask_for(pace);
            if self.mask >> quad & 0xF == 0 {
                continue;
            }
            let mut acc = [[F8::splat(0.0); 4]; N];
            let whole = self.dim / F8::WIDTH * F8::WIDTH;
            for d in (0..whole).step_by(F8::WIDTH) {
                // SAFETY: rows [quad, quad + 4) and columns [d, d + WIDTH) lie in the tile.
                unsafe { self.dot(quad, d, q, &mut acc, |k| k) };
            }
            if whole < self.dim {
                // Padding may hold anything, NaN included.
                let tail = self.dim - whole;
                // SAFETY: as above, since rows are whole vectors, padding included.
                unsafe { self.dot(quad, whole, q, &mut acc, |k| k.first(tail)) };
            }
            for n in 0..N {
                let sums = F8::sum4(acc[n]).map(|x| x * self.scale);
                // SAFETY: quad + 4 <= tokens <= 64.
                unsafe { scores[n].as_mut_ptr().add(quad).cast::<[f32; 4]>().write(sums) };
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
        let pace = self.share(4 * N * C);
        let at = |n: usize, c: usize| n * stride + column + c * F8::WIDTH;
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
                let value = F8::load(row.add(c * F8::WIDTH));
                for n in 0..N {
                    sums[n][c] = sums[n][c].fma(weight[n], value);
                }
            }
        }
    }
}
