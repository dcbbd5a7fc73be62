"""Break the code on purpose, one place at a time, and see that the tests notice.

``make test-mutation``, or ``python tests/mutation/harness.py [WORD ...]`` for the mutants whose name or
arm has one of the words. Works on a copy of the sources with an environment and a build of its own, so
that the checkout stays as it is. Every test that a mutant names must pass on the sound copy and fail
on the mutated one. Status 0 when all were killed, 1 when one survived or proves nothing.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mutant import Mutant, MutantError
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = (".git", ".venv", "build", "results", ".snakemake", "__pycache__", ".*_cache")
TEST_TIMEOUT_S = 300
TIMED_OUT = 124


class Survived(Exception):
    """A test that should have failed on a mutant passed."""


class Kill(NamedTuple):
    """A test that went red, and what it said."""

    test: str
    why: str


class Tree:
    """A copy of the project, built; faults are put into it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "kvtrial"
        shutil.copytree(
            ROOT,
            self.root,
            ignore=shutil.ignore_patterns(*NOT_COPIED),
            copy_function=_copy_changed,
            dirs_exist_ok=True,
        )
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        # Everything but kvtrial comes from the environment that runs this.
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        others = [path for path in sys.path if Path(path).name == "site-packages"]
        (site / "dependencies.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
        self.is_built = False

    def build(self) -> None:
        """Compile what changed since the last build."""
        install = ("install", "-q", "--no-deps", "--no-build-isolation", "--editable", ".")
        done = self._run("-m", "pip", "--disable-pip-version-check", *install)
        if done.returncode:
            raise MutantError(f"the copy does not build:\n{done.stdout[-3000:]}")
        self.is_built = True

    def pytest(self, *ids: str) -> subprocess.CompletedProcess[str]:
        """Run tests; status `TIMED_OUT` where they do not end."""
        quiet = ("-q", "--no-header", "--tb=no", "-rfE", "-p", "no:cacheprovider")
        return self._run("-m", "pytest", *quiet, *ids, timeout_s=TEST_TIMEOUT_S * len(ids))

    def _run(self, *words: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *words]
        dropped = ("PYTHONPATH", "VIRTUAL_ENV", "KVTRIAL_RESULTS")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        try:
            return subprocess.run(
                command,
                cwd=self.root,
                # A stale .pyc would hide a fault of equal size in the same second.
                env={**kept, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, TIMED_OUT, f"not done in {timeout_s:.0f} s")

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[None]:
        """The body runs on the mutated tree."""
        path = self.root / mutant.file
        sound = path.read_text(encoding="utf-8")
        path.write_text(mutant.apply(sound), encoding="utf-8")
        try:
            if mutant.is_native or not self.is_built:
                self.build()
            yield
        finally:
            path.write_text(sound, encoding="utf-8")
            self.is_built = not mutant.is_native


def _copy_changed(source: str, target: str) -> None:
    """Copy a file that is new or has changed; the time of the others tells what was built from them."""
    if not (Path(target).is_file() and filecmp.cmp(source, target, shallow=False)):
        shutil.copyfile(source, target)


def try_mutant(tree: Tree, mutant: Mutant) -> list[Kill]:
    """The tests that killed it, which are all that it names.

    Raises
    ------
    Survived
        One of them passed.
    MutantError
        One of them isn't there or could not run, or the mutant does not apply or build.
    """
    kills = []
    with tree.broken(mutant):
        for test in mutant.red:
            done = tree.pytest(test)
            if done.returncode == 0:
                raise Survived(f"{test} stays green")
            if done.returncode not in (1, TIMED_OUT) and done.returncode > 0:
                raise MutantError(
                    f"{test} did not run (status {done.returncode}):\n{done.stdout[-1000:]}"
                )
            kills.append(Kill(test, _why(done)))
    return kills


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """What the failed test said, on one line."""
    if done.returncode < 0:
        return f"ended by signal {-done.returncode}"
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    why = said[-1].partition(" - ")[2] if said else done.stdout.strip()
    return why.removeprefix("AssertionError: ")[:90]


def check_sound(tree: Tree, mutants: list[Mutant]) -> None:
    """`MutantError` unless every test that is to go red passes on the copy as it is."""
    tree.build()
    done = tree.pytest(*dict.fromkeys(test for mutant in mutants for test in mutant.red))
    if done.returncode:
        raise MutantError(f"the tests fail on the sound code:\n{done.stdout[-3000:]}")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of a name, or an arm")
    parser.add_argument(
        "--folder", type=Path, help="keep the copy there: the next call builds what changed"
    )
    args = parser.parse_args(argv)
    words: list[str] = args.words
    chosen = [m for m in MUTANTS if not words or any(w in m.name or w in m.arms for w in words)]
    if not chosen:
        parser.error(f"no mutant has {' or '.join(words)}")
    for mutant in chosen:
        mutant.apply((ROOT / mutant.file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="kvtrial-mutation-") as folder:
        return try_all(args.folder or Path(folder), chosen)


def try_all(folder: Path, chosen: list[Mutant]) -> int:
    """Try each, saying how it ended, and print the table; the command's status."""
    _say("building a sound copy and running the tests on it; a few minutes")
    tree = Tree(folder)
    check_sound(tree, chosen)
    table: list[tuple[Mutant, str]] = []
    missed = 0
    for number, mutant in enumerate(chosen, start=1):
        start = time.monotonic()
        try:
            kills = try_mutant(tree, mutant)
            lines = [f"{kill.test.rpartition('::')[2]}: {kill.why}" for kill in kills]
            ending = "killed"
        except (Survived, MutantError) as error:
            lines = [f"NOT KILLED: {error}"]
            ending = "NOT KILLED"
            missed += 1
        table += [(mutant, line) for line in lines]
        spent = time.monotonic() - start
        _say(
            f"{'+'.join(mutant.arms)} {mutant.name}: {ending}, {spent:.0f} s; "
            f"{len(chosen) - number} left"
        )
    for mutant, line in table:
        print(f"{'+'.join(mutant.arms):6} {mutant.name:68} {line}")
    print(f"{len(chosen) - missed} of {len(chosen)} mutants killed")
    return 1 if missed else 0


def _say(text: str) -> None:
    print(f"mutation: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MutantError as error:
        sys.exit(f"mutation: {error}")
