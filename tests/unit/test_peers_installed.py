"""The packages of the extra `peers`, where they are installed: do they calculate what we think?"""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from kvtrial.engine.synthetic import ModelSizes, write_synthetic
from kvtrial.host import paths
from kvtrial.measure import child, rotation
from kvtrial.measure.peers import programs
from kvtrial.measure.specs import AttentionSpec, BlockSpec, PrefillSpec
from kvtrial.measure.stores import opened, shape_of
from kvtrial.run import models, protocol

pytestmark = pytest.mark.slow
THREADS = 1
#: Heads of 64, which llama.cpp turns before it quantises them.
SHAPE = ModelSizes(
    architecture="llama",
    kind="Q8_0",
    layers=2,
    q_heads=6,
    kv_heads=2,
    head_dim=64,
    ffn=384,
    vocab=320,
    context=512,
    rope_base=1e5,
    seed=1,
)
CONTEXT, STEPS = 48, 6


def needs(module):
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None,
        reason=f"the extra `peers` is optional and {module} is not installed",
    )


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A tiny model, a snapshot of a prefilled text, and our logits after it."""
    folder = tmp_path_factory.mktemp("peers")
    gguf = folder / "model.gguf"
    write_synthetic(gguf, "heads-of-64", SHAPE)
    model = models.load_model(gguf)
    ids, forced = np.random.default_rng(11).integers(0, 256, (2, CONTEXT)).tolist()
    with opened("K1", shape_of(model), tokens=CONTEXT + 1, page_tokens=16) as (store, (session,)):
        next_id = int(model.prefill(session, ids).argmax())
        layers = [session.read(n, np.arange(CONTEXT)) for n in range(store.spec.layers)]
        logits = model.decoder(activations="fp32").step([session], [next_id])[0].copy()
    for name, side in (("k", 0), ("v", 1)):
        np.save(folder / f"{name}.npy", np.stack([rows[side] for rows in layers]))
    (folder / "tokens.json").write_text(
        json.dumps({"ids": ids, "forced": forced, "next_id": next_id})
    )
    return gguf, folder, ids, next_id, logits


@needs("llama_cpp")
@pytest.mark.parametrize("arm", programs.arms_of("llama.cpp"))
def test_llama_goes_on_from_our_rows_as_from_its_own(filled, arm):
    from kvtrial.measure.peers import llama
    from kvtrial.measure.stores import Snapshot

    gguf, folder, ids, next_id, ours = filled
    snapshot = Snapshot.open(folder)
    with llama.opened(str(gguf), arm, CONTEXT + STEPS, THREADS) as context:
        context.eval(ids)
        own = context.eval([next_id]).copy()
        context.fill(np.asarray(snapshot.k), np.asarray(snapshot.v))
        restored = context.eval([next_id]).copy()
    # llama.cpp quantises activations, so that its logits wander from ours by about a hundredth; in V of four bits
    # that turns some numbers by a whole step.
    coarse = 10 if programs.PEERS[arm].v_type == "q4_0" else 1
    assert np.corrcoef(own, restored)[0, 1] > 1 - 0.001 * coarse
    assert np.corrcoef(own, ours)[0, 1] > 1 - 0.01 * coarse


@needs("llama_cpp")
def test_llama_decodes_and_prefills_in_processes_of_their_own(filled):
    gguf, folder, ids, _, _ = filled
    arms = programs.arms_of("llama.cpp")
    both = ["K1", *arms]
    registered = protocol.load(paths.config_file("protocol.yaml"))
    decode = BlockSpec(
        gguf=str(gguf),
        candidates=both,
        reference="K1",
        snapshots=[str(folder)],
        threads=THREADS,
        rotation={**registered["rotation"], "warmup_rounds": 2},
        rounds=1,
        slow=[],
        page_tokens=16,
        seed=1,
    )
    rows = child.run("kvtrial.measure.peers.decode", decode, THREADS)
    assert [r["text"] for r in rows if r["metric"] == "failed"] == []
    steps = [r["candidate"] for r in rows if r["metric"] == "m2/step_ms" and r["value"] > 0]
    cycle = rotation.rounds_of(len(both), 1)
    assert {arm: steps.count(arm) for arm in both} == dict.fromkeys(both, cycle)

    spec = PrefillSpec(
        gguf=str(gguf), candidates=arms, ids=list(ids), threads=THREADS, page_tokens=16
    )
    rows = child.run("kvtrial.measure.peers.llama_prefill", spec, THREADS)
    assert [(r["candidate"], r["metric"]) for r in rows] == [(arm, "prefill/ms") for arm in arms]


@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(arm, marks=needs(programs.PROGRAMS[program][1]))
        for program in ("torch", "onnxruntime", "openvino")
        for arm in programs.arms_of(program)
    ],
)
def test_attention_agrees_with_the_oracle_and_is_timed(filled, arm):
    _, folder, _, _, _ = filled
    shape = {"layers": 2, "q_heads": 6, "kv_heads": 2, "head_dim": 64}
    spec = AttentionSpec(
        shape=shape,
        candidates=[arm],
        orders=[[arm]] * 5,
        snapshots=[str(folder)],
        threads=THREADS,
        page_tokens=16,
        warmup_iterations=2,
        rotation_llc_multiple=0,
        seed=1,
    )
    rows = child.run("kvtrial.measure.peers.attention", spec, THREADS)
    assert [r["text"] for r in rows if r["metric"] == "failed"] == []
    assert len([r for r in rows if r["metric"] == "m1/attention_ms" and r["value"] > 0]) == 3
