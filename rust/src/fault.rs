//! What can go wrong, as numbers: a code and the figures that its message needs.

/// Reasons, one a message. `kvtrial_native.h` repeats the numbers.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// A bug: a panic was caught at the boundary. The store refuses every later verb.
    Panic = 1,
    /// The system refused memory; value: bytes.
    NoMemory = 2,
    /// value: layer; high: layers.
    Layer = 3,
    /// Not strictly ascending; value: position; low: the one before it.
    NotAscending = 4,
    /// value: position; low, high: allowed [low, high).
    Position = 5,
    /// value: position; it is inside the session, but no row is valid there.
    NotValid = 6,
    /// value: first position left out or invalidated.
    HoleNotAllowed = 7,
    /// value: pages needed; low: free; high: in the pool.
    NoPages = 8,
    /// value: slots.
    NoSlots = 9,
    /// value: generation of the handle; low: of the slot.
    Stale = 10,
    /// Not a step boundary; value: first layer that differs; low: its length; high: layer 0's.
    StepIncomplete = 11,
    /// value: layer; low: the length that it would get; high: the length of the layer before it.
    LayerAhead = 12,
    /// value: open branches.
    BranchesOpen = 13,
    /// The parent has moved since the branch began.
    BranchDiverged = 14,
    /// Not a branch: there is nothing to commit into.
    NotABranch = 15,
    /// value: count; high: the largest allowed.
    Count = 16,
    /// value: first position of the late commit.
    SlotCancelled = 17,
    /// A restore is open; only finish, cancel or close may follow.
    Restoring = 18,
    /// No restore is open.
    NotRestoring = 19,
    /// A restore needs an empty session; value: length.
    NotEmpty = 20,
    /// value: page index; high: pages.
    PageIndex = 21,
    /// KV heads of a partial; value: start; low, high: allowed [low, high).
    Heads = 22,
    /// An argument of the shape is unusable; value: the argument.
    Shape = 23,
    /// value: pages that the budget holds (0).
    Budget = 24,
}

/// Crosses the boundary by value, filled in by the failing call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub code: i32,
    pub value: i64,
    pub low: i64,
    pub high: i64,
}

impl Fault {
    pub fn of(code: Code, value: i64, low: i64, high: i64) -> Fault {
        Fault { code: code as i32, value, low, high }
    }
}
