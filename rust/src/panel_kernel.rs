//! The kernel for K that lies `[dim][token]`: scores and values are one operation, a panel product
//!
//!     sums (lanes, columns) += factors (lanes, rows) * panel (rows, columns)
//!
//! with queries and the K tile, then with weights and the V tile. A vector of a panel row serves all lanes
//! of a block, each factor is broadcast, and nothing is summed across a vector. A block is up to five lanes
//! by two vectors of columns, or up to two lanes by four: enough sums to keep the multiply-adds busy, which
//! have to be eight at a time, and few enough for sixteen registers.

use crate::simd::{Lanes, F8};
use crate::store::low_bits;
use crate::tile::{Scores, State, Tile};

/// One product for a band of lanes: all strides in floats.
struct Panel {
    rows: *const f32,
    row_stride: usize,
    n: usize,
    /// A multiple of `WIDTH`.
    columns: usize,
    /// A lane's factors, one a row, are neighbours.
    factors: *const f32,
    factor_stride: usize,
    sums: *mut f32,
    sum_stride: usize,
}

/// Lanes of the next block, where `left` are. An odd number begins with five: what is left is even then,
/// and neither three nor one, which keep too few sums, is among it.
fn lanes_of_block(left: usize) -> usize {
    match left {
        0..=5 => left,
        _ if left % 2 == 1 => 5,
        _ => 4,
    }
}

impl Tile {
    /// Adds the tile to `n` lanes, at most `BAND`.
    ///
    /// # Safety
    /// The tile is readable and its K tile transposed; `q` and `state` hold n lanes.
    #[inline(always)]
    pub unsafe fn attend_by_panels(
        &mut self,
        q: *const f32,
        state: State,
        n: usize,
        scores: &mut Scores,
    ) {
        let apart = scores[0].len();
        let keys = Panel {
            rows: self.k,
            row_stride: self.tokens,
            n: self.dim,
            columns: self.tokens,
            factors: q,
            factor_stride: self.stride,
            sums: scores.as_mut_ptr().cast(),
            sum_stride: apart,
        };
        // SAFETY: the K tile has `stride` >= dim rows of `tokens` floats, a lane of q is `stride` long, and
        // one of the scores 64 >= tokens.
        unsafe { self.multiply::<true>(&keys, n) };
        self.hide(&mut scores[..n]);
        // SAFETY: passed on.
        unsafe { self.weigh(&mut scores[..n], state) };
        // Runs of slots inside the mask: no weight, not even 0, keeps a NaN out.
        let mut left = self.mask;
        while left != 0 {
            let first = left.trailing_zeros() as usize;
            let run = (left >> first).trailing_ones() as usize;
            left &= !(low_bits(run) << first);
            // SAFETY: slots [first, first + run) are the mask's, so below `tokens`: their V rows of
            // `stride` floats lie behind the K tile, their weights in the scores; a lane of the state is
            // `stride` long.
            unsafe {
                let values = Panel {
                    rows: self.k.add((self.tokens + first) * self.stride),
                    row_stride: self.stride,
                    n: run,
                    columns: self.stride,
                    factors: scores.as_ptr().cast::<f32>().add(first),
                    factor_stride: apart,
                    sums: state.acc,
                    sum_stride: self.stride,
                };
                self.multiply::<false>(&values, n);
            }
        }
    }

    /// The product for `n` lanes. `SCORES` begin with zero and end with the scale; values are added to what
    /// is there.
    ///
    /// # Safety
    /// The panel and n lanes of factors are readable, and n lanes of sums writable.
    #[inline(always)]
    unsafe fn multiply<const SCORES: bool>(&mut self, panel: &Panel, n: usize) {
        let mut lane = 0;
        while lane < n {
            let lanes = lanes_of_block(n - lane);
            // SAFETY: passed on, for lanes [lane, lane + lanes) of n.
            unsafe {
                match lanes {
                    5 => self.columns::<5, SCORES>(panel, lane),
                    4 => self.columns::<4, SCORES>(panel, lane),
                    3 => self.columns::<3, SCORES>(panel, lane),
                    2 => self.columns::<2, SCORES>(panel, lane),
                    _ => self.columns::<1, SCORES>(panel, lane),
                }
            }
            lane += lanes;
        }
    }

    /// All columns for N lanes.
    ///
    /// # Safety
    /// As `multiply`, for lanes [lane, lane + N).
    #[inline(always)]
    unsafe fn columns<const N: usize, const SCORES: bool>(&mut self, panel: &Panel, lane: usize) {
        let mut column = 0;
        // SAFETY: passed on; each block ends at `columns` at the latest.
        unsafe {
            while N <= 2 && column + 4 * F8::WIDTH <= panel.columns {
                self.block::<N, 4, SCORES>(panel, lane, column);
                column += 4 * F8::WIDTH;
            }
            while column + 2 * F8::WIDTH <= panel.columns {
                self.block::<N, 2, SCORES>(panel, lane, column);
                column += 2 * F8::WIDTH;
            }
            if column < panel.columns {
                self.block::<N, 1, SCORES>(panel, lane, column);
            }
        }
    }

    /// The product of N lanes and C vectors of columns.
    ///
    /// # Safety
    /// As `columns`; column + C * WIDTH is inside the panel.
    #[inline(always)]
    unsafe fn block<const N: usize, const C: usize, const SCORES: bool>(
        &mut self,
        panel: &Panel,
        lane: usize,
        column: usize,
    ) {
        let pace = self.share(4 * N * C);
        let mut sums = [[F8::splat(0.0); C]; N];
        // SAFETY: the caller's promise: rows below n, lanes and columns of the block.
        unsafe {
            let out = panel.sums.add(lane * panel.sum_stride + column);
            let at = |n: usize, c: usize| out.add(n * panel.sum_stride + c * F8::WIDTH);
            let add_row = |row: usize, sums: &mut [[F8; C]; N]| {
                let from = panel.rows.add(row * panel.row_stride + column);
                let values: [F8; C] = std::array::from_fn(|c| F8::load(from.add(c * F8::WIDTH)));
                let factors = panel.factors.add(lane * panel.factor_stride + row);
                for n in 0..N {
                    let factor = F8::splat(*factors.add(n * panel.factor_stride));
                    for c in 0..C {
                        sums[n][c] = sums[n][c].fma(factor, values[c]);
                    }
                }
            };
            if !SCORES {
                for n in 0..N {
                    for c in 0..C {
                        sums[n][c] = F8::load(at(n, c));
                    }
                }
            }
            let whole = panel.n / 4 * 4;
            for quad in (0..whole).step_by(4) {
                self.ask_for(pace);
                for row in quad..quad + 4 {
                    add_row(row, &mut sums);
                }
            }
            for row in whole..panel.n {
                add_row(row, &mut sums);
            }
            for n in 0..N {
                for c in 0..C {
                    let sum = sums[n][c];
                    (if SCORES { sum.mul(F8::splat(self.scale)) } else { sum }).store(at(n, c));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_make_up_the_lanes_and_few_are_small() {
        for n in 1..=16 {
            let mut blocks = vec![];
            while blocks.iter().sum::<usize>() < n {
                blocks.push(lanes_of_block(n - blocks.iter().sum::<usize>()));
            }
            assert_eq!(blocks.iter().sum::<usize>(), n);
            let small = blocks.iter().filter(|lanes| [1, 3].contains(lanes)).count();
            assert_eq!(small, usize::from(n == 1 || n == 3), "{n} lanes: {blocks:?}");
        }
    }
}
