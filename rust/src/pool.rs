//! The page pool: page ids, reference counts and the free list over one region of memory; and where in
//! their page rows lie, which nothing else knows but the kernels.
//!
//! A page holds P tokens of one layer, head-major: for each local KV head a K tile (P, stride), then its V
//! tile (P, stride). A transposed K tile is (stride, P). Rows are padded to `stride`; the padding may hold
//! anything and takes part in nothing.

use crate::fault::{Code, Fault};
use crate::memory::Memory;
use crate::simd::{Lanes, F8};

/// What a page looks like.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: usize,
    /// KV heads that this store holds.
    pub heads: usize,
    /// Query heads per KV head.
    pub group: usize,
    pub dim: usize,
    /// Floats from row to row: `dim` rounded up to whole vectors.
    pub stride: usize,
    pub page_tokens: usize,
    /// Whether K lies `[dim][token]` within its tile.
    pub transposed: bool,
}

/// The rows of one slot: those of the first head, and floats from one thing to the next. `kvn_rows`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub k: *mut f32,
    pub v: *mut f32,
    /// From element to element of a K row; those of a V row are neighbours.
    pub k_element: usize,
    /// From slot to slot.
    pub k_slot: usize,
    pub v_slot: usize,
    /// From head to head, for both.
    pub head: usize,
}

impl Rows {
    /// What stands for rows that there are not.
    pub const NONE: Rows = Rows {
        k: std::ptr::null_mut(),
        v: std::ptr::null_mut(),
        k_element: 0,
        k_slot: 0,
        v_slot: 0,
        head: 0,
    };

    /// The K and the V row of a head of the page.
    fn of_head(&self, head: usize) -> (*mut f32, *mut f32) {
        (self.k.wrapping_add(head * self.head), self.v.wrapping_add(head * self.head))
    }
}

/// Copies `n` floats to where they are `to_step` apart from where they are `from_step` apart.
///
/// # Safety
/// Both places are good for that, and don't overlap.
#[inline]
unsafe fn copy(from: *const f32, from_step: usize, to: *mut f32, to_step: usize, n: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if from_step == 1 && to_step == 1 {
            to.copy_from_nonoverlapping(from, n);
            return;
        }
        for i in 0..n {
            to.add(i * to_step).write(from.add(i * from_step).read());
        }
    }
}

impl Shape {
    pub fn new(
        layers: usize,
        heads: usize,
        group: usize,
        dim: usize,
        page_tokens: usize,
        transposed: bool,
    ) -> Result<Shape, Fault> {
        for (value, high) in [(layers, 4096), (heads, 4096), (group, 16), (dim, 256)] {
            if !(1..=high).contains(&value) {
                return Err(Fault::of(Code::Shape, value as i64, 1, high as i64));
            }
        }
        if ![16, 32, 64].contains(&page_tokens) {
            return Err(Fault::of(Code::Shape, page_tokens as i64, 16, 64));
        }
        let stride = dim.next_multiple_of(F8::WIDTH);
        Ok(Shape { layers, heads, group, dim, stride, page_tokens, transposed })
    }

    pub fn tile_floats(&self) -> usize {
        self.page_tokens * self.stride
    }

    pub fn page_floats(&self) -> usize {
        2 * self.heads * self.tile_floats()
    }

    pub fn page_bytes(&self) -> usize {
        4 * self.page_floats()
    }

    /// Float offset in its page of a head's K tile; its V tile lies `tile_floats` behind.
    pub fn tile_offset(&self, head: usize) -> usize {
        2 * head * self.tile_floats()
    }

    /// The rows of a slot in a page.
    ///
    /// # Safety
    /// `page` is good for a page.
    unsafe fn rows(&self, page: *mut f32, slot: usize) -> Rows {
        assert!(slot < self.page_tokens, "slot {slot} is not in a page");
        let (k_element, k_slot) =
            if self.transposed { (self.page_tokens, 1) } else { (1, self.stride) };
        let v_slot = self.stride;
        // SAFETY: the slot is inside the shape, so both rows lie inside the page.
        unsafe {
            let k = page.add(slot * k_slot);
            let v = page.add(self.tile_floats() + slot * v_slot);
            Rows { k, v, k_element, k_slot, v_slot, head: self.tile_offset(1) }
        }
    }

    /// Fills a slot's rows and their padding with one value.
    ///
    /// # Safety
    /// `page` is writable for a page.
    unsafe fn fill(&self, page: *mut f32, slot: usize, value: f32) {
        // SAFETY: the caller's promise; i < stride, the length of a row.
        unsafe {
            let rows = self.rows(page, slot);
            for head in 0..self.heads {
                let (k_row, v_row) = rows.of_head(head);
                for i in 0..self.stride {
                    k_row.add(i * rows.k_element).write(value);
                    v_row.add(i).write(value);
                }
            }
        }
    }

    /// Pages that the first `rows` positions span.
    pub fn pages_for(&self, rows: i64) -> usize {
        (rows as usize).div_ceil(self.page_tokens)
    }

    /// Page index and slot in it of a position relative to the store's base.
    pub fn place(&self, position: i64) -> (usize, usize) {
        (position as usize / self.page_tokens, position as usize % self.page_tokens)
    }
}

pub struct Pool {
    shape: Shape,
    memory: Memory,
    /// Table entries that point to each page. Invariant: 0 exactly for pages that are free.
    references: Vec<u32>,
    /// Pages given back; capacity for all, so that a push never allocates.
    freed: Vec<u32>,
    /// Pages from here on were never taken.
    fresh: usize,
    /// Debug switch: rows without content are NaN, so that a use of one shows.
    poison: bool,
}

impl Pool {
    pub fn new(shape: Shape, pages: usize, poison: bool) -> Result<Pool, Fault> {
        if pages == 0 || pages > i32::MAX as usize {
            return Err(Fault::of(Code::Budget, pages as i64, 1, i64::from(i32::MAX)));
        }
        let bytes = pages.checked_mul(shape.page_bytes());
        let refused = || Fault::of(Code::NoMemory, bytes.unwrap_or(0) as i64, 0, 0);
        let memory = Memory::new(bytes.ok_or_else(refused)?, true)?;
        let mut freed = Vec::new();
        freed.try_reserve_exact(pages).map_err(|_| refused())?;
        let mut references = Vec::new();
        references.try_reserve_exact(pages).map_err(|_| refused())?;
        references.resize(pages, 0);
        Ok(Pool { shape, memory, references, freed, fresh: 0, poison })
    }

    pub fn pages(&self) -> usize {
        self.references.len()
    }

    pub fn free(&self) -> usize {
        self.freed.len() + self.pages() - self.fresh
    }

    pub fn references(&self) -> &[u32] {
        &self.references
    }

    pub fn base(&self) -> *const f32 {
        self.memory.base()
    }

    pub fn page(&self, id: i32) -> *mut f32 {
        assert!((id as usize) < self.pages(), "page id {id} is not in the pool");
        // SAFETY: the id is in the pool, so the offset lies inside the region.
        unsafe { self.memory.base::<f32>().add(id as usize * self.shape.page_floats()) }
    }

    /// A free page with one reference. Callers count first, so an empty pool is a bug.
    pub fn take(&mut self) -> i32 {
        let id = self.freed.pop().unwrap_or_else(|| {
            self.fresh += 1;
            (self.fresh - 1) as u32
        });
        assert_eq!(self.references[id as usize], 0, "page {id} was free and referenced");
        self.references[id as usize] = 1;
        if self.poison {
            self.fill_nan(id as i32);
        }
        id as i32
    }

    pub fn share(&mut self, id: i32) {
        assert!(self.references[id as usize] > 0, "page {id} is free");
        self.references[id as usize] += 1;
    }

    pub fn is_shared(&self, id: i32) -> bool {
        self.references[id as usize] > 1
    }

    pub fn release(&mut self, id: i32) {
        let count = &mut self.references[id as usize];
        assert!(*count > 0, "page {id} was released twice");
        *count -= 1;
        if *count == 0 {
            self.freed.push(id as u32);
            if self.poison {
                self.fill_nan(id);
            }
        }
    }

    /// Copies a whole page.
    pub fn copy(&mut self, from: i32, to: i32) {
        assert_ne!(from, to);
        // SAFETY: two different pages of the pool, which do not overlap; `page` checks the ids.
        unsafe {
            self.page(from).copy_to_nonoverlapping(self.page(to), self.shape.page_floats());
        }
    }

    /// The rows of a slot.
    pub fn rows(&self, id: i32, slot: usize) -> Rows {
        // SAFETY: the pool's pages are as long as its shape says.
        unsafe { self.shape.rows(self.page(id), slot) }
    }

    /// Copies a page to `into`, with zeros where a slot's bit in `valid` is 0: what lies there may be
    /// another session's.
    ///
    /// # Safety
    /// `into` is writable for a page and lies outside the pool.
    pub unsafe fn copy_valid(&self, id: i32, valid: u64, into: *mut f32) {
        // SAFETY: the caller's promise; both are a page long.
        unsafe {
            into.copy_from_nonoverlapping(self.page(id), self.shape.page_floats());
            for slot in (0..self.shape.page_tokens).filter(|slot| valid >> slot & 1 == 0) {
                self.shape.fill(into, slot, 0.0);
            }
        }
    }

    /// Writes one token's rows, `k` and `v` of (heads, dim).
    ///
    /// # Safety
    /// `k` and `v` are readable for heads * dim floats and lie outside the page.
    pub unsafe fn write(&mut self, id: i32, slot: usize, k: *const f32, v: *const f32) {
        let Shape { heads, dim, .. } = self.shape;
        let rows = self.rows(id, slot);
        for head in 0..heads {
            let (k_row, v_row) = rows.of_head(head);
            // SAFETY: the caller's promise for the sources; a row holds `stride` >= dim floats.
            unsafe {
                copy(k.add(head * dim), 1, k_row, rows.k_element, dim);
                copy(v.add(head * dim), 1, v_row, 1, dim);
            }
        }
    }

    /// Copies one token's rows out.
    ///
    /// # Safety
    /// `k` and `v` are writable for heads * dim floats and lie outside the page.
    pub unsafe fn read(&self, id: i32, slot: usize, k: *mut f32, v: *mut f32) {
        let Shape { heads, dim, .. } = self.shape;
        let rows = self.rows(id, slot);
        for head in 0..heads {
            let (k_row, v_row) = rows.of_head(head);
            // SAFETY: the caller's promise for the targets; a row holds `stride` >= dim floats.
            unsafe {
                copy(k_row, rows.k_element, k.add(head * dim), 1, dim);
                copy(v_row, 1, v.add(head * dim), 1, dim);
            }
        }
    }

    /// With the debug switch on, makes NaN of rows that hold nothing (any more).
    pub fn poison_rows(&mut self, id: i32, slots: std::ops::Range<usize>) {
        if !self.poison {
            return;
        }
        for slot in slots {
            // SAFETY: the pool's pages are as long as its shape says.
            unsafe { self.shape.fill(self.page(id), slot, f32::NAN) };
        }
    }

    fn fill_nan(&mut self, id: i32) {
        self.poison_rows(id, 0..self.shape.page_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back_once() {
        let shape = Shape::new(1, 2, 3, 5, 16, false).unwrap();
        let mut pool = Pool::new(shape, 2, false).unwrap();
        let (a, b) = (pool.take(), pool.take());
        assert_eq!((a, b, pool.free()), (0, 1, 0));
        pool.share(a);
        pool.release(a);
        assert_eq!(pool.free(), 0);
        pool.release(a);
        assert_eq!((pool.free(), pool.take()), (1, a));
        assert_eq!(pool.references(), [1, 1]);
    }

    #[test]
    fn a_second_release_is_a_bug() {
        let shape = Shape::new(1, 1, 1, 8, 16, false).unwrap();
        let mut pool = Pool::new(shape, 1, false).unwrap();
        let id = pool.take();
        pool.release(id);
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pool.release(id))).is_err());
    }

    #[test]
    fn a_row_lies_where_its_layout_says_and_comes_back() {
        for transposed in [false, true] {
            let shape = Shape::new(1, 2, 1, 5, 16, transposed).unwrap();
            let mut pool = Pool::new(shape, 1, true).unwrap();
            let id = pool.take();
            let k: [f32; 10] = std::array::from_fn(|i| i as f32);
            let v = k.map(|x| -x);
            let (mut k_back, mut v_back) = ([0.0; 10], [0.0; 10]);
            // SAFETY: two heads of five floats each; the page is as long as its shape says.
            let page = unsafe {
                pool.write(id, 3, k.as_ptr(), v.as_ptr());
                pool.read(id, 3, k_back.as_mut_ptr(), v_back.as_mut_ptr());
                std::slice::from_raw_parts(pool.page(id), shape.page_floats())
            };
            assert_eq!((k_back, v_back), (k, v));
            // Tiles of 16 tokens by 8 floats: K and V of the first head, then of the second.
            for (i, x) in k.into_iter().enumerate() {
                let (head, element) = (i / 5, i % 5);
                let at = if transposed { element * 16 + 3 } else { 3 * 8 + element };
                assert_eq!(page[head * 256 + at], x);
                assert_eq!(page[head * 256 + 128 + 3 * 8 + element], -x);
            }
            assert_eq!(page.iter().filter(|x| !x.is_nan()).count(), 20);
            pool.poison_rows(id, 3..4);
            // SAFETY: as above.
            let page = unsafe { std::slice::from_raw_parts(pool.page(id), shape.page_floats()) };
            assert!(page.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn offsets_do_not_wrap_at_two_gigabytes() {
        let shape = Shape::new(1, 9, 1, 240, 64, false).unwrap();
        assert_eq!(7768 * shape.page_bytes(), 7768 * 4 * 2 * 9 * 64 * 240);
        let pool = Pool::new(shape, 7769, false).unwrap();
        let last = pool.page(7768) as usize - pool.page(0) as usize;
        assert_eq!(last, 8_590_786_560);
    }
}
