"""The table of mutants fits the code, and the harness tells a killed mutant from a survivor."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import harness
import pytest
from mutant import Mutant, MutantError
from mutants import MUTANTS
from mutants_cold import COLD
from mutants_hot import HOT, KERNEL_FAULTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.apply(source) != source
    assert mutant.red


@pytest.mark.parametrize("times", [0, 2])
def test_a_text_that_is_not_there_once_names_its_mutant(times: int) -> None:
    with pytest.raises(MutantError, match=rf"'{HOT[0].name}': its text occurs {times} times"):
        HOT[0].apply(HOT[0].old * times)


def test_every_fault_is_put_into_every_contender() -> None:
    covered = {(mutant.name.split(":")[0], arm) for mutant in HOT for arm in mutant.arms}
    contenders = ("K1", "K1T", "K3", "K3T", "K4")
    assert covered == {(fault, arm) for fault in KERNEL_FAULTS for arm in contenders}
    assert {mutant.name.split(":")[0] for mutant in COLD} == {
        "fsync",
        "truncation",
        "checksum",
        "reading",
        "numbers",
    }
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_tests_that_must_go_red_are_there() -> None:
    ids = sorted({test for mutant in MUTANTS for test in mutant.red})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", *ids]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


class PretendTree(harness.Tree):
    """A tree without a build; its tests end with the codes given."""

    def __init__(self, root: Path, codes: dict[str, int]) -> None:
        self.root, self.codes, self.builds = root, codes, 0
        self.is_built = True

    def build(self) -> None:
        self.builds += 1
        self.is_built = True

    def pytest(self, *ids: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], self.codes[ids[0]], f"FAILED {ids[0]} - why\n")


@pytest.fixture
def mutant(tmp_path: Path) -> Mutant:
    (tmp_path / "code.pyx").write_text("sound\n", encoding="utf-8")
    return Mutant("fsync: none", ("K1",), "code.pyx", "sound", "broken", ("a", "b"))


@pytest.mark.parametrize("code", [1, -11, harness.TIMED_OUT])
def test_a_failure_a_crash_and_a_hang_are_red(mutant: Mutant, tmp_path: Path, code: int) -> None:
    tree = PretendTree(tmp_path, {"a": 1, "b": code})
    assert [kill.test for kill in harness.try_mutant(tree, mutant)] == ["a", "b"]
    assert (tmp_path / "code.pyx").read_text(encoding="utf-8") == "sound\n"
    assert (tree.builds, tree.is_built) == (1, False)


def test_a_test_that_stays_green_lets_the_mutant_survive(mutant: Mutant, tmp_path: Path) -> None:
    with pytest.raises(harness.Survived, match="b stays green"):
        harness.try_mutant(PretendTree(tmp_path, {"a": 1, "b": 0}), mutant)


def test_a_test_that_is_not_there_is_no_kill(mutant: Mutant, tmp_path: Path) -> None:
    with pytest.raises(MutantError, match="status 4"):
        harness.try_mutant(PretendTree(tmp_path, {"a": 4}), mutant)


def test_python_is_not_built(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("sound\n", encoding="utf-8")
    tree = PretendTree(tmp_path, {"a": 1, "b": 1})
    harness.try_mutant(tree, dataclasses.replace(mutant, file="code.py"))
    assert (tree.builds, tree.is_built) == (0, True)
