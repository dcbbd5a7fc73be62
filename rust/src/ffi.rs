//! The C boundary; `kvtrial_native.h` declares it and says what each call needs.
//!
//! Every call returns 0 or a `Code` with its figures in `fault`. No panic crosses: one is caught,
//! reported as `Code::Panic`, and the store refuses whatever comes after.

use crate::attend::{ParallelFor, Threads};
use crate::fault::{Code, Fault};
use crate::pool::{Rows, Shape};
use crate::store::{Store, NO_PAGE};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::slice;

/// A session as the other side holds it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Handle {
    pub generation: u64,
    pub slot: u32,
}

/// The model's query around this store's heads, and who computes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Call {
    pub q: *const f32,
    pub q_heads: i64,
    /// Query heads before the store's own.
    pub first_head: i64,
    pub scale: f32,
    pub parallel_for: Option<ParallelFor>,
    pub threads: i64,
}

impl Call {
    fn query(&self) -> (*const f32, usize, usize) {
        (self.q, self.q_heads as usize, self.first_head as usize)
    }

    fn threads(&self) -> Threads {
        Threads { run: self.parallel_for, count: self.threads as usize }
    }
}

/// Runs a body behind the boundary and reports how it ended.
///
/// # Safety
/// `fault` is writable.
unsafe fn guard(fault: *mut Fault, body: impl FnOnce() -> Result<(), Fault>) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|_| Err(Fault::of(Code::Panic, 0, 0, 0)));
    match result {
        Ok(()) => 0,
        Err(found) => {
            // SAFETY: the caller's promise.
            unsafe { fault.write(found) };
            found.code
        }
    }
}

/// As `guard`, with a store that a caught panic puts out of use.
///
/// # Safety
/// `store` came from `kvn_open`, is not freed, and nobody else uses it during the call.
unsafe fn with(
    store: *mut Store,
    fault: *mut Fault,
    body: impl FnOnce(&mut Store) -> Result<(), Fault>,
) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        let code = guard(fault, || {
            let store = &mut *store;
            if store.broken {
                return Err(Fault::of(Code::Panic, 0, 0, 0));
            }
            body(store)
        });
        if code == Code::Panic as i32 {
            (*store).broken = true;
        }
        code
    }
}

/// A slice of `n` elements; `at` may be anything where n is 0.
///
/// # Safety
/// `at` is readable for n elements for as long as the slice lives.
unsafe fn elements<'a, T>(at: *const T, n: i64) -> &'a [T] {
    if n <= 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { slice::from_raw_parts(at, n as usize) }
}

/// Declares boundary functions: the store, then the arguments, then `fault`, with the body run by
/// `with`.
macro_rules! verbs {
    ($($(#[$doc:meta])* fn $name:ident($store:ident $(, $arg:ident: $type:ty)*) $body:block)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The store is open and used by this call alone; pointers are good for the sizes that the
        /// header gives, and none of them points into the pool.
        #[no_mangle]
        pub unsafe extern "C" fn $name(
            store: *mut Store $(, $arg: $type)*, fault: *mut Fault,
        ) -> i32 {
            // SAFETY: the caller's promise, for `with` and for every pointer that the body uses.
            unsafe { with(store, fault, |$store| { $body; Ok(()) }) }
        }
    )*};
}

/// Bytes of a page, or 0 for a shape that can't be.
#[no_mangle]
pub extern "C" fn kvn_page_nbytes(heads: i64, dim: i64, page_tokens: i64) -> i64 {
    Shape::new(1, heads as usize, 1, dim as usize, page_tokens as usize, false)
        .map_or(0, |shape| shape.page_bytes() as i64)
}

/// Opens a store of `pages` pages; `transposed` lays K `[dim][token]` within its tile.
///
/// # Safety
/// `store` and `fault` are writable.
#[no_mangle]
pub unsafe extern "C" fn kvn_open(
    layers: i64,
    heads: i64,
    group: i64,
    dim: i64,
    page_tokens: i64,
    transposed: i32,
    base: i64,
    pages: i64,
    poison: i32,
    store: *mut *mut Store,
    fault: *mut Fault,
) -> i32 {
    // SAFETY: the caller's promise.
    unsafe {
        guard(fault, || {
            let [layers, heads, group, dim, tokens] =
                [layers, heads, group, dim, page_tokens].map(|x| x as usize);
            let shape = Shape::new(layers, heads, group, dim, tokens, transposed != 0)?;
            let opened = Store::new(shape, base, pages as usize, poison != 0)?;
            store.write(Box::into_raw(Box::new(opened)));
            Ok(())
        })
    }
}

/// Frees a store and its pool.
///
/// # Safety
/// `store` came from `kvn_open` and is not used afterwards, nor any pointer into its pool.
#[no_mangle]
pub unsafe extern "C" fn kvn_free(store: *mut Store) {
    // SAFETY: the caller's promise. Dropping runs munmap and frees vectors, which do not panic.
    drop(unsafe { Box::from_raw(store) });
}

verbs! {
    fn kvn_open_session(store, holes: i32, handle: *mut Handle) {
        let s = store.open_session(holes != 0)?;
        handle.write(Handle { generation: store.sessions[s].generation, slot: s as u32 });
    }

    fn kvn_force_generation(store, generation: u64) {
        store.force_generation(generation);
    }

    fn kvn_close_session(store, handle: Handle) {
        let s = store.session(handle.slot, handle.generation)?;
        store.close_session(s)?;
    }

    fn kvn_append(
        store, handle: Handle, layer: i64, positions: *const i64, n: i64, k: *const f32, v: *const f32
    ) {
        let s = store.settled(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        store.append(s, l, elements(positions, n), k, v)?;
    }

    fn kvn_invalidate(store, handle: Handle, layer: i64, positions: *const i64, n: i64) {
        let s = store.settled(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        store.invalidate(s, l, elements(positions, n))?;
    }

    /// `rows` gets the first reserved slot, or `Rows::NONE` when the slots can't be reserved.
    fn kvn_reserve(
        store, handle: Handle, layer: i64, positions: *const i64, n: i64, rows: *mut Rows
    ) {
        let s = store.settled(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        let slot = store.reserve(s, l, elements(positions, n))?;
        rows.write(slot.map_or(Rows::NONE, |(id, slot)| store.pool.rows(id, slot)));
    }

    fn kvn_commit(store, handle: Handle, layer: i64, positions: *const i64, n: i64) {
        let s = store.settled(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        store.commit(s, l, elements(positions, n))?;
    }

    fn kvn_read(
        store, handle: Handle, layer: i64, positions: *const i64, n: i64, k: *mut f32, v: *mut f32
    ) {
        let s = store.session(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        store.read(s, l, elements(positions, n), k, v)?;
    }

    fn kvn_attend(store, handle: Handle, layer: i64, call: Call, out: *mut f32) {
        let s = store.session(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        store.attend(s, l, call.query(), call.scale, out, call.threads())?;
    }

    fn kvn_attend_block(store, handle: Handle, layer: i64, call: Call, rows: i64, out: *mut f32) {
        let s = store.session(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        store.attend_block(s, l, call.query(), rows as usize, call.scale, out, call.threads())?;
    }

    /// Heads are local to the store; positions are absolute.
    fn kvn_attend_partial(
        store, handle: Handle, layer: i64, call: Call, first_kv_head: i64, last_kv_head: i64,
        first_position: i64, last_position: i64, max: *mut f32, sum: *mut f32, out: *mut f32
    ) {
        let s = store.session(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        let heads = store.shape.heads as i64;
        if !(0 <= first_kv_head && first_kv_head <= last_kv_head && last_kv_head <= heads) {
            return Err(Fault::of(Code::Heads, first_kv_head, 0, heads));
        }
        let heads = first_kv_head as usize..last_kv_head as usize;
        let positions =
            first_position.saturating_sub(store.base)..last_position.saturating_sub(store.base);
        let into = (max, sum, out);
        let threads = call.threads();
        store.attend_partial(s, l, call.query(), call.scale, heads, positions, into, threads)?;
    }

    /// The layer's length, absolute.
    fn kvn_length(store, handle: Handle, layer: i64, length: *mut i64) {
        let s = store.session(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        length.write(store.base + store.length(s, l));
    }

    /// `out` holds length - base bytes.
    fn kvn_valid(store, handle: Handle, layer: i64, out: *mut u8) {
        let s = store.session(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        let length = store.length(s, l) as usize;
        if length > 0 {
            store.valid(s, l, slice::from_raw_parts_mut(out, length));
        }
    }

    /// `out` holds an id for each page that the length spans.
    fn kvn_page_table(store, handle: Handle, layer: i64, out: *mut i32) {
        let s = store.session(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        let pages = store.shape.pages_for(store.length(s, l));
        out.copy_from_nonoverlapping(store.ids(s, l).as_ptr(), pages);
    }

    fn kvn_begin_branch(store, handle: Handle, child: *mut Handle) {
        let s = store.settled(handle.slot, handle.generation)?;
        let s = store.begin_branch(s)?;
        child.write(Handle { generation: store.sessions[s].generation, slot: s as u32 });
    }

    fn kvn_commit_prefix(store, handle: Handle, k: i64) {
        let s = store.settled(handle.slot, handle.generation)?;
        store.commit_prefix(s, k)?;
    }

    fn kvn_rollback_tail(store, handle: Handle, n: i64) {
        let s = store.settled(handle.slot, handle.generation)?;
        store.rollback_tail(s, n)?;
    }

    fn kvn_abandon_step(store, handle: Handle) {
        let s = store.settled(handle.slot, handle.generation)?;
        store.abandon_step(s);
    }

    /// `page` gets the start of the page, or null for one of holes; `valid` a bit for each of its rows.
    fn kvn_page(
        store, handle: Handle, layer: i64, index: i64, page: *mut *const f32, valid: *mut u64
    ) {
        let s = store.settled(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        let (id, bits) = store.page_at(s, l, index)?;
        page.write(if id == NO_PAGE { std::ptr::null() } else { store.pool.page(id) });
        valid.write(bits);
    }

    /// Copies a page of rows to `into`, with zeros for those that are not valid.
    fn kvn_copy_page(store, handle: Handle, layer: i64, index: i64, into: *mut f32) {
        let s = store.settled(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        let (id, bits) = store.page_at(s, l, index)?;
        if id != NO_PAGE {
            store.pool.copy_valid(id, bits, into);
        }
    }

    /// `valid` holds (layers, rows) bytes of 0 or 1.
    fn kvn_begin_restore(store, handle: Handle, valid: *const u8, rows: i64) {
        let s = store.settled(handle.slot, handle.generation)?;
        store.begin_restore(s, elements(valid, rows * store.shape.layers as i64), rows as usize)?;
    }

    /// A page of an open restore, or null for one of holes.
    fn kvn_restore_page(store, handle: Handle, layer: i64, index: i64, page: *mut *mut f32) {
        let s = store.session(handle.slot, handle.generation)?;
        let l = store.check_layer(layer)?;
        let rows = store.sessions[s].restoring.ok_or(Fault::of(Code::NotRestoring, 0, 0, 0))?;
        let pages = store.shape.pages_for(rows) as i64;
        if !(0..pages).contains(&index) {
            return Err(Fault::of(Code::PageIndex, index, 0, pages));
        }
        let (id, _) = store.entry(s, l, index as usize);
        page.write(if id == NO_PAGE { std::ptr::null_mut() } else { store.pool.page(id) });
    }

    fn kvn_finish_restore(store, handle: Handle) {
        let s = store.session(handle.slot, handle.generation)?;
        store.finish_restore(s)?;
    }

    fn kvn_cancel_restore(store, handle: Handle) {
        let s = store.session(handle.slot, handle.generation)?;
        store.cancel_restore(s)?;
    }

    /// `out` holds a count for each page of the pool.
    fn kvn_reference_counts(store, out: *mut u32) {
        let counts = store.pool.references();
        out.copy_from_nonoverlapping(counts.as_ptr(), counts.len());
    }

    fn kvn_pages_free(store, pages: *mut i64) {
        pages.write(store.pool.free() as i64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> *mut Store {
        let (mut store, mut fault) = (std::ptr::null_mut(), Fault::of(Code::Panic, 0, 0, 0));
        // SAFETY: both targets are writable.
        let code =
            unsafe { kvn_open(1, 1, 1, 8, 16, 0, 0, 2, 0, &raw mut store, &raw mut fault) };
        assert_eq!(code, 0);
        store
    }

    #[test]
    fn a_panic_becomes_a_code_and_ends_the_store() {
        let store = open();
        let (mut fault, mut free) = (Fault::of(Code::Layer, 0, 0, 0), 0);
        // SAFETY: the store is open, and the targets are writable.
        unsafe {
            let code = with(store, &raw mut fault, |store| {
                store.pool.release(0); // free already: breaks an invariant
                Ok(())
            });
            assert_eq!((code, fault.code), (Code::Panic as i32, Code::Panic as i32));
            let code = kvn_pages_free(store, &raw mut free, &raw mut fault);
            assert_eq!(code, Code::Panic as i32);
            kvn_free(store);
        }
    }

    #[test]
    fn a_shape_that_cannot_be_is_a_fault() {
        let (mut store, mut fault) = (std::ptr::null_mut(), Fault::of(Code::Panic, 0, 0, 0));
        // SAFETY: both targets are writable.
        let code =
            unsafe { kvn_open(1, 1, 17, 8, 16, 0, 0, 2, 0, &raw mut store, &raw mut fault) };
        assert_eq!(code, Code::Shape as i32);
        assert_eq!((fault.value, fault.low, fault.high), (17, 1, 16));
        assert!(store.is_null());
    }
}
