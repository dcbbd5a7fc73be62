"""A fault that is put into the code on purpose, and the tests that must go red for it.

A mutant replaces one text of one file. The text must occur there exactly once: one that no longer does
is an error that names the mutant (`test_mutants` looks on every run of the tests, `harness` before it
builds), so that a table can't outlive the code that it is about.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class MutantError(RuntimeError):
    """A mutant proves nothing: it does not apply, does not build, or names a test that isn't there."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes
    ----------
    name : str
        What is broken, and where.
    arms : tuple of str
        Candidates and cold stores that run the mutated source.
    file : str
        Relative to the project.
    old, new : str
        What is replaced, and by what.
    red : tuple of str
        Pytest node ids; each must fail.
    """

    name: str
    arms: tuple[str, ...]
    file: str
    old: str
    new: str
    red: tuple[str, ...]

    def apply(self, source: str) -> str:
        """The mutated source; `MutantError` unless the old text occurs exactly once."""
        found = source.count(self.old)
        if found != 1:
            raise MutantError(
                f"mutant {self.name!r}: its text occurs {found} times in {self.file}, not once; "
                f"adapt tests/mutation: {self.old!r}"
            )
        return source.replace(self.old, self.new)

    @property
    def is_native(self) -> bool:
        """Whether the kernels have to be built again."""
        return Path(self.file).suffix != ".py"
