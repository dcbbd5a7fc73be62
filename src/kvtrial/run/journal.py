"""Finished work of a measuring stage on disk, so that a killed run goes on where it stopped.

``journal/<stage>/attempt-<n>/<unit>.json`` holds the rows of one finished unit (a block, a prompt).
An attempt without ``published.json`` is resumed; a published one means that the stage was forced,
and the next is opened. No rule declares these files, so nothing but a person removes them.

A unit is written beside, synced and renamed: a file that a kill cut short never bears a unit's
name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtrial.host.files import parsed_json, write_text

Row = dict[str, Any]

_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]*")
_ATTEMPT = re.compile(r"attempt-([1-9][0-9]*)")
_PUBLISHED = "published"
#: The unit that a stage puts last.
COMPLETE = "complete"


class JournalError(ValueError):
    """A file of the journal is not what this module writes; the message names it."""


class Attempt:
    """One try at a stage. ``number`` counts from 1."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self.number = number

    @property
    def published(self) -> bool:
        """Whether the stage has nothing left to do for this attempt."""
        return (self._folder / f"{_PUBLISHED}.json").is_file()

    @property
    def completed_at(self) -> float:
        """When the last unit was put, in seconds since the epoch; 0 while it is not there."""
        path = self._path(COMPLETE)
        return path.stat().st_mtime if path.is_file() else 0.0

    def has(self, unit: str) -> bool:
        """Whether that unit is finished."""
        return self._path(unit).is_file()

    def put(self, unit: str, rows: Iterable[Row]) -> None:
        """Write a finished unit; once it is there it never changes.

        Raises
        ------
        JournalError
            The unit is there already, or its name can't be a file's.
        """
        if self.has(unit):
            raise JournalError(f"{self._path(unit)} is finished; a unit is written once")
        self._write(self._path(unit), list(rows))

    def unit(self, unit: str) -> list[Row]:
        """Rows of one finished unit."""
        return _read_rows(self._path(unit), self.number)

    def rows(self) -> list[Row]:
        """Rows of every finished unit, sorted by unit; column ``attempt`` is this one's number."""
        rows: list[Row] = []
        for path in sorted(self._folder.glob("*.json")):
            if path.stem != _PUBLISHED:
                rows += _read_rows(path, self.number)
        return rows

    def publish(self) -> None:
        """Say that nothing is left to do; the next run of the stage opens another attempt."""
        self._write(self._folder / f"{_PUBLISHED}.json", [])

    def _path(self, unit: str) -> Path:
        if not _UNIT.fullmatch(unit) or unit == _PUBLISHED:
            raise JournalError(
                f"unit {unit!r}: use letters, digits, '@', '.', '_' and '-', not {_PUBLISHED!r}"
            )
        return self._folder / f"{unit}.json"

    def _write(self, path: Path, rows: list[Row]) -> None:
        write_text(path, json.dumps(rows), durable=True)


class Journal:
    """All attempts at one stage of a run.

    Parameters
    ----------
    run_dir : Path
        ``results/<run_id>``.
    stage : str
        ``m1``, ``m2``, ``parity``, …
    """

    def __init__(self, run_dir: Path, stage: str) -> None:
        self._folder = run_dir / "journal" / stage

    def attempts(self) -> list[Attempt]:
        """Those that exist, first to last."""
        if not self._folder.is_dir():
            return []
        numbers = [
            int(match[1])
            for path in self._folder.iterdir()
            if (match := _ATTEMPT.fullmatch(path.name))
        ]
        return [Attempt(self._folder / f"attempt-{n}", n) for n in sorted(numbers)]

    def completed_since(self, moment: float) -> bool:
        """Whether an attempt was completed after ``moment``, in seconds since the epoch."""
        return any(a.completed_at > moment for a in self.attempts())

    def publish(self) -> None:
        """Publish the last attempt, if it is complete."""
        attempts = self.attempts()
        if attempts and attempts[-1].has(COMPLETE) and not attempts[-1].published:
            attempts[-1].publish()

    def attempt(self) -> Attempt:
        """The last attempt if it is not published yet, else the next one."""
        attempts = self.attempts()
        if attempts and not attempts[-1].published:
            return attempts[-1]
        number = attempts[-1].number + 1 if attempts else 1
        return Attempt(self._folder / f"attempt-{number}", number)

    def all_rows(self) -> list[Row]:
        """Rows of all attempts: none is ever left out of the table."""
        return [row for attempt in self.attempts() for row in attempt.rows()]


def _read_rows(path: Path, number: int) -> list[Row]:
    try:
        rows = parsed_json(path.read_bytes())
    except (ValueError, OSError) as error:
        raise JournalError(
            f"{path} can't be read: {error}; remove that file to measure its unit again"
        ) from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise JournalError(f"{path} is not a list of rows; remove it to measure its unit again")
    return [{**row, "attempt": number} for row in rows]
