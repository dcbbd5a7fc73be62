"""Memory: the budget that pools reserve from, and the poison that shows a use of bytes that nobody wrote."""

from __future__ import annotations

import os
import threading

from kvtrial.contract.arguments import integer, shown
from kvtrial.contract.errors import InvalidArgument, PoolExhausted, StaleOwner

#: Set to 1, it makes stores fill fresh, freed, reserved and padding bytes with NaN, so that a use of
#: one shows. The conformance suite sets it.
POISON_VARIABLE = "KVTRIAL_DEBUG_POISON"


class MemoryLedger:
    """A hard budget in bytes that pools reserve from, once, when they open.

    Invariant: the sum of open reservations never exceeds ``budget_bytes``.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = integer(budget_bytes, "budget_bytes", 1)
        self._reserved: dict[int, tuple[str, int]] = {}
        self._next = 0
        self._lock = threading.RLock()  # stores may open and close in several threads

    @property
    def reserved_bytes(self) -> int:
        """Bytes that open pools hold."""
        with self._lock:
            return sum(n for _, n in self._reserved.values())

    @property
    def free_bytes(self) -> int:
        """Bytes that a pool could still reserve."""
        return self.budget_bytes - self.reserved_bytes

    def reserve(self, owner: str, n_bytes: int) -> int:
        """Reserve ``n_bytes`` for ``owner`` and return a token for `release`."""
        if not isinstance(owner, str):
            raise InvalidArgument(f"owner is {shown(owner)}; give a str")
        n_bytes = integer(n_bytes, "n_bytes", 0)
        with self._lock:
            if n_bytes > self.free_bytes:
                held = ", ".join(f"{o} {n}" for o, n in self._reserved.values()) or "nobody"
                raise PoolExhausted(
                    f"{owner} asks for {n_bytes} bytes; {self.free_bytes} of {self.budget_bytes} are "
                    f"free (held by: {held}); close a store or raise budget_bytes"
                )
            self._next += 1
            self._reserved[self._next] = (owner, n_bytes)
            return self._next

    def release(self, token: int) -> None:
        """Give a reservation back; a second release of the same token raises `StaleOwner`."""
        token = integer(token, "token")
        with self._lock:
            released = self._reserved.pop(token, None)
        if released is None:
            raise StaleOwner(f"reservation {token} is not open: it was released before")


def poison_wanted() -> bool:
    """Whether a store that opens now should poison its memory (`POISON_VARIABLE`)."""
    return os.environ.get(POISON_VARIABLE) == "1"
