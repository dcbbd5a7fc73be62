"""Files: written beside their place and renamed, so that half of one is never read as whole; and asked for.

Standard library only, and PyYAML where a YAML is asked for.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def is_file(path: Path) -> bool:
    """Whether a file is there; False where a name is too long to be any file's."""
    return _said(path.is_file)


def is_dir(path: Path) -> bool:
    """Whether a folder is there; False where a name is too long to be any folder's."""
    return _said(path.is_dir)


def _said(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


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

    Raises
    ------
    FileExistsError
        ``path`` is a device, a pipe or a folder: renaming would put a file in its place.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is no regular file; give the name of one", str(path))
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


class NotText(ValueError):
    """Bytes that are no JSON or no YAML; the message is the parser's."""


def parsed_json(data: bytes) -> Any:
    """A JSON document; `NotText` for anything else, brackets too deep to follow too."""
    return _parsed(json.loads, data)


def parsed_yaml(data: bytes) -> Any:
    """A YAML document; `NotText` for anything else, a date that no calendar has too."""
    import yaml  # not of the standard library, and not needed by who writes

    try:
        return _parsed(yaml.safe_load, data)
    except yaml.YAMLError as error:
        raise NotText(str(error)) from None


def _parsed(parse: Callable[[str], Any], data: bytes) -> Any:
    try:
        return parse(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise NotText(str(error)) from None


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
