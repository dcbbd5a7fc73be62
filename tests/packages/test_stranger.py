"""Somebody else's package, installed as people install one: nothing of ours knows its candidates."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvtrial import candidates
from kvtrial.conformance import TESTS, run_isolated
from kvtrial.decision import output
from kvtrial.measure import allocations, child
from kvtrial.measure.rotation import orders
from kvtrial.measure.specs import AttentionSpec
from kvtrial.run import events

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it, as pip leaves it there."""
    folder = tmp_path_factory.mktemp("stranger")
    source = shutil.copytree(Path(__file__).parent / "stranger", folder / "source")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index")
    build = ("--no-deps", "--no-build-isolation", "--target", str(folder / "site"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *quiet, *build, str(source)], check=True
    )
    return folder / "site"


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package is found here and in the processes that a test starts."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))
    candidates.candidates.cache_clear()
    yield
    candidates.candidates.cache_clear()


def test_the_suite_takes_it_in_by_its_name(installed: None, tmp_path: Path) -> None:
    document = run_isolated("Wrapped", tmp_path / "Wrapped.json", (16,))
    assert list(document["outcomes"]) == [test.name for test in TESTS]
    assert (document["failed"], document["gaps"], document["crash"]) == ([], [], "")
    assert document["missing_capabilities"] == []


@pytest.mark.parametrize(
    ("name", "test", "check"),
    [
        ("ForgetsARow", "AttentionMatchesReferenceInterpreter", "attention.every_head_dim"),
        ("KeepsItsOutput", "AttentionMatchesReferenceInterpreter", "a_new_row_counts_at_once"),
        ("LeaksAPage", "KvRollbackRestoresPrefix", "rollback.pages_come_back"),
    ],
)
def test_a_wrong_one_is_caught_by_name(
    installed: None, tmp_path: Path, name: str, test: str, check: str
) -> None:
    document = run_isolated(name, tmp_path / "out.json", (16,), tests=(test,))
    assert (document["candidate"], document["failed"]) == (name, [test])
    assert check in document["outcomes"][test]["16"]["detail"]


@pytest.mark.skipif(allocations.library() is None, reason="needs Linux and glibc")
def test_one_that_allocates_in_a_step_is_caught(installed: None, tmp_path: Path) -> None:
    test = "KvPoolBoundedNoStepAllocation"
    document = run_isolated("Allocates", tmp_path / "out.json", (16,), tests=(test,))
    assert document["allocations_counted"] is True
    detail = document["outcomes"][test]["16"]["detail"]
    assert detail.startswith("pool.a_step_allocates_nothing") and "allocation calls" in detail


def test_one_that_crashes_is_a_result(installed: None, tmp_path: Path) -> None:
    path = tmp_path / "new" / "Crashes.json"
    document = run_isolated("Crashes", path, (16,))
    assert (document["passed"], document["outcomes"]) == (False, {})
    assert document["crash"].startswith("crashed in ") and "ended by SIGSEGV" in document["crash"]
    assert json.loads(path.read_text(encoding="utf-8")) == document


def test_one_that_remembers_is_caught_while_it_is_timed(installed: None, tmp_path: Path) -> None:
    """Attention alone, as M1 times it: what it gave is compared with the oracle."""
    names = ["Wrapped", "KeepsItsOutput"]
    spec = AttentionSpec(
        shape={"layers": 2, "q_heads": 6, "kv_heads": 2, "head_dim": 32},
        candidates=names,
        orders=orders(names, 6, 1)[:6],
        snapshots=[],
        synthetic_tokens=50,
        threads=1,
        page_tokens=16,
        warmup_iterations=2,
        rotation_llc_multiple=0,
        seed=1,
    )
    rows = child.run("kvtrial.measure.attention", spec, threads=1)
    assert [row for row in rows if row["metric"] == "failed"] == []
    named = {"stage": "m1", "context": 50, "protocol_sha256": "", "build_id": ""}
    errors = [events.event(**row, **named) for row in rows if row["metric"] == "m1/output_error"]
    reasons = output.reasons(events.to_frame(errors))
    assert list(reasons) == ["KeepsItsOutput"]
    assert "times its error bound off the oracle" in reasons["KeepsItsOutput"][0]


@pytest.mark.slow
def test_a_whole_trial_takes_it_in(installed: None, tmp_path: Path) -> None:
    """The right one is timed, judged and challenges; the wrong one is out, and the rest goes on."""
    smoke = ROOT / "config" / "protocol-smoke.yaml"
    registered = yaml.safe_load(smoke.read_text(encoding="utf-8"))
    arms = ["K0", "A1", "A2", "K1", "K1T", "K3", "Wrapped", "KeepsItsOutput"]
    registered["candidates"] = arms
    registered["decision"] |= {"challengers": ["Wrapped"], "profiles": []}
    registered["hypotheses"] = [
        h for h in registered["hypotheses"] if {h["from"], h["to"]} <= {*arms}
    ]
    sampling = registered["sampling"]
    sampling["pairs"] = [pair for pair in sampling["pairs"] if {*pair} <= {*arms}]
    path = tmp_path / "protocol.yaml"
    path.write_text(yaml.safe_dump(registered), encoding="utf-8")
    results = tmp_path / "results"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "snakemake", "--cores", "2", "--profile", "profiles/smoke"),
            *("--config", "model=tiny-llama", f"protocol={path}"),
        ],
        cwd=ROOT,
        env={**os.environ, "KVTRIAL_RESULTS": str(results)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    (path,) = results.glob("*/verdict.json")
    verdict = json.loads(path.read_text(encoding="utf-8"))
    timed = {(arm["candidate"], arm["context"]) for arm in verdict["arms"]}
    assert {context for name, context in timed if name == "Wrapped"} == {64, 128, 256}
    assert "KeepsItsOutput" not in {name for name, _ in timed}
    assert verdict["eligibility"]["Wrapped"] == []
    assert verdict["eligibility"]["KeepsItsOutput"][0] == {
        "why": "conformance",
        "text": "AttentionMatchesReferenceInterpreter@P16 failed",
    }
    judged = {
        (c["incumbent"], c["context"])
        for c in verdict["contrasts"]
        if c["challenger"] == "Wrapped" and c["ratio"] is not None
    }
    assert judged >= {(name, 128) for name in registered["decision"]["incumbents"]}
    assert verdict["language"]["outcome"] in ("KEEP", "ADOPT")
    assert (
        "Wrapped runs at " in verdict["language"]["reason"]
        or "Wrapped is faster than" in verdict["language"]["reason"]
    )
