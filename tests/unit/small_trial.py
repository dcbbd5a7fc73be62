"""A trial on a real model and real stores, small enough for a test."""

import contextlib
import copy
import json
from pathlib import Path

import pytest

from kvtrial.candidates import candidates
from kvtrial.host import build, machine
from kvtrial.measure import exclusive
from kvtrial.run import events, models, protocol

ROOT = Path(__file__).resolve().parents[2]
CELLS = [
    {"context": 48, "sessions": 1, "threads": 1, "role": "primary", "profile": "default"},
    {
        "context": 32,
        "sessions": 2,
        "threads": 1,
        "rounds": 6,
        "role": "extra",
        "profile": "default",
    },
]
# K0 lacks verbs, K2 stores FP16, K3 is there only with rustc; whoever comes first is the baseline.
WANTED = ("K0", "A2", "K1", "K2", "K3")
ARMS = [name for name in WANTED if candidates()[name].not_built is None]
BASELINE = ARMS[0]
EXACT = [name for name in ARMS if candidates()[name].profile.name == "fp32"]


@contextlib.contextmanager
def own_lock(lock):
    """Nothing below is a measurement: it does not wait for one that runs on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exclusive, "lock_path", lambda: lock)
        yield


def small_run(results, *stages):
    """A run's folder with what these stages leave there; others put their tables beside."""
    gguf = models.fetch("tiny-llama", results / "models" / "tiny-llama.gguf")
    registered = copy.deepcopy(protocol.load(ROOT / "config" / "protocol-smoke.yaml"))
    registered["decision"] |= {
        "challengers": ARMS[-1:],
        "incumbents": ["K1", "A2"],
        "profiles": ["K2"],
    }
    registered["parity"] |= {"baseline": BASELINE, "slow": ["K0", "A2"]}
    registered["known_answers"]["blocks"] = 2
    # No spread of two noisy blocks is so small: the primary cell gets all the blocks that it may.
    registered["sampling"] = {"blocks": 2, "most": 3, "half_width": 1e-9, "pairs": [["A2", "K1"]]}
    # A tiny model's steps say nothing of who is slow; whoever is takes part in every fourth round.
    registered["rotation"] |= {"warmup_rounds": 2, "rounds": 6, "slow_ratio": 1e9}
    registered |= {"candidates": ARMS, "cells": CELLS}
    registered["hypotheses"] = [
        h for h in registered["hypotheses"] if {h["from"], h["to"]} <= set(ARMS)
    ]
    registered["control"] = {"candidate": "C0", "context": 32}
    registered["direct_write"] |= {"context": 32, "blocks": 2}
    registered["cold"]["prefix_tokens"] = 48
    registered["m1"] |= {"blocks": 1, "iterations": 3, "warmup_iterations": 1}
    registered["m1"]["shapes"] = [{"q_heads": 14, "kv_heads": 2, "head_dim": 64}]
    run_dir = results / "run"
    (run_dir / "conformance").mkdir(parents=True)
    for name in (*ARMS, "C0"):
        document = {"passed": True, "failed": [], "crash": ""}
        (run_dir / "conformance" / f"{name}.json").write_text(json.dumps(document))
    (run_dir / "protocol.json").write_text(json.dumps(registered))
    manifest = {
        "profile": "default",
        "usable_cpus": machine.usable_cpus(),
        "build": build.facts(),
        "model": {"name": "tiny-llama", "sha256": models.sha256(gguf)},
    }
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    where = ["--run-dir", str(run_dir), "--gguf", str(gguf)]
    for stage in stages:
        assert stage.main(where) == 0
    return run_dir


def arguments_of(run):
    return ["--run-dir", str(run), "--gguf", str(run.parent / "models" / "tiny-llama.gguf")]


def table(run, stage):
    return events.read_run(run).query("stage == @stage")


def folders(run, context):
    document = json.loads((run / "workload.json").read_text())
    return [run.parent / folder for folder in document["snapshots"][str(context)]]


def rounds_of(arms, rounds=6):
    """Whole cycles of a Williams square, by its definition: n rows, twice as many for odd n."""
    cycle = len(arms) * (1 + len(arms) % 2)
    return -(-rounds // cycle) * cycle
