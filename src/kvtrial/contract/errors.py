"""What a store raises. Each message names the value, what is allowed, and what to do."""

from __future__ import annotations


class KVError(Exception):
    """Base of everything a store raises. After one, the store is as it was before the call."""


class InvalidArgument(KVError, ValueError):
    """Wrong dtype, shape, contiguity, alignment, layer, or an unusable number."""


class OutOfRange(KVError, IndexError):
    """A position, count or page outside what the session holds."""


class PoolExhausted(KVError, MemoryError):
    """The pool (or the ledger that it is reserved from) has no room; a pool never grows."""


class StaleOwner(KVError):
    """The handle is closed, or its slot belongs to another generation by now."""


class StepIncomplete(KVError):
    """A verb that belongs at a step boundary was called inside a step, or a layer out of turn."""


class HoleNotAllowed(KVError):
    """Positions were left out or invalidated in a session opened without holes."""


class BranchDiverged(KVError):
    """The parent has moved since the branch began: rows appended, committed, invalidated or dropped,
    or a sibling's commit."""


class BranchesOpen(KVError):
    """A session with open branches was to be closed or rolled back past their fork."""


class SlotCancelled(KVError):
    """``commit_slot`` without a matching open reservation: another mutation cancelled it."""


class NumericRange(KVError, OverflowError):
    """A value that the storage format cannot hold."""


class Unsupported(KVError, NotImplementedError):
    """The candidate's capability table says that it lacks this verb."""


class UnknownCandidate(KVError, LookupError):
    """No candidate of that name is registered; the message lists the known ones."""


class CandidateNotBuilt(KVError, ImportError):
    """The candidate is known but its native part was not built; the message says why."""


class RetiredCandidate(KVError):
    """The adopted verdict retired this store; ``trial=True`` opens it all the same."""


class StaleBuild(KVError, ImportError):
    """The compiled kernels are older than their sources; the message has the command."""
