"""A cold store's folder: whether it is one, which format it has, and its lock.

Everything of a store lies in its folder, on one filesystem, and no name in it leads elsewhere: files
are renamed and removed there.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtrial.cold import disk
from kvtrial.cold.errors import ColdError, ForeignStore, FormatMismatch, NotWritable, of_disk
from kvtrial.cold.records import checksum

#: Raised with each change of what is written; 2: a sum for each page of a segment's record; 3: an id for
#: each segment, a sum in the format file.
FORMAT = 3
_FORMAT_FILE = "FORMAT.json"
#: What is longer is no format file.
_FORMAT_BYTES = 4096
_LOCK_FILE = "LOCK"
#: Of a path at which nothing can be made, whatever the disk is like: below /proc, too long, a circle of links.
_NO_PATH = (errno.EINVAL, errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP)


def claim(path: Path, kind: str) -> int:
    """Make or check the folder and take its lock.

    Returns
    -------
    int
        The descriptor whose closing releases the lock.

    Raises
    ------
    ForeignStore, FormatMismatch, StoreLocked, NotWritable, DiskFull, TooManyFiles, Unreadable
    """
    try:
        _refuse_foreign(path)
        disk.make_dir(path, disk.FOLDER_MODE)
        lock = disk.lock(path / _LOCK_FILE)
        try:
            _claim_format(path, kind)
        except BaseException:
            os.close(lock)
            raise
    except ColdError:
        raise
    except (FileExistsError, NotADirectoryError) as error:
        raise ForeignStore(
            f"{path} can't be made: a part of it is a file, or a link to nothing; give another folder"
        ) from error
    except OSError as error:
        if error.errno in _NO_PATH:
            raise NotWritable(
                error.errno,
                f"{path} can't be made ({os.strerror(error.errno)}); nothing was changed: give another folder",
            ) from error
        raise of_disk(error, path, "written") from error
    return lock


def _refuse_foreign(path: Path) -> None:
    """`ForeignStore` for a file, or a folder with something else in it; nothing is created."""
    if path.is_dir():
        names = {*disk.names(path)} - {_LOCK_FILE, f".{_FORMAT_FILE}.new"}
        if names and _FORMAT_FILE not in names:
            raise ForeignStore(
                f"{path} holds {', '.join(sorted(names)[:3])} and no {_FORMAT_FILE}: it is no cold "
                "store; use an empty or new folder"
            )
        for inside in _below(path):
            if inside.is_symlink():
                raise ForeignStore(
                    f"{inside} leads to {inside.readlink()}; a store removes and renames what it "
                    "finds, so nothing in its folder may lie elsewhere: move it here, or link the "
                    "whole folder"
                )
    elif path.exists():
        raise ForeignStore(f"{path} is a file; give a folder")


def _below(path: Path) -> Iterator[Path]:
    """Everything in a folder; each part of it can be listed."""
    for name in disk.names(path):
        yield path / name
        if (path / name).is_dir() and not (path / name).is_symlink():
            yield from _below(path / name)


def kind_of(path: Path) -> str | None:
    """The kind of the store that lies there, None where none does."""
    written = _written(path / _FORMAT_FILE)
    return None if written is None else str(written.get("kind"))


def _written(file: Path) -> dict[str, Any] | None:
    """What the format file says, None where there is none."""
    try:
        data = disk.read_short(file, _FORMAT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise of_disk(error, file, "read") from error
    try:
        written = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ForeignStore(f"{file} is no JSON ({error}); use another folder") from None
    if not isinstance(written, dict):
        raise ForeignStore(f"{file} holds {written!r}; use another folder")
    return written


def _claim_format(path: Path, kind: str) -> None:
    """Check which format the folder has, or give a new one ours."""
    says = {"format": FORMAT, "kind": kind}
    # Opened as another kind, a store would be taken for one whose files are gone.
    ours = {**says, "sum": f"{checksum(json.dumps(says).encode()):016x}"}
    theirs = _written(path / _FORMAT_FILE)
    if theirs is None:
        disk.write_file(path / _FORMAT_FILE, json.dumps(ours).encode())
    elif theirs | says == theirs and theirs != ours:
        raise FormatMismatch(
            f"{path / _FORMAT_FILE} is damaged: it says {theirs}, and the sum of that is "
            f"{ours['sum']}; nothing was changed: put the file back from a copy"
        )
    elif theirs != ours:
        raise FormatMismatch(
            f"{path} was written as {theirs}; this opener reads {ours}; use another "
            "folder, or the version that wrote it"
        )
