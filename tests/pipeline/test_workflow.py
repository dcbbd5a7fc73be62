"""What Snakemake would do, and what it says to a wrong configuration. Nothing is measured here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHAIN = {
    "build",
    "model",
    "manifest",
    "estimate",
    "aa",
    "control",
    "workload",
    "conformance",
    "parity",
    "m1",
    "m2",
}
CHAIN |= {"direct_write", "cold_tier", "verdict"}


def planned(text: str) -> dict[str, int]:
    """Rule → jobs, from the table that a dry run prints."""
    return {name: int(n) for name, n in re.findall(r"^(\w+) +(\d+)$", text, re.MULTILINE)}


@pytest.mark.parametrize(
    "arguments", [[], ["--profile", "profiles/smoke"], ["--profile", "profiles/full"]]
)
def test_every_stage_is_planned_once_for_the_verdict(snakemake, arguments):
    done = snakemake("-n", *arguments)
    assert done.returncode == 0, done.stdout
    assert planned(done.stdout) == {**dict.fromkeys(CHAIN, 1), "all": 1, "total": len(CHAIN) + 1}


def test_report_and_adopt_follow_the_verdict(snakemake):
    done = snakemake("-n", "report", "adopt")
    assert done.returncode == 0, done.stdout
    assert set(planned(done.stdout)) == CHAIN | {"report", "adopt", "total"}


def test_the_peers_need_no_verdict(snakemake):
    done = snakemake("-n", "peers", "--config", "peers={contexts: [512], threads: [1]}")
    assert done.returncode == 0, done.stdout
    wanted = {"build", "model", "manifest", "estimate", "workload", "conformance"}
    wanted |= {"peers", "total"}
    assert set(planned(done.stdout)) == wanted


def test_a_wrong_number_of_blocks_is_named(snakemake):
    done = snakemake("-n", "--config", "peers={blocks: 1}")
    assert done.returncode == 1
    assert "On instance['peers']['blocks']" in done.stdout


def test_the_build_alone_needs_nothing_else(snakemake):
    done = snakemake("-n", "build")
    assert done.returncode == 0, done.stdout
    assert planned(done.stdout) == {"build": 1, "total": 1}


def test_measuring_stages_take_the_machine_and_never_retry():
    measuring = {"estimate", "workload", "parity", "m1", "m2", "aa", "direct_write"}
    measuring |= {"cold_tier", "conformance", "control", "peers"}
    for path in (ROOT / "workflow" / "rules").glob("*.smk"):
        text = path.read_text(encoding="utf-8")
        assert ("machine=1" in text) == (path.stem in measuring), path.name
        assert "retries" not in text, path.name


def test_an_unknown_model_lists_the_known_ones(snakemake):
    done = snakemake("-n", "--config", "model=smollm3")
    assert done.returncode == 1
    known = yaml.safe_load((ROOT / "config" / "models.yaml").read_text(encoding="utf-8"))["models"]
    assert "kvtrial: no model 'smollm3'; known: " + ", ".join(known) in done.stdout
    assert "common.smk" not in done.stdout  # one line, no stack


def test_an_unknown_key_is_named(snakemake):
    done = snakemake("-n", "--config", "modle=tiny-llama")
    assert done.returncode == 1
    assert "modle" in done.stdout and "config.schema.yaml" in done.stdout
