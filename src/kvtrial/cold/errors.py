"""What a cold store raises. Each message names the value, what is allowed, and what to do."""

from __future__ import annotations

import errno
import os
import resource

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


class TooManyFiles(ColdError, OSError):
    """The process may not open another file; nothing was changed."""


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


def of_disk(error: OSError, path: object, what: str) -> ColdError:
    """An error of the system as one of ours. ``what`` can't be done to ``path``, and was not begun."""
    code = error.errno or 0
    said = f"{path} can't be {what} ({os.strerror(code)})"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotWritable(
            code,
            f"{said}; nothing was changed. A cold store takes a lock and recovers as it opens: give a "
            "folder that you may read and write to",
        )
    if code in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(code, f"{said}; free space or run gc, and try again")
    if code in (errno.EMFILE, errno.ENFILE):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return TooManyFiles(
            code,
            f"{said}: this process may have {limit} files open; nothing was changed. Raise the limit "
            "(ulimit -n), or close other files",
        )
    return Unreadable(code, f"{said}; nothing was changed; check the disk, then try again")
