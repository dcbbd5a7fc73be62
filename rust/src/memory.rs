//! Anonymous memory from the operating system: reserved once, touched when first used.

use crate::fault::{Code, Fault};
use std::ffi::c_void;

extern "C" {
    fn mmap(at: *mut c_void, len: usize, prot: i32, flags: i32, fd: i32, offset: i64)
        -> *mut c_void;
    fn munmap(at: *mut c_void, len: usize) -> i32;
    #[cfg(target_os = "linux")]
    fn madvise(at: *mut c_void, len: usize, advice: i32) -> i32;
}

const PROT_READ_WRITE: i32 = 1 | 2;
const MAP_PRIVATE: i32 = 2;
#[cfg(target_os = "linux")]
const MAP_ANONYMOUS_NORESERVE: i32 = 0x20 | 0x4000;
#[cfg(not(target_os = "linux"))]
const MAP_ANONYMOUS_NORESERVE: i32 = 0x1000 | 0x40;
#[cfg(target_os = "linux")]
const MADV_HUGEPAGE: i32 = 14;

/// Alignment of a `Memory` and size of a huge page.
const HUGE: usize = 2 << 20;

/// Zeroed memory, aligned to 2 MiB and never moved.
pub struct Memory {
    mapping: *mut c_void,
    mapped: usize,
    base: *mut u8,
}

impl Memory {
    /// Reserves `bytes`; `huge` asks for huge pages, which is advice that may go unheard.
    pub fn new(bytes: usize, huge: bool) -> Result<Memory, Fault> {
        let refused = || Fault::of(Code::NoMemory, bytes as i64, 0, 0);
        let mapped = bytes.max(1).checked_add(HUGE).ok_or_else(refused)?;
        // SAFETY: an anonymous mapping at an address of the system's choice touches nothing of ours.
        let mapping = unsafe {
            mmap(
                std::ptr::null_mut(),
                mapped,
                PROT_READ_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS_NORESERVE,
                -1,
                0,
            )
        };
        if mapping as isize == -1 {
            return Err(refused());
        }
        let shift = mapping.cast::<u8>().align_offset(HUGE);
        // SAFETY: shift < HUGE, and the mapping is HUGE longer than what is asked for.
        let base = unsafe { mapping.cast::<u8>().add(shift) };
        #[cfg(target_os = "linux")]
        if huge {
            // SAFETY: [base, base + bytes) lies inside the mapping; the advice changes no content.
            unsafe { madvise(base.cast(), bytes, MADV_HUGEPAGE) };
        }
        #[cfg(not(target_os = "linux"))]
        let _ = huge;
        Ok(Memory { mapping, mapped, base })
    }

    pub fn base<T>(&self) -> *mut T {
        self.base.cast()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone, whole, and unmapped only here.
        unsafe { munmap(self.mapping, self.mapped) };
    }
}
