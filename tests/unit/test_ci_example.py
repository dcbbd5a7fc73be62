"""The GitHub workflow of docs/candidates/ci.md: it parses, and what it calls is there."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest
import yaml
from trial_events import ROOT

from kvtrial.tools.command import parser

PAGE = (ROOT / "docs" / "candidates" / "ci.md").read_text(encoding="utf-8")
(TEXT,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
STEPS = yaml.safe_load(TEXT)["jobs"]["try"]["steps"]
RUNS = [step["run"] for step in STEPS if "run" in step]
LINES = [line for run in RUNS for line in run.splitlines()]


def test_every_step_runs_or_uses_something():
    assert [sorted({"run", "uses"} & step.keys()) for step in STEPS].count([]) == 0
    assert len(RUNS) == 4


@pytest.mark.parametrize("run", RUNS)
def test_a_shell_takes_its_lines(run):
    subprocess.run(["bash", "-n"], input=run, text=True, check=True)


def test_kvtrials_commands_are_those_that_there_are():
    called = [line.partition("-m kvtrial ")[2] for line in LINES if "-m kvtrial " in line]
    found = [parser().parse_args(shlex.split(words.partition(" > ")[0])) for words in called]
    assert [args.action.__name__ for args in found] == ["fetch", "try_"]
    assert (found[1].against_ref, found[1].context) == ("origin/$BASE", [512, 4096])
    assert (found[1].fail_below, found[1].markdown) == (0.97, True)


def test_its_targets_of_make_are_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [line.split()[1] for line in LINES if line.startswith("make ")]
    assert targets == ["setup"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_what_a_step_uses_of_an_earlier_one_is_made_there():
    assert "> ../comment.md" in RUNS[1] and "--body-file comment.md" in RUNS[2]
    assert 'echo "code=$?" >> "$GITHUB_ENV"' in RUNS[1] and RUNS[3] == 'exit "$code"'
    # The branch to merge into is in the checkout.
    assert STEPS[0]["with"]["fetch-depth"] == 0
    assert STEPS[3]["env"]["BASE"] == "${{ github.base_ref }}"
