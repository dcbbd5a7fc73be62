//! Pages that are filled from outside.

use crate::fault::{Code, Fault};
use crate::store::{Store, NO_PAGE};

impl Store {
    /// Takes pages for the rows marked in `valid`, (layers, rows), 0 for a hole, in an empty session.
    /// Nothing is visible until `finish_restore`.
    pub fn begin_restore(&mut self, s: usize, valid: &[u8], rows: usize) -> Result<(), Fault> {
        let shape = self.shape;
        let used = (0..shape.layers).find(|&l| self.layer(s, l).end > 0);
        if used.is_some() || self.sessions[s].parent.is_some() {
            let end = self.layer(s, used.unwrap_or(0)).end;
            return Err(Fault::of(Code::NotEmpty, end + self.base, 0, 0));
        }
        // A branch's commit would replace the pages that are being filled.
        let branches = i64::from(self.sessions[s].branches);
        if branches > 0 {
            return Err(Fault::of(Code::BranchesOpen, branches, 0, 0));
        }
        if rows as i64 > self.capacity() {
            return Err(Fault::of(Code::Count, rows as i64, 0, self.capacity()));
        }
        if !self.sessions[s].holes {
            if let Some(hole) = valid.iter().position(|&bit| bit == 0) {
                let position = self.base + (hole % rows) as i64;
                return Err(Fault::of(Code::HoleNotAllowed, position, 0, 0));
            }
        }
        let layers = || valid.chunks_exact(rows.max(1));
        let needed = layers()
            .flat_map(|layer| layer.chunks(shape.page_tokens))
            .filter(|page| page.iter().any(|&bit| bit != 0))
            .count();
        self.room_for(s, needed)?;
        self.cancel_all(s);
        for (l, layer) in layers().enumerate() {
            for (index, page) in layer.chunks(shape.page_tokens).enumerate() {
                self.extend_to(s, l, index);
                let bits = page.iter().rev().fold(0, |bits, &bit| bits << 1 | u64::from(bit != 0));
                if bits != 0 {
                    let id = self.pool.take();
                    self.set_entry(s, l, index, id, bits);
                }
            }
        }
        self.sessions[s].restoring = Some(rows as i64);
        Ok(())
    }

    fn restoring(&self, s: usize) -> Result<i64, Fault> {
        self.sessions[s].restoring.ok_or(Fault::of(Code::NotRestoring, 0, 0, 0))
    }

    /// Makes the restored rows valid.
    pub fn finish_restore(&mut self, s: usize) -> Result<(), Fault> {
        let rows = self.restoring(s)?;
        self.sessions[s].restoring = None;
        for l in 0..self.shape.layers {
            for index in 0..self.layer(s, l).pages {
                let (id, bits) = self.entry(s, l, index);
                if id == NO_PAGE {
                    continue;
                }
                for slot in 0..self.shape.page_tokens {
                    if bits >> slot & 1 == 0 {
                        self.pool.poison_rows(id, slot..slot + 1);
                    }
                }
            }
            self.layer_mut(s, l).end = rows;
        }
        self.sessions[s].version += 1;
        Ok(())
    }

    /// Gives the pages of an unfinished restore back.
    pub fn cancel_restore(&mut self, s: usize) -> Result<(), Fault> {
        self.restoring(s)?;
        self.sessions[s].restoring = None;
        for l in 0..self.shape.layers {
            self.release_from(s, l, 0);
        }
        Ok(())
    }
}
