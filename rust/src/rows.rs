//! Verbs on rows: append, invalidate, reserve, commit and read.

use crate::fault::{Code, Fault};
use crate::store::{low_bits, Slot, Store, NO_PAGE};

impl Store {
    /// Checks that positions ascend strictly, start at or behind `from` and stay inside capacity.
    fn check_new(&self, s: usize, positions: &[i64], from: i64) -> Result<(), Fault> {
        let (base, capacity) = (self.base, self.capacity());
        if let Some(pair) = positions.windows(2).find(|pair| pair[1] <= pair[0]) {
            return Err(Fault::of(Code::NotAscending, pair[1], pair[0], 0));
        }
        let mut expected = from + base;
        for &position in positions {
            if !(from..capacity).contains(&position.wrapping_sub(base)) {
                return Err(Fault::of(Code::Position, position, from + base, capacity + base));
            }
            if position != expected && !self.sessions[s].holes {
                return Err(Fault::of(Code::HoleNotAllowed, expected, 0, 0));
            }
            expected = position + 1;
        }
        Ok(())
    }

    /// Whether writing to this entry takes a page, once open reservations are cancelled.
    fn takes_page(&self, s: usize, l: usize, index: usize) -> bool {
        let (id, bits) = self.entry(s, l, index);
        let only_reserved = bits == 0
            && matches!(self.layer(s, l).slot,
                        Slot::Open { start, .. } if self.shape.place(start).0 == index);
        id == NO_PAGE || only_reserved || self.pool.is_shared(id)
    }

    /// `NoPages` unless `needed` pages are free, or will be once the session's reservations are
    /// cancelled.
    pub fn room_for(&self, s: usize, needed: usize) -> Result<(), Fault> {
        let mut free = self.pool.free();
        if self.sessions[s].open_slots > 0 {
            free += (0..self.shape.layers).filter(|&l| self.reserved_only(s, l)).count();
        }
        if needed > free {
            let pages = self.pool.pages() as i64;
            return Err(Fault::of(Code::NoPages, needed as i64, free as i64, pages));
        }
        Ok(())
    }

    /// Stores rows `k`, `v` of (n, heads, dim) at `positions`.
    ///
    /// # Safety
    /// `k` and `v` are readable for positions.len() * heads * dim floats, outside the pool.
    pub unsafe fn append(
        &mut self,
        s: usize,
        l: usize,
        positions: &[i64],
        k: *const f32,
        v: *const f32,
    ) -> Result<(), Fault> {
        let Some(&last) = positions.last() else { return Ok(()) };
        let shape = self.shape;
        self.check_new(s, positions, self.layer(s, l).end)?;
        let end = last - self.base + 1;
        self.in_turn(s, l, end)?;

        let mut needed = 0;
        let mut previous = usize::MAX;
        for &position in positions {
            let (index, _) = shape.place(position - self.base);
            if index != previous {
                needed += usize::from(self.takes_page(s, l, index));
                previous = index;
            }
        }
        self.room_for(s, needed)?;

        self.cancel_all(s);
        self.cancel(s, l);
        let row = shape.heads * shape.dim;
        for (i, &position) in positions.iter().enumerate() {
            let (index, slot) = shape.place(position - self.base);
            let id = self.copy_on_write(s, l, index);
            // SAFETY: the caller's promise, row i of n.
            unsafe { self.pool.write(id, slot, k.add(i * row), v.add(i * row)) };
            let bits = self.bits(s, l)[index] | 1 << slot;
            self.set_bits(s, l, index, bits);
        }
        self.layer_mut(s, l).end = end;
        self.sessions[s].version += 1;
        Ok(())
    }

    /// Makes holes of rows below the layer's end; one that is a hole stays one. A page left with holes
    /// alone is given back.
    pub fn invalidate(&mut self, s: usize, l: usize, positions: &[i64]) -> Result<(), Fault> {
        let end = self.layer(s, l).end;
        if !self.sessions[s].holes {
            let first = positions.first().copied().unwrap_or(end + self.base);
            return Err(Fault::of(Code::HoleNotAllowed, first, 0, 0));
        }
        let outside = |p: &&i64| !(0..end).contains(&p.wrapping_sub(self.base));
        if let Some(&position) = positions.iter().find(outside) {
            return Err(Fault::of(Code::Position, position, self.base, self.base + end));
        }
        if positions.is_empty() {
            return Ok(());
        }
        self.cancel_all(s);
        self.cancel(s, l);
        for &position in positions {
            let (index, slot) = self.shape.place(position - self.base);
            let (id, bits) = self.entry(s, l, index);
            if bits == 1 << slot {
                self.release_entry(s, l, index);
            } else {
                self.set_entry(s, l, index, id, bits & !(1 << slot));
            }
        }
        self.sessions[s].version += 1;
        Ok(())
    }

    /// Reserves rows for direct writing: their page and first slot, or None when they are not
    /// contiguous inside one page and capacity.
    pub fn reserve(
        &mut self,
        s: usize,
        l: usize,
        positions: &[i64],
    ) -> Result<Option<(i32, usize)>, Fault> {
        let (Some(&first), Some(&last)) = (positions.first(), positions.last()) else {
            return Ok(None);
        };
        let n = positions.len() as i64;
        let start = first.wrapping_sub(self.base);
        let contiguous = positions.windows(2).all(|pair| pair[1] == pair[0].wrapping_add(1));
        let end = self.layer(s, l).end;
        let behind = if self.sessions[s].holes { start >= end } else { start == end };
        if !contiguous || !behind || last >= self.base + self.capacity() {
            return Ok(None);
        }
        let (index, slot) = self.shape.place(start);
        if slot + positions.len() > self.shape.page_tokens {
            return Ok(None);
        }
        self.in_turn(s, l, start + n)?;
        self.room_for(s, usize::from(self.takes_page(s, l, index)))?;

        self.cancel_all(s);
        self.cancel(s, l);
        let id = self.copy_on_write(s, l, index);
        self.pool.poison_rows(id, slot..slot + positions.len());
        self.layer_mut(s, l).slot = Slot::Open { start, n };
        self.sessions[s].open_slots += 1;
        self.sessions[s].version += 1;
        Ok(Some((id, slot)))
    }

    /// Makes reserved rows valid.
    pub fn commit(&mut self, s: usize, l: usize, positions: &[i64]) -> Result<(), Fault> {
        let Some(&first) = positions.first() else { return Ok(()) };
        let (start, n) = (first.wrapping_sub(self.base), positions.len() as i64);
        let contiguous = positions.windows(2).all(|pair| pair[1] == pair[0].wrapping_add(1));
        match self.layer(s, l).slot {
            Slot::Committed { start: a, n: m } if contiguous && (a, m) == (start, n) => Ok(()),
            Slot::Open { start: a, n: m } if contiguous && (a, m) == (start, n) => {
                let (index, slot) = self.shape.place(start);
                let bits = self.bits(s, l)[index] | low_bits(positions.len()) << slot;
                self.set_bits(s, l, index, bits);
                let layer = self.layer_mut(s, l);
                layer.slot = Slot::Committed { start, n };
                layer.end = start + n;
                self.sessions[s].open_slots -= 1;
                self.sessions[s].version += 1;
                Ok(())
            }
            _ => Err(Fault::of(Code::SlotCancelled, first, 0, 0)),
        }
    }

    /// Copies valid rows out.
    ///
    /// # Safety
    /// `k` and `v` are writable for positions.len() * heads * dim floats, outside the pool.
    pub unsafe fn read(
        &self,
        s: usize,
        l: usize,
        positions: &[i64],
        k: *mut f32,
        v: *mut f32,
    ) -> Result<(), Fault> {
        let length = self.length(s, l);
        for &position in positions {
            let relative = position.wrapping_sub(self.base);
            if !(0..length).contains(&relative) {
                return Err(Fault::of(Code::Position, position, self.base, self.base + length));
            }
            let (index, slot) = self.shape.place(relative);
            if self.entry(s, l, index).1 >> slot & 1 == 0 {
                return Err(Fault::of(Code::NotValid, position, self.base, self.base + length));
            }
        }
        let row = self.shape.heads * self.shape.dim;
        for (i, &position) in positions.iter().enumerate() {
            let (index, slot) = self.shape.place(position - self.base);
            // SAFETY: the caller's promise, row i of n.
            unsafe { self.pool.read(self.ids(s, l)[index], slot, k.add(i * row), v.add(i * row)) };
        }
        Ok(())
    }
}
