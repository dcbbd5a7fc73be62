"""The one way to write a file: beside its place, then renamed, so that half of one is never read as whole.

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A name beside ``path`` to write under; it becomes ``path`` when the body is done.

    Parameters
    ----------
    path : Path
        Its folder is made where it is missing.
    durable : bool
        Contents and name are synced, so that the file is there after a power cut too.

    Yields
    ------
    Path
        In the same folder. Nothing is left of it where the body raises; ``path`` is then as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield name
        if durable:
            _sync(name)
        name.replace(path)
        if durable:
            _sync(path.parent)
    finally:
        name.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text as UTF-8; see `beside`."""
    with beside(path, durable=durable) as name:
        name.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
