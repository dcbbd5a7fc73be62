"""The KV contract: what every candidate store promises, and the errors that it raises.

This package is the one home of the contract: the records and verbs here, and what it names of `errors`, `memory`
and `partials`; `arguments` are the checks at a door. A *store* is a pool of memory for one model shape; a
*session* is one sequence inside it. The verbs:

====================  =====================================================================
``append``            store rows for ascending positions of one layer
``invalidate``        make holes (only where the session was opened with holes allowed)
``reserve_slot``      hand out writable K and V views inside the cache, or ``None``
``commit_slot``       make reserved rows valid
``attend``            softmax attention of one query token over one layer
``attend_block``      the same for the newest n positions, causal
``attend_partial``    attention over a head group or position range, to be joined by ``merge``
``read``              copy rows out
``page_table``        page ids and lengths, integers only
``begin_branch``      a copy-on-write session
``commit_prefix``     move the first k positions of a branch into its parent
``rollback_tail``     drop the last n positions
``abandon_step``      drop the rows of a step that not every layer has finished
``page_bytes``        one page, read-only, as it lies in memory (what a spill writes)
``begin_restore``     pages to be filled from outside; ``finish_restore`` makes them valid
``close``             give everything back
====================  =====================================================================

Conventions. Arrays are float32 and C-contiguous (slot views excepted), positions are int64, sizes are
in tokens or bytes and say which. Shapes use L layers, H_q query heads, H_kv KV heads, D head_dim,
P page_tokens.

Steps. A layer's length is its highest valid or reserved position + 1. A step goes through the layers
in turn: layer 0 may not begin the next step until every layer has reached the same length, and layer
l may not pass layer l - 1. ``begin_branch``, ``commit_prefix``, ``rollback_tail``, page reads and
``close`` happen at step boundaries; elsewhere they raise `StepIncomplete` and change nothing. Steps
are counted by the position after a layer's last appended row: `invalidate` doesn't move it (a hole at
the end shortens ``length`` and nothing else), and ``rollback_tail`` counts back from it. So no verb
tells the next position behind a hole at the end: who made it knows it, or gives the holes back by
``rollback_tail``, after which ``length`` is the next position again.

Errors change nothing: after any `KVError` length, bitmap, page table, reference counts and contents
are bitwise as before the call.

Non-finite rows. An FP32 store keeps every bit pattern; a valid row that holds NaN or inf takes part
in attention as IEEE arithmetic says. What a narrower format can't hold is refused with `NumericRange`, and
its `Profile` says what that is: magnitudes from ``limit`` on, and where ``finite``, NaN and inf. FP16 keeps
NaN and inf and refuses ``|x| >= 65520``; Q8_0 refuses rows that are not finite and rows whose step FP16
can't hold.

Scores of -inf weigh nothing, so where all valid rows score -inf attention gives zeros, and their partial
has a sum of 0: as where nothing is valid. IEEE arithmetic would make NaN of those rows alone, and nothing
of the same rows beside a finite score; then what `merge` gives would depend on where the parts are cut.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

# What is not used here belongs to the contract all the same: users import it from here.
from kvtrial.contract.arguments import PAGE_TOKENS, integer, integers, page_size, shown  # noqa: F401
from kvtrial.contract.errors import (  # noqa: F401
    BranchDiverged,
    BranchesOpen,
    CandidateNotBuilt,
    HoleNotAllowed,
    InvalidArgument,
    KVError,
    NumericRange,
    OutOfRange,
    PoolExhausted,
    RetiredCandidate,
    SlotCancelled,
    StaleBuild,
    StaleOwner,
    StepIncomplete,
    UnknownCandidate,
    Unsupported,
)
from kvtrial.contract.memory import POISON_VARIABLE, MemoryLedger, poison_wanted  # noqa: F401
from kvtrial.contract.partials import F32, Partial, merge  # noqa: F401

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MAX_HEAD_DIM = 256
MAX_GROUP = 16
#: Sessions and branches that any store can have open at once; where it can have more, it may.
SESSIONS = 64
MAX_THREADS = 256
MAX_BUDGET_BYTES = 2**48
#: What a candidate may be called: its name is part of names of files.
CANDIDATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Positions lie below it.
MAX_TOKENS = 2**40


# --------------------------------------------------------------------------------------------------
# What a candidate is


class Capability(enum.Enum):
    """What a store can do beyond append, attend and read."""

    OWNER = "owner"  # generations: a stale handle is refused
    ROLLBACK = "rollback"
    BRANCH = "branch"
    HOLES = "holes"
    POOL = "pool"  # bounded pages from a ledger, a page table
    PARTIALS = "partials"
    RESERVE_SLOT = "reserve_slot"
    SPILL = "spill"  # page_bytes and begin_restore
    THREADS = "threads"


#: Without these a candidate is measured and reported but can't win.
REQUIRED_CAPABILITIES = frozenset(
    {
        Capability.OWNER,
        Capability.ROLLBACK,
        Capability.BRANCH,
        Capability.HOLES,
        Capability.POOL,
        Capability.PARTIALS,
        Capability.SPILL,
    }
)


@dataclass(frozen=True)
class Profile:
    """Numerical profile: how far storing may change a row. Sums are FP32 in each.

    Attributes
    ----------
    name : str
        Such as "fp16": in protocols, verdicts and selections.
    limit : float
        Magnitudes from here on don't fit, and are `NumericRange`; inf where every float32 does.
    finite : bool
        Infinities and NaN don't fit either.
    bound : callable
        float64 rows (..., D) → the largest absolute change of each element by storing it.
    rounded : callable, optional
        float32 array → what `read` gives back, bit for bit, where an element is stored by itself.
    query : callable, optional
        float64 queries (..., D) → the largest absolute change of each element by rounding it for the scores;
        None where they take it as it is.
    weights : callable, optional
        float64 rows of V (..., D) → ``a`` (..., D): where weights are rounded, at most 32 neighbouring rows
        together, each element of a weighted row is off by the largest weight times the largest ``a`` of its
        neighbours (31 rows before it to 31 behind), at most. None where they are not rounded.
    """

    name: str
    limit: float
    bound: Callable[[F64], F64]
    finite: bool = False
    rounded: Callable[[F32], F32] | None = None
    query: Callable[[F64], F64] | None = None
    weights: Callable[[F64], F64] | None = None

    def storage_bound(self, x: npt.ArrayLike) -> F64:
        """Largest absolute change of each element of ``x`` (..., D) by storing it."""
        return self.bound(np.asarray(x, np.float64))

    def query_bound(self, q: npt.ArrayLike) -> F64:
        """Largest absolute change of each element of a query ``q`` (..., D) by the scores."""
        exact = np.asarray(q, np.float64)
        return np.zeros_like(exact) if self.query is None else self.query(exact)

    @property
    def exact(self) -> bool:
        """Whether rows come back as they were."""
        return not self.storage_bound([1.0]).any()


#: What the oracle is held against without a storage error, and every other profile compared with.
FP32 = Profile("fp32", limit=math.inf, bound=np.zeros_like, rounded=np.array)


@dataclass(frozen=True)
class StoreSpec:
    """The shape and budget of a store.

    Attributes
    ----------
    layers, q_heads, kv_heads, head_dim : int
        The model's shape; ``q_heads`` is a multiple of ``kv_heads``, ratio 1 to 16; ``head_dim`` 1
        to 256.
    page_tokens : int
        P, one of 16, 32, 64.
    budget_bytes : int
        The pool takes as many whole pages as fit; at least one must. Page tables are not counted: a
        store may map 12 bytes for each of `SESSIONS`, layers and pages, and touches what is used.
    ledger : MemoryLedger, optional
        Where the bytes are reserved; by default a ledger of exactly ``budget_bytes``.
    base_position : int
        The lowest position this store may hold; an empty layer's length equals it.
    kv_head_range : (int, int), optional
        This store holds only KV heads [start, stop). K and V rows then have ``stop - start`` heads;
        q and out keep the model's ``q_heads`` rows, of which only the group's own are read and
        written.
    threads : int
        Threads that one attend may use; results are bitwise the same for any number.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int = 16
    budget_bytes: int = 0
    ledger: MemoryLedger | None = field(default=None, compare=False)
    base_position: int = 0
    kv_head_range: tuple[int, int] | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        for name, low, high in (
            ("layers", 1, 4096),
            ("q_heads", 1, 65536),
            ("kv_heads", 1, 4096),
            ("head_dim", 1, MAX_HEAD_DIM),
            ("base_position", 0, MAX_TOKENS),
            ("threads", 1, MAX_THREADS),
            ("budget_bytes", 1, MAX_BUDGET_BYTES),
        ):
            object.__setattr__(self, name, integer(getattr(self, name), name, low, high))
        object.__setattr__(self, "page_tokens", page_size(self.page_tokens))
        if self.ledger is not None and not isinstance(self.ledger, MemoryLedger):
            raise InvalidArgument(
                f"ledger is {shown(self.ledger)}; give a kvtrial.MemoryLedger, or None"
            )
        if self.q_heads % self.kv_heads or self.q_heads // self.kv_heads > MAX_GROUP:
            raise InvalidArgument(
                f"q_heads is {self.q_heads} with kv_heads {self.kv_heads}; it must be a multiple, "
                f"1 to {MAX_GROUP} times"
            )
        if self.kv_head_range is not None:
            # It is part of what pages are named by, so equal ranges have to be equal.
            bounds = integers(self.kv_head_range, "kv_head_range").tolist()
            if len(bounds) != 2:
                raise InvalidArgument(
                    f"kv_head_range is {shown(self.kv_head_range)}; give two integers, [start, stop)"
                )
            start, stop = bounds
            object.__setattr__(self, "kv_head_range", (start, stop))
            if not 0 <= start < stop <= self.kv_heads:
                raise InvalidArgument(
                    f"kv_head_range is {self.kv_head_range}; allowed: a non-empty [start, stop) "
                    f"inside [0, {self.kv_heads})"
                )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def heads(self) -> tuple[int, int]:
        """[start, stop) of the KV heads that this store holds."""
        return self.kv_head_range or (0, self.kv_heads)

    @property
    def local_kv_heads(self) -> int:
        """KV heads in a row of this store."""
        start, stop = self.heads
        return stop - start


@dataclass(frozen=True)
class Candidate:
    """A store implementation under trial, as the entry-point group ``kvtrial.candidates`` names it.

    ``language`` is the kernel's, ``owner`` that of the memory and bookkeeping. ``role`` is
    ``baseline``, ``ablation``, ``contender``, ``profile`` or ``control``. ``name`` has letters, digits, ``.``,
    ``_`` and ``-`` (`CANDIDATE_NAME`).
    """

    name: str
    title: str
    role: str
    profile: Profile
    language: str
    owner: str
    layout: str
    capabilities: frozenset[Capability]
    open: Callable[[StoreSpec], KVStore]
    #: Why it can't be opened on this machine, or None.
    not_built: str | None = None
    #: Each query head reads its KV head's rows for itself, H_q / H_kv times their bytes.
    reads_per_query_head: bool = False

    def __post_init__(self) -> None:
        """`InvalidArgument` for a name that files and units of the journal can't bear."""
        if not isinstance(self.name, str) or not CANDIDATE_NAME.fullmatch(self.name):
            raise InvalidArgument(
                f"name of a candidate is {shown(self.name)}; allowed: letters, digits, '.', '_' and '-', the "
                "first a letter or digit"
            )

    @property
    def missing_capabilities(self) -> tuple[str, ...]:
        """Required capabilities that it lacks, sorted by name."""
        return tuple(sorted(c.value for c in REQUIRED_CAPABILITIES - self.capabilities))


# --------------------------------------------------------------------------------------------------
# The verbs


class PageTable(NamedTuple):
    """Integers only, so that another device can own the pages."""

    #: int32 (n_pages,): page id, or -1 where a page holds only holes.
    page_ids: I32
    #: The layer's length in tokens (absolute: base_position included).
    length: int


@runtime_checkable
class KVSession(Protocol):
    """One sequence. Verbs and invariants are described at the head of this module."""

    store: KVStore
    generation: int
    position_holes_allowed: bool

    def append(self, layer: int, positions: Any, k: F32, v: F32) -> None:
        """Store rows k, v (n, H_kv, D) at ascending ``positions`` (n,) int64, RoPE applied.

        n >= 0; the first position is past the layer's last appended row, so a position is appended
        once. n rows in one call equal n single calls, bitwise. Positions left out become holes.
        """

    def invalidate(self, layer: int, positions: Any) -> None:
        """Make holes of stored positions; their bytes no longer take part in anything."""

    def reserve_slot(self, layer: int, positions: Any) -> tuple[F32, F32] | None:
        """Writable K and V views (n, H_kv, D) inside the cache, or None when it can't.

        Only contiguous ascending positions from the layer's length on, inside capacity, for a paged
        store inside one page, and only where elements are float32. n = 0 gives None. The rows stay
        invisible until `commit_slot`; any other mutation of the session cancels the reservation.
        """

    def commit_slot(self, layer: int, positions: Any) -> None:
        """Make the reserved rows valid. Committing the same rows again changes nothing."""

    def attend(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """Attention of q (H_q, D) over the layer's valid rows, into out (H_q, D).

        Nothing valid, or all scores -inf: zeros. Query head h reads KV head h // (H_q // H_kv).
        """

    def attend_block(self, layer: int, q: F32, out: F32, scale: float) -> None:
        """Causal attention of q (n, H_q, D), the newest n positions of the layer, into out.

        Row i stands at position length - n + i, where reserved rows don't count in the length, and
        sees the valid rows up to it.
        """

    def attend_partial(
        self,
        layer: int,
        q: F32,
        scale: float,
        *,
        kv_heads: tuple[int, int] | None = None,
        positions: tuple[int, int] | None = None,
    ) -> Partial:
        """Attention over KV heads [start, stop) and positions [start, stop), for `merge`."""

    def read(self, layer: int, positions: Any) -> tuple[F32, F32]:
        """Copies of valid rows as float32 (n, H_kv, D); a position that is not valid: OutOfRange."""

    def length(self, layer: int) -> int:
        """Highest valid or reserved position + 1."""

    def valid(self, layer: int) -> Bool:
        """bool (length - base_position,): True where a row is valid."""

    def page_table(self, layer: int) -> PageTable:
        """The layer's pages, from base_position on."""

    def begin_branch(self) -> KVSession:
        """A copy-on-write child at the current length. Branches nest and have siblings."""

    def commit_prefix(self, k: int) -> None:
        """Move the first k positions since the branch began into the parent and close the branch.

        0 moves nothing and closes the branch. Holes count as positions. With branches of its own open
        it is `BranchesOpen`; in a session that is no branch, `InvalidArgument`.
        """

    def rollback_tail(self, n: int) -> None:
        """Drop the last n positions. In a branch, not past the fork; nor past a child's fork."""

    def abandon_step(self) -> None:
        """Drop rows of the unfinished step, so that every layer has the last whole step's length."""

    def page_bytes(self, layer: int, index: int) -> memoryview | None:
        """Page ``index`` of the layer as it lies in memory, read-only; None for a page of holes.

        Where the page also holds rows that are not valid in this session, it is a copy that has zeros for
        them: what lies there may be another session's.
        """

    def begin_restore(self, valid: Bool) -> list[list[memoryview | None]]:
        """Take pages for rows to come from outside, in an empty session.

        ``valid`` is bool (L, rows); rows start at base_position; False in a session opened without
        holes is `HoleNotAllowed`. Returns, per layer and page, a writable view of the whole page,
        None for a page of holes. Nothing is visible until `finish_restore`.
        """

    def finish_restore(self) -> None:
        """Make the restored rows valid."""

    def cancel_restore(self) -> None:
        """Give the pages of an unfinished restore back."""

    def close(self) -> None:
        """Give every page back. A second close, or any later verb, is `StaleOwner`."""


@runtime_checkable
class KVStore(Protocol):
    """A bounded pool for one shape."""

    spec: StoreSpec
    #: Names layout, dtype and P of a page: two stores exchange pages only if this is equal.
    page_format: str
    #: Bytes of K and V of one token in one layer, as stored.
    row_bytes: int
    #: Bytes of one page; 0 for a store without pages.
    page_nbytes: int

    def open_session(self, position_holes_allowed: bool = False) -> KVSession:
        """A new, empty session. `PoolExhausted` when the store has no session slot left: past `SESSIONS`."""

    def page_table(self, session: KVSession, layer: int) -> PageTable:
        """Page ids and length of a session's layer."""

    def reference_counts(self) -> I32:
        """int32 (pages,): page-table entries that point to each page, over all sessions."""

    @property
    def pages_total(self) -> int:
        """Pages in the pool."""

    @property
    def pages_free(self) -> int:
        """Pages that no session holds."""

    @property
    def resident_bytes(self) -> int:
        """Bytes of pages in use; a page shared by branches counts once."""

    def close(self) -> None:
        """Free the pool and release its ledger reservation; sessions become stale.

        A second close, a new session of a closed store and its counts of pages and bytes are `StaleOwner`.
        """


def spec_behind(session: object) -> StoreSpec:
    """The spec of the store that a session belongs to; `InvalidArgument` for what is no session."""
    spec = getattr(getattr(session, "store", None), "spec", None)
    if not isinstance(spec, StoreSpec):
        raise InvalidArgument(
            f"session is {shown(session)}; give what open_session() of a store returns"
        )
    return spec
