"""`kvtrial try`: what it says of a candidate, and that it leaves nothing but a snapshot behind."""

from __future__ import annotations

import functools
import io
import math
import shutil

import numpy as np
import pytest
import yaml
from rich.console import Console
from trial_events import REGISTERED, ROOT

from kvtrial.conformance import isolated
from kvtrial.contract import UnknownCandidate
from kvtrial.engine.errors import WorkloadError
from kvtrial.run import corpus, models
from kvtrial.run.layout import ConfigError
from kvtrial.tools import tried, trying


def test_as_many_blocks_as_two_percent_need_by_their_spread():
    plan = trying.sampling(REGISTERED, trying.Pair("K3", "K1"), None)
    assert (plan.first, plan.most, plan.pairs) == (6, 16, (("K3", "K1"),))
    # t for 5 degrees of freedom is 2.5706: (2.5706 * 0.02 / 0.02)^2 = 6.6; a spread of 3% needs 14.9.
    unit = np.array([1, -1, 1, -1, 1, -1]) / math.sqrt(6 / 5)
    for spread, blocks in ((0.01, 6), (0.02, 7), (0.03, 15), (0.06, 16)):
        assert plan.wanted(spread * unit[None, :]) == blocks
    fixed = trying.sampling(REGISTERED, trying.Pair("K3", "K1"), 4)
    assert (fixed.first, fixed.most) == (4, 4)


def timed(ratio, bounds, context=4096):
    decode = {"ratio": ratio, "ci95": bounds, "n_blocks": 12, "problem": "no blocks"}
    return {"context": context, "decode": decode, "attention": {"ratio": None, "ci95": None}}


@pytest.mark.parametrize(
    ("ratio", "bounds", "said"),
    [
        (1.08, [1.06, 1.1], "X1 is 1.080x K1 at 4,096 [1.060, 1.100]: faster"),
        (1.0, [0.98, 1.02], "X1 is 1.000x K1 at 4,096 [0.980, 1.020]: no difference is shown"),
        (0.8, [0.7, 0.9], "X1 is 0.800x K1 at 4,096 [0.700, 0.900]: slower"),
        (None, None, "X1 at 4,096: no interval, no blocks"),
    ],
)
def test_the_result_is_one_sentence(ratio, bounds, said):
    document = {"candidate": "X1", "against": "K1", "ref": None, "context_length": 8192}
    assert tried.sentence(document, timed(ratio, bounds)) == said


def test_slower_is_what_the_whole_interval_says():
    """A planted 5% is; one whose interval holds the limit is not, and nothing is where nothing was timed."""
    cells = [
        timed(0.95, [0.935, 0.965], 512),
        timed(0.96, [0.93, 0.99], 4096),
        timed(None, None, 16384),
    ]
    assert tried.slower({"cells": cells}, 0.97) == [512]
    assert tried.slower({"cells": cells}, 0.9) == []
    # A kernel that is 5% slower in a step of which it is a half: the decode's interval holds the limit.
    cells[1]["attention"] = {"ratio": 0.95, "ci95": [0.94, 0.96]}
    assert tried.slower({"cells": cells}, 0.97) == [512, 4096]


def test_against_a_ref_the_sentence_says_what_attention_did():
    document = {"candidate": "K1", "against": "K1@3f2a1bc", "ref": "main", "context_length": 8192}
    cell = {**timed(0.97, [0.96, 0.98]), "attention": {"ratio": 0.95, "ci95": [0.94, 0.96]}}
    assert tried.sentence(document, cell) == (
        "K1 is 0.970x K1@3f2a1bc at 4,096 [0.960, 0.980]: slower; its attention 0.950 [0.940, 0.960]"
    )


def test_a_candidate_is_not_tried_against_itself():
    with pytest.raises(trying.NothingToCompare, match="K1 is the store that others are tried"):
        trying.measure("K1", model="tiny-llama", against="K1")


def test_an_unknown_candidate_lists_the_known_ones():
    with pytest.raises(UnknownCandidate, match="no candidate 'K9'; registered: A1, "):
        trying.measure("K9", model="tiny-llama")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Few, short and never void blocks; two tests of the suite; results below ``tmp_path``."""
    config = tmp_path / "config"
    shutil.copytree(ROOT / "config", config)
    registered = yaml.safe_load((config / "protocol.yaml").read_text(encoding="utf-8"))
    registered["rotation"] |= {"warmup_rounds": 2, "rounds": 8, "alone_steps": 0}
    registered["m1"] |= {"iterations": 2, "warmup_iterations": 1, "rotation_llc_multiple": 0}
    smoke = yaml.safe_load((config / "protocol-smoke.yaml").read_text(encoding="utf-8"))
    registered["void"] = smoke["void"]  # throttling voids no block
    registered["probes"] = smoke["probes"]
    (config / "protocol.yaml").write_text(yaml.safe_dump(registered), encoding="utf-8")
    # No one is waited for.
    monkeypatch.setenv("KVTRIAL_LOCK", str(tmp_path / "machine.lock"))
    monkeypatch.setenv("KVTRIAL_CONFIG", str(config))
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(trying, "ATTENTION_BLOCKS", 1)
    few = functools.partial(
        isolated.run_isolated,
        page_tokens=(32,),
        tests=("KvAppendRequiresOwner", "AttentionMasksHoles"),
    )
    monkeypatch.setattr(trying.isolated, "run_isolated", few)
    models.fetch("tiny-llama")
    return tmp_path


def test_what_can_not_come_to_an_end_is_refused_before_anything_runs(small, monkeypatch):
    monkeypatch.setattr(trying, "_conformance", lambda *a: pytest.fail("the suite was run"))
    with pytest.raises(ConfigError, match="1 block can't have an interval; give 2 or more"):
        trying.measure("K2", model="tiny-llama", contexts=[96], count=1)
    with pytest.raises(WorkloadError, match="needs 10000512 tokens"):
        trying.measure("K2", model="tiny-llama", contexts=[96, 10_000_000])
    monkeypatch.setattr(trying.snapshots.machine, "available_memory_bytes", lambda: 1000)
    said = r"^3 arms with 1 sessions of 96 positions need 1\.0 GiB of memory, 0\.0 GiB are available: .*--context$"
    with pytest.raises(ConfigError, match=said):
        trying.measure("K2", model="tiny-llama", contexts=[96])


def test_a_candidate_is_paired_with_the_adopted_store(small, capfd):
    found = trying.measure("K2", model="tiny-llama", contexts=[96, 64], count=3)
    assert (found["candidate"], found["against"], found["threads"]) == ("K2", "K1", 1)
    assert [cell["context"] for cell in found["cells"]] == [96, 64]
    assert found["synthetic"] is True
    assert found["conformance"]["passed"] is True
    assert found["conformance"]["passed_tests"] == 2
    for cell in found["cells"]:
        assert cell["failed"] == []
        decode = cell["decode"]
        assert decode["n_blocks"] == 3
        low, high = decode["ci95"]
        assert 0 < low <= decode["ratio"] <= high
        rates = {arm: row["tokens_per_s"] for arm, row in decode["arms"].items()}
        # Over all steps, where the ratio is over blocks: one step of a busy machine may part them widely.
        assert set(rates) == {"K1", "K2"} and all(rate > 0 for rate in rates.values())
        assert cell["attention"]["arms"]["K1"]["ceiling_fraction"] > 0
    said = capfd.readouterr().err
    assert next(line for line in said.splitlines() if " of 3" in line).startswith("1 of 3: conform")
    # Nothing is adopted and no run is made: models and snapshots are what runs share.
    assert sorted(p.name for p in (small / "results").iterdir()) == ["models", "workloads"]
    assert not (small / "config" / "selection.yaml").exists()
    assert found["note"] == trying.NOTE

    (snapshot,) = (small / "results" / "workloads").glob("tiny-llama/*/96-0/k.npy")
    made = snapshot.stat().st_mtime_ns
    model = models.load_model("tiny-llama")
    ids = corpus.session_tokens(model.tokenizer, 96, 0)
    trying._fill(stage_of(small), [{"context": 96}], model, [ids])
    assert snapshot.stat().st_mtime_ns == made


def test_a_candidate_that_does_not_end_is_not_timed(small, monkeypatch):
    """It would hold the machine for ever."""
    why = "not finished after 600 s"
    stuck = {"passed": False, "passed_tests": 0, "failed": {}, "gaps": [], "crash": why}
    monkeypatch.setattr(trying, "_conformance", lambda *_: stuck)
    monkeypatch.setattr(trying, "_attention", None)
    found = trying.measure("K2", model="tiny-llama", contexts=[96])
    assert not tried.sound(found)
    (cell,) = found["cells"]
    assert cell["decode"]["ratio"] is None
    assert tried.sentence(found, cell) == f"K2 at 96: no interval, it was not timed: {why}"
    Console(file=io.StringIO()).print(tried.render(found))


def stage_of(small):
    gguf = models.path_of("tiny-llama")
    model = trying.TrialModel(gguf.stem, models.sha256(gguf))
    return trying.Stage("m1", small / "run", gguf, model, "default", 2, {"page_tokens": 32})


def test_what_failed_is_said_and_makes_it_unsound():
    ratio = {"ratio": 1.2, "ci95": [1.1, 1.3], "n_blocks": 12}
    arms = {
        name: {"tokens_per_s": 10.0, "step_ms_p50": 100.0, "step_ms_p95": None}
        for name in ("X1", "K1")
    }
    regions = {name: {"unique_gb_per_s": 12.0, "ceiling_fraction": 0.85} for name in ("X1", "K1")}
    document = {
        "candidate": "X1",
        "against": "K1",
        "model": "m",
        "synthetic": True,
        "context_length": 4095,
        "threads": 2,
        "layouts_differ": False,
        "ref": None,
        "conformance": {
            "passed": False,
            "passed_tests": 30,
            "failed": {"AttentionMasksHoles@P16": "a hole leaked"},
            "gaps": [],
            "crash": "",
        },
        "cells": [
            {
                "context": 4096,
                "decode": {
                    **ratio,
                    "arms": arms,
                    "agreement": {"kld": 2e-4, "top1": 0.97, "shift": 0.3, "bitwise": False},
                },
                "attention": {**ratio, "arms": regions},
                "failed": ["X1: it raised"],
                "void_blocks": 2,
            }
        ],
        "note": trying.NOTE,
    }
    assert not tried.sound(document)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(tried.render(document))
    said = console.export_text()
    for part in (
        "m (synthetic weights), 2 threads",
        "failed: X1: it raised",
        "30 passed, 1 failed",
        "AttentionMasksHoles@P16: a hole leaked",
        "0.85",
        "X1 is 1.200x K1 at 4,096* [1.100, 1.300]: faster",
        "compared with K1's logits: KLD 0.0002, top token equal in 97%",
        "2 runs of blocks discarded as disturbed",
        "* past the 4,095 positions that the model was trained for",
        "nothing is adopted",
    ):
        assert part in said, part
    assert said.rstrip().endswith(": faster")  # the result comes last
    lines = tried.markdown(document).splitlines()
    assert lines[0] == "**X1 is 1.200x K1 at 4,096* [1.100, 1.300]: faster**"
    assert "- failed: X1: it raised" in lines
    # p95 is nobody's, so it has no column.
    assert "| 4,096* | X1 | 10.00 | 100.00 | 12.00 | 0.85 |" in lines
    assert "- 4,096: compared with K1's logits: KLD 0.0002, top token equal in 97%" in lines
    assert lines[-1] == "\\* past the 4,095 positions that the model was trained for"
