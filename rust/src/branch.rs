//! Branches and the ways back: copy-on-write sessions, commit, rollback, and dropping a step.

use crate::fault::{Code, Fault};
use crate::store::{low_bits, Parent, Slot, Store, NO_PAGE};

impl Store {
    /// A copy-on-write child at the session's end. Shares every page that has a valid row, copies none.
    ///
    /// An open reservation stays open: its row may come to lie in a shared page, where the branch does
    /// not see it, and the branch's own first write copies the page.
    pub fn begin_branch(&mut self, s: usize) -> Result<usize, Fault> {
        self.at_boundary(s)?;
        let child = self.open_session(self.sessions[s].holes)?;
        let fork = self.layer(s, 0).end;
        let version = self.sessions[s].version;
        self.sessions[s].branches += 1;
        self.sessions[child].parent = Some(Parent { session: s, fork, version });
        for l in 0..self.shape.layers {
            for index in 0..self.shape.pages_for(fork) {
                let (id, bits) = self.entry(s, l, index);
                self.extend_to(child, l, index);
                if bits != 0 {
                    self.pool.share(id);
                    self.set_entry(child, l, index, id, bits);
                }
            }
            self.layer_mut(child, l).end = fork;
        }
        Ok(child)
    }

    /// Moves the first `k` positions since the fork into the parent and closes the branch.
    pub fn commit_prefix(&mut self, s: usize, k: i64) -> Result<(), Fault> {
        let parent = self.sessions[s].parent.ok_or(Fault::of(Code::NotABranch, 0, 0, 0))?;
        self.at_boundary(s)?;
        if self.sessions[s].branches > 0 {
            let branches = i64::from(self.sessions[s].branches);
            return Err(Fault::of(Code::BranchesOpen, branches, 0, 0));
        }
        let appended = self.layer(s, 0).end - parent.fork;
        if !(0..=appended).contains(&k) {
            return Err(Fault::of(Code::Count, k, 0, appended));
        }
        if self.sessions[parent.session].version != parent.version {
            return Err(Fault::of(Code::BranchDiverged, parent.fork + self.base, 0, 0));
        }
        if k > 0 {
            self.cancel_all(s);
            self.cancel_all(parent.session);
            for l in 0..self.shape.layers {
                self.move_pages(s, l, parent, parent.fork + k);
            }
            self.sessions[parent.session].version += 1;
        }
        self.discard(s);
        Ok(())
    }

    /// Moves the pages that hold rows of [fork, end) from a branch's layer into its parent's.
    fn move_pages(&mut self, s: usize, l: usize, parent: Parent, end: i64) {
        let tokens = self.shape.page_tokens as i64;
        let (p, fork_page) = (parent.session, self.shape.place(parent.fork).0);
        let last_page = self.shape.pages_for(end) - 1;
        self.extend_to(p, l, last_page);
        for index in fork_page..=last_page {
            let first = index as i64 * tokens;
            let kept = low_bits((parent.fork - first).max(0) as usize);
            let wanted = low_bits((end - first).min(tokens) as usize) & !kept;
            let (id, bits) = self.entry(s, l, index);
            if bits & wanted == 0 {
                continue;
            }
            // Invariant of `own`: the branch's page carries the parent's rows below the fork.
            let kept_bits = self.entry(p, l, index).1 & kept;
            self.release_entry(p, l, index);
            self.set_entry(p, l, index, id, kept_bits | bits & wanted);
            self.set_entry(s, l, index, NO_PAGE, 0);
            let dropped = ((end - first).min(tokens)) as usize;
            self.pool.poison_rows(id, dropped..tokens as usize);
        }
        let layer = self.layer_mut(p, l);
        layer.end = end;
        layer.slot = Slot::Idle;
    }

    /// Drops the last `n` positions.
    pub fn rollback_tail(&mut self, s: usize, n: i64) -> Result<(), Fault> {
        self.at_boundary(s)?;
        let end = self.layer(s, 0).end;
        let fork = self.sessions[s].parent.map_or(0, |parent| parent.fork);
        if !(0..=end - fork).contains(&n) {
            return Err(Fault::of(Code::Count, n, 0, end - fork));
        }
        if n == 0 {
            return Ok(());
        }
        let is_past = |p: Parent| p.session == s && p.fork > end - n;
        let past = self.sessions.iter().filter(|x| x.open && x.parent.is_some_and(is_past)).count();
        if past > 0 {
            return Err(Fault::of(Code::BranchesOpen, past as i64, 0, 0));
        }
        self.truncate(s, end - n);
        Ok(())
    }

    /// Drops the rows of a step that not every layer has finished.
    pub fn abandon_step(&mut self, s: usize) {
        // No layer is ahead of the one before it.
        self.truncate(s, self.layer(s, self.shape.layers - 1).end);
    }

    /// Ends every layer at `end` at the latest. No row is copied: a shared page keeps its bytes.
    fn truncate(&mut self, s: usize, end: i64) {
        self.cancel_all(s);
        let (last, slots) = self.shape.place(end);
        for l in 0..self.shape.layers {
            if self.layer(s, l).end <= end {
                continue;
            }
            self.cancel(s, l);
            self.release_from(s, l, self.shape.pages_for(end));
            if slots > 0 {
                let (id, bits) = self.entry(s, l, last);
                let left = bits & low_bits(slots);
                if left == 0 {
                    self.release_entry(s, l, last);
                } else {
                    self.set_bits(s, l, last, left);
                    if !self.pool.is_shared(id) {
                        self.pool.poison_rows(id, slots..self.shape.page_tokens);
                    }
                }
            }
            self.layer_mut(s, l).end = end;
            self.sessions[s].version += 1;
        }
    }
}
