//! The native arm of kvtrial: a KV page pool and an attention kernel behind a C boundary.
//!
//! `memory` maps, `pool` counts pages and knows where rows lie in them, `store` keeps sessions and their
//! tables, `rows`, `branch`, `restore` and `query` are the verbs, `attend` cuts attention into spans, `tile` is
//! what the kernels share (`row_kernel` over K as it was appended, `panel_kernel` over K transposed within
//! the page), `simd` their vectors, `ffi` is the door, and `span` that of K4, whose pages are not ours.

#![deny(unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]
// Verbs of the contract take what the contract gives them.
#![allow(clippy::too_many_arguments)]
// Register tiles are indexed as the matrices that they are.
#![allow(clippy::needless_range_loop)]

mod attend;
mod branch;
mod fault;
mod ffi;
mod memory;
mod panel_kernel;
mod pool;
mod query;
mod restore;
mod row_kernel;
mod rows;
mod simd;
mod span;
mod store;
mod tile;
