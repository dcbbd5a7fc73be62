//! Verbs that look and change nothing: attention, lengths, tables and pages.

use crate::attend::{attend, Output, Pages, Query, Threads, BLOCK};
use crate::fault::{Code, Fault};
use crate::store::{Store, NO_PAGE};
use std::ops::Range;

impl Store {
    fn pages(&self, s: usize, l: usize, length: i64) -> Pages<'_> {
        let n = self.shape.pages_for(length);
        let (ids, bits) = (&self.ids(s, l)[..n], &self.bits(s, l)[..n]);
        let page_floats = self.shape.page_floats();
        Pages { shape: self.shape, base: self.pool.base(), page_floats, ids, bits }
    }

    /// Attention of one query token over every valid row.
    ///
    /// # Safety
    /// `q` is readable and `out` writable for (q_heads, dim), where the store's own query heads start
    /// at `first_head`; `threads` is a live pool or empty.
    pub unsafe fn attend(
        &self,
        s: usize,
        l: usize,
        (q, q_heads, first_head): (*const f32, usize, usize),
        scale: f32,
        out: *mut f32,
        threads: Threads,
    ) -> Result<(), Fault> {
        let length = self.length(s, l);
        let query = Query { rows: 1, start: 0, limit: length, scale };
        let output = Output::Attention { out, q_heads, first_head };
        let (pages, heads) = (self.pages(s, l, length), 0..self.shape.heads);
        // SAFETY: the caller's promise; the scratch was sized for this shape and capacity.
        unsafe {
            let scratch = self.scratch.base();
            attend(pages, query, (q, q_heads, first_head), heads, &output, scratch, threads)
        }
    }

    /// Causal attention of the newest `rows` positions.
    ///
    /// # Safety
    /// As `attend`, with `q` and `out` of (rows, q_heads, dim).
    pub unsafe fn attend_block(
        &self,
        s: usize,
        l: usize,
        (q, q_heads, first_head): (*const f32, usize, usize),
        rows: usize,
        scale: f32,
        out: *mut f32,
        threads: Threads,
    ) -> Result<(), Fault> {
        let length = self.visible_length(s, l);
        if rows as i64 > length {
            return Err(Fault::of(Code::Count, rows as i64, 0, length));
        }
        for first in (0..rows).step_by(BLOCK) {
            let limit = length - (rows - first) as i64 + 1;
            let query = Query { rows: BLOCK.min(rows - first), start: 0, limit, scale };
            let (pages, heads) = (self.pages(s, l, length), 0..self.shape.heads);
            // SAFETY: as in `attend`, for rows [first, first + query.rows).
            unsafe {
                let row = first * q_heads * self.shape.dim;
                let output = Output::Attention { out: out.add(row), q_heads, first_head };
                let (q, scratch) = ((q.add(row), q_heads, first_head), self.scratch.base());
                attend(pages, query, q, heads, &output, scratch, threads)?;
            }
        }
        Ok(())
    }

    /// Attention over local KV heads and positions, not divided.
    ///
    /// # Safety
    /// As `attend`, with `max` and `sum` writable for (q_heads,).
    pub unsafe fn attend_partial(
        &self,
        s: usize,
        l: usize,
        (q, q_heads, first_head): (*const f32, usize, usize),
        scale: f32,
        heads: Range<usize>,
        positions: Range<i64>,
        (max, sum, out): (*mut f32, *mut f32, *mut f32),
        threads: Threads,
    ) -> Result<(), Fault> {
        // A part that ends below the store's first position is empty.
        let limit = self.length(s, l).min(positions.end).max(0);
        let start = positions.start.clamp(0, limit);
        let query = Query { rows: 1, start, limit, scale };
        let output = Output::Partial { max, sum, out, first_head };
        let pages = self.pages(s, l, limit);
        // SAFETY: as in `attend`.
        unsafe {
            let scratch = self.scratch.base();
            attend(pages, query, (q, q_heads, first_head), heads, &output, scratch, threads)
        }
    }

    /// Fills `out` with 1 where a row is valid.
    pub fn valid(&self, s: usize, l: usize, out: &mut [u8]) {
        for (position, valid) in out.iter_mut().enumerate() {
            let (index, slot) = self.shape.place(position as i64);
            *valid = (self.entry(s, l, index).1 >> slot & 1) as u8;
        }
    }

    /// A page of the layer at a step boundary, and a bit for each valid row; `NO_PAGE` for one of holes.
    pub fn page_at(&self, s: usize, l: usize, index: i64) -> Result<(i32, u64), Fault> {
        self.at_boundary(s)?;
        let pages = self.shape.pages_for(self.length(s, l)) as i64;
        if !(0..pages).contains(&index) {
            return Err(Fault::of(Code::PageIndex, index, 0, pages));
        }
        let (id, bits) = self.entry(s, l, index as usize);
        Ok((if bits == 0 { NO_PAGE } else { id }, bits))
    }
}
