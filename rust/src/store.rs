//! The store: sessions over one pool, their page tables and bitmaps, and who may touch them.
//!
//! Positions in here are relative to the store's base; the boundary (`ffi`) converts. Every table is
//! reserved at open for the whole capacity, so that no verb allocates.

use crate::fault::{Code, Fault};
use crate::memory::Memory;
use crate::pool::{Pool, Shape};

/// Sessions and branches that may be open at once: the contract's SESSIONS.
pub const SESSION_SLOTS: usize = 64;
/// Positions that a session can address at least, whatever the pool holds.
const MIN_CAPACITY: usize = 65536;
/// A table entry without a page: it holds only holes.
pub const NO_PAGE: i32 = -1;

/// A reservation of rows in one layer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    Idle,
    Open { start: i64, n: i64 },
    /// Remembered so that the same commit again changes nothing.
    Committed { start: i64, n: i64 },
}

#[derive(Clone, Copy)]
pub struct LayerTable {
    /// Position after the last appended row: what steps are counted by.
    pub end: i64,
    /// Table entries in use. Invariant: entries from here on have no meaning.
    pub pages: usize,
    pub slot: Slot,
}

const EMPTY: LayerTable = LayerTable { end: 0, pages: 0, slot: Slot::Idle };

#[derive(Clone, Copy)]
pub struct Parent {
    pub session: usize,
    /// The parent's length when the branch began, and its version.
    pub fork: i64,
    pub version: u64,
}

#[derive(Clone, Copy)]
pub struct Session {
    /// Counts the owners of this slot, and wraps: a stale handle differs from the next owner's.
    pub generation: u64,
    pub open: bool,
    pub holes: bool,
    pub parent: Option<Parent>,
    pub branches: u32,
    /// Open reservations over all layers.
    pub open_slots: u32,
    /// Rows of an open restore.
    pub restoring: Option<i64>,
    /// Goes up whenever rows are reserved, appear, vanish or become holes.
    pub version: u64,
}

const CLOSED: Session = Session {
    generation: 0,
    open: false,
    holes: false,
    parent: None,
    branches: 0,
    open_slots: 0,
    restoring: None,
    version: 0,
};

pub struct Store {
    pub shape: Shape,
    pub base: i64,
    pub pool: Pool,
    pub sessions: Vec<Session>,
    layers: Vec<LayerTable>,
    /// Pages of one (session, layer) table.
    table_pages: usize,
    page_ids: Memory,
    valid: Memory,
    /// Work space of the kernel; see `attend`.
    pub scratch: Memory,
    /// Set when a panic was caught: invariants may not hold.
    pub broken: bool,
}

/// The lowest `n` bits.
pub fn low_bits(n: usize) -> u64 {
    if n >= 64 {
        !0
    } else {
        (1 << n) - 1
    }
}

impl Store {
    pub fn new(shape: Shape, base: i64, pages: usize, poison: bool) -> Result<Store, Fault> {
        let pool = Pool::new(shape, pages, poison)?;
        let table_pages = (MIN_CAPACITY / shape.page_tokens).max(pages);
        let entries = table_pages
            .checked_mul(shape.layers * SESSION_SLOTS)
            .ok_or(Fault::of(Code::NoMemory, 0, 0, 0))?;
        Ok(Store {
            shape,
            base,
            pool,
            sessions: vec![CLOSED; SESSION_SLOTS],
            layers: vec![EMPTY; SESSION_SLOTS * shape.layers],
            table_pages,
            page_ids: Memory::new(entries * size_of::<i32>(), false)?,
            valid: Memory::new(entries * size_of::<u64>(), false)?,
            scratch: Memory::new(
                crate::attend::scratch_bytes(&shape, table_pages * shape.page_tokens),
                false,
            )?,
            broken: false,
        })
    }

    /// Positions that a session can address.
    pub fn capacity(&self) -> i64 {
        (self.table_pages * self.shape.page_tokens) as i64
    }

    // --- sessions ---------------------------------------------------------------------------------

    /// The session behind a handle, or `Stale`.
    pub fn session(&self, slot: u32, generation: u64) -> Result<usize, Fault> {
        let s = slot as usize;
        match self.sessions.get(s) {
            Some(session) if session.open && session.generation == generation => Ok(s),
            found => {
                let current = found.map_or(0, |session| session.generation);
                Err(Fault::of(Code::Stale, generation as i64, current as i64, 0))
            }
        }
    }

    /// As `session`, for verbs that a session with an open restore refuses.
    pub fn settled(&self, slot: u32, generation: u64) -> Result<usize, Fault> {
        let s = self.session(slot, generation)?;
        match self.sessions[s].restoring {
            Some(rows) => Err(Fault::of(Code::Restoring, rows, 0, 0)),
            None => Ok(s),
        }
    }

    pub fn open_session(&mut self, holes: bool) -> Result<usize, Fault> {
        let s = (self.sessions.iter().position(|session| !session.open))
            .ok_or(Fault::of(Code::NoSlots, SESSION_SLOTS as i64, 0, 0))?;
        let generation = self.sessions[s].generation.wrapping_add(1);
        self.sessions[s] = Session { generation, open: true, holes, ..CLOSED };
        for l in 0..self.shape.layers {
            *self.layer_mut(s, l) = EMPTY;
        }
        Ok(s)
    }

    /// For tests: what every session slot that is free is opened with next.
    pub fn force_generation(&mut self, generation: u64) {
        for session in self.sessions.iter_mut().filter(|session| !session.open) {
            session.generation = generation.wrapping_sub(1);
        }
    }

    /// Gives every page back. An open restore is cancelled by it.
    pub fn close_session(&mut self, s: usize) -> Result<(), Fault> {
        self.at_boundary(s)?;
        if self.sessions[s].branches > 0 {
            let branches = i64::from(self.sessions[s].branches);
            return Err(Fault::of(Code::BranchesOpen, branches, 0, 0));
        }
        self.discard(s);
        Ok(())
    }

    /// Releases what the session holds and frees its slot.
    pub fn discard(&mut self, s: usize) {
        for l in 0..self.shape.layers {
            self.release_from(s, l, 0);
        }
        if let Some(parent) = self.sessions[s].parent {
            self.sessions[parent.session].branches -= 1;
        }
        self.sessions[s].open = false;
    }

    // --- layers and tables --------------------------------------------------------------------------

    pub fn check_layer(&self, layer: i64) -> Result<usize, Fault> {
        if (0..self.shape.layers as i64).contains(&layer) {
            Ok(layer as usize)
        } else {
            Err(Fault::of(Code::Layer, layer, 0, self.shape.layers as i64))
        }
    }

    pub fn layer(&self, s: usize, l: usize) -> &LayerTable {
        &self.layers[s * self.shape.layers + l]
    }

    pub fn layer_mut(&mut self, s: usize, l: usize) -> &mut LayerTable {
        &mut self.layers[s * self.shape.layers + l]
    }

    /// Start of a table in entries, after the check that makes the slices below sound.
    fn table_start(&self, s: usize, l: usize) -> usize {
        assert!(s < SESSION_SLOTS && l < self.shape.layers);
        (s * self.shape.layers + l) * self.table_pages
    }

    /// Page ids of a layer, one an entry in use.
    pub fn ids(&self, s: usize, l: usize) -> &[i32] {
        let start = self.table_start(s, l);
        // SAFETY: the region holds table_pages entries from `start`, all initialised (mapped zeros),
        // and is written only through `&mut self`. Invariant: pages <= table_pages.
        unsafe {
            let first = self.page_ids.base::<i32>().add(start);
            std::slice::from_raw_parts(first, self.layer(s, l).pages)
        }
    }

    /// Validity of a layer, one word a page.
    pub fn bits(&self, s: usize, l: usize) -> &[u64] {
        let start = self.table_start(s, l);
        // SAFETY: as in `ids`.
        unsafe {
            let first = self.valid.base::<u64>().add(start);
            std::slice::from_raw_parts(first, self.layer(s, l).pages)
        }
    }

    pub fn set_entry(&mut self, s: usize, l: usize, index: usize, id: i32, bits: u64) {
        assert!(index < self.table_pages);
        let at = self.table_start(s, l) + index;
        // SAFETY: index < table_pages, so `at` lies in this layer's table.
        unsafe {
            self.page_ids.base::<i32>().add(at).write(id);
            self.valid.base::<u64>().add(at).write(bits);
        }
    }

    pub fn set_bits(&mut self, s: usize, l: usize, index: usize, bits: u64) {
        let id = self.ids(s, l)[index];
        self.set_entry(s, l, index, id, bits);
    }

    /// Page and validity of an entry; beyond the table, nothing.
    pub fn entry(&self, s: usize, l: usize, index: usize) -> (i32, u64) {
        match self.ids(s, l).get(index) {
            Some(&id) => (id, self.bits(s, l)[index]),
            None => (NO_PAGE, 0),
        }
    }

    /// Gives an entry's page back and leaves it empty.
    pub fn release_entry(&mut self, s: usize, l: usize, index: usize) {
        let id = self.ids(s, l)[index];
        if id != NO_PAGE {
            self.pool.release(id);
        }
        self.set_entry(s, l, index, NO_PAGE, 0);
    }

    /// Gives the pages from `index` on back and ends the table there.
    pub fn release_from(&mut self, s: usize, l: usize, index: usize) {
        for i in index..self.layer(s, l).pages {
            self.release_entry(s, l, i);
        }
        let layer = self.layer_mut(s, l);
        layer.pages = layer.pages.min(index);
    }

    /// Makes the table reach `index`, with empty entries.
    pub fn extend_to(&mut self, s: usize, l: usize, index: usize) {
        for i in self.layer(s, l).pages..=index {
            self.layer_mut(s, l).pages = i + 1;
            self.set_entry(s, l, i, NO_PAGE, 0);
        }
    }

    /// The page of an entry, to be written: this session's alone, copied if it was shared, new if there was none.
    ///
    /// The page that a branch's fork lies in always
    /// carries the parent's rows, even when the branch had given it back: `commit_prefix` then moves
    /// a page and never a row.
    pub fn copy_on_write(&mut self, s: usize, l: usize, index: usize) -> i32 {
        self.extend_to(s, l, index);
        let (id, bits) = self.entry(s, l, index);
        if id != NO_PAGE && !self.pool.is_shared(id) {
            return id;
        }
        let own = self.pool.take();
        if id != NO_PAGE {
            self.pool.copy(id, own);
            self.pool.release(id);
        } else if let Some(theirs) = self.inherited(s, l, index) {
            self.pool.copy(theirs, own);
        }
        self.set_entry(s, l, index, own, bits);
        own
    }

    /// The page whose rows below the fork an empty entry of a branch has to carry: the parent's, or
    /// where the parent has given it back too, that of whom the parent branched from in it.
    fn inherited(&self, s: usize, l: usize, index: usize) -> Option<i32> {
        let mut branch = self.sessions[s].parent;
        while let Some(parent) = branch {
            let (fork_page, fork_slot) = self.shape.place(parent.fork);
            if index != fork_page || fork_slot == 0 {
                return None;
            }
            let (theirs, _) = self.entry(parent.session, l, index);
            if theirs != NO_PAGE {
                return Some(theirs);
            }
            branch = self.sessions[parent.session].parent;
        }
        None
    }

    // --- lengths and steps --------------------------------------------------------------------------

    /// Highest valid or reserved position + 1.
    pub fn length(&self, s: usize, l: usize) -> i64 {
        match self.layer(s, l).slot {
            Slot::Open { start, n } => start + n,
            _ => self.visible_length(s, l),
        }
    }

    /// Highest valid position + 1.
    pub fn visible_length(&self, s: usize, l: usize) -> i64 {
        let tokens = self.shape.page_tokens as i64;
        // Entries behind the end are those of a reservation or an open restore.
        let pages = self.shape.pages_for(self.layer(s, l).end);
        let bits = &self.bits(s, l)[..pages];
        let last = bits.iter().enumerate().rev().find(|(_, bits)| **bits != 0);
        last.map_or(0, |(i, bits)| i as i64 * tokens + 64 - i64::from(bits.leading_zeros()))
    }

    /// `StepIncomplete` unless every layer has reached the same position.
    pub fn at_boundary(&self, s: usize) -> Result<(), Fault> {
        let first = self.layer(s, 0).end;
        for l in 1..self.shape.layers {
            let end = self.layer(s, l).end;
            if end != first {
                let (end, first) = (end + self.base, first + self.base);
                return Err(Fault::of(Code::StepIncomplete, l as i64, end, first));
            }
        }
        Ok(())
    }

    /// Whether a layer may grow to `end`: layers take turns, so ends never rise from layer to layer.
    pub fn in_turn(&self, s: usize, l: usize, end: i64) -> Result<(), Fault> {
        if l == 0 {
            return self.at_boundary(s);
        }
        let limit = self.layer(s, l - 1).end;
        if end > limit {
            let (end, limit) = (end + self.base, limit + self.base);
            return Err(Fault::of(Code::LayerAhead, l as i64, end, limit));
        }
        Ok(())
    }

    // --- reservations ---------------------------------------------------------------------------------

    /// Pages that only an open reservation holds: they come back when it is cancelled.
    pub fn reserved_only(&self, s: usize, l: usize) -> bool {
        match self.layer(s, l).slot {
            Slot::Open { start, .. } => self.entry(s, l, self.shape.place(start).0).1 == 0,
            _ => false,
        }
    }

    /// Cancels a layer's open reservation, or forgets a committed one.
    pub fn cancel(&mut self, s: usize, l: usize) {
        if let Slot::Open { start, .. } = self.layer(s, l).slot {
            if self.reserved_only(s, l) {
                self.release_entry(s, l, self.shape.place(start).0);
            }
            let pages = self.shape.pages_for(self.layer(s, l).end);
            self.release_from(s, l, pages);
            self.sessions[s].open_slots -= 1;
        }
        self.layer_mut(s, l).slot = Slot::Idle;
    }

    /// Cancels every open reservation of the session.
    pub fn cancel_all(&mut self, s: usize) {
        for l in 0..self.shape.layers {
            if self.sessions[s].open_slots == 0 {
                return;
            }
            if matches!(self.layer(s, l).slot, Slot::Open { .. }) {
                self.cancel(s, l);
            }
        }
    }
}
