"""What a cold store raises. Each message names the value, what is allowed, and what to do."""

from __future__ import annotations

from kvtrial.contract import KVError


class ColdError(KVError):
    """Base of everything that a cold store raises of its own."""


class StoreLocked(ColdError):
    """Another opener, in this process or another one, holds the store."""


class StoreClosed(ColdError):
    """The store was closed."""


class ForkedProcess(ColdError):
    """The store was opened before this process was forked, or RocksDB was used before it was."""


class StorePoisoned(ColdError):
    """A sync or index write failed; what is durable is unknown until the store is reopened."""


class ForeignStore(ColdError):
    """The folder holds something that is not a cold store."""


class NotWritable(ColdError, OSError):
    """The folder can't be written to: its permissions, or a filesystem mounted read-only."""


class FormatMismatch(ColdError):
    """The folder was written by another format version or another kind of store."""


class IdentityMismatch(ColdError):
    """Pages of another model, layout, dtype or page size than the store was opened for."""


class KeyCollision(ColdError):
    """Another prefix is stored under the same key; nothing of it is served or replaced."""


class CorruptSegment(ColdError):
    """A record that was complete no longer is what was written; names file and offset."""


class Unreadable(ColdError, OSError):
    """The disk gave an error instead of bytes; what they are is unknown, and nothing was changed."""


class CorruptIndex(ColdError):
    """The RocksDB index can't be read, or contradicts itself."""


class DiskFull(ColdError, OSError):
    """No space left; the batch was rolled back whole and the store goes on."""
