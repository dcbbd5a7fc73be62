"""M1, parity and direct write, on a small trial."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy.special import rel_entr, softmax
from small_trial import (
    ARMS,
    BASELINE,
    EXACT,
    arguments_of,
    folders,
    own_lock,
    rounds_of,
    small_run,
    table,
)

from kvtrial.candidates import candidates
from kvtrial.contract import Capability
from kvtrial.measure import parity
from kvtrial.measure.specs import ParitySpec
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of
from kvtrial.run import corpus, models
from kvtrial.stages import direct_write, m1, workload
from kvtrial.stages import parity as parity_stage


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with own_lock(tmp_path_factory.mktemp("lock") / "machine.lock"):
        run = small_run(tmp_path_factory.mktemp("results"), workload)
        (run / "estimate.json").write_text('{"blocks": {"m1": {}, "direct_write": {}}}')
        yield run


@pytest.fixture(scope="module")
def arguments(run):
    return arguments_of(run)


@pytest.fixture(scope="module")
def model(run):
    return models.load_model(run.parent / "models" / "tiny-llama.gguf")


def test_m1_measures_the_cells_of_one_session(run, arguments):
    assert m1.main(arguments) == 0
    rows = table(run, "m1")
    assert rows.query("metric in ['failed', 'not_run']").empty
    times = rows.query("metric == 'm1/attention_ms'")
    assert set(times["context"]) == {48} and set(times["sessions"]) == {1}
    assert (times.groupby(["candidate", "trial", "shape"]).size() == rounds_of(ARMS, 3)).all()
    assert set(times["candidate"]) == set(ARMS)
    own = json.loads((run / "workload.json").read_text())["shape"]
    assert set(times["shape"]) == {
        f"{own['q_heads']}q{own['kv_heads']}kv{own['head_dim']}d",
        "14q2kv",
    }
    assert (rows.query("metric == 'm1/output_error'")["value"] <= 1).all()


def test_parity_compares_every_arm_and_reduced_precision_over_more(run, arguments):
    assert parity_stage.main(arguments) == 0
    rows = table(run, "parity")
    assert rows.query("metric in ['failed', 'not_run']").empty
    # Context 32 belongs to an extra cell, which decides nothing.
    assert set(rows["context"]) - {0} == {48}
    difference = rows.query("metric == 'parity/max_abs_logit_difference'")
    found = difference.groupby(["context", "candidate"])["index"].agg(["min", "max", "size"])
    assert set(difference.query("context == 0")["candidate"]) == set(ARMS) - {BASELINE}
    assert set(difference.query("context == 48")["candidate"]) == set(ARMS) - {"K1"}
    wanted = {(0, n): 24 for n in ARMS if n != BASELINE}
    few = {"K0": 1, "A2": 1, "K2": 16, "K3": 4}  # the smoke protocol's chunks
    wanted |= {(48, n): few[n] for n in ARMS if n != "K1"}
    assert dict(found["size"]) == wanted
    assert (found["min"] == 0).all() and dict(found["max"] + 1) == wanted
    largest = difference.groupby("candidate")["value"].max()
    assert all(largest[name] < 0.01 for name in EXACT[1:])  # the protocol's tolerances
    assert largest[EXACT[1:]].max() < largest["K2"] < 0.1
    kld, worst = (rows.query(f"metric == 'quality/{m}'")["value"] for m in ("kld", "worst_kld"))
    assert (kld > -1e-9).all() and (worst.to_numpy() >= kld.to_numpy()).all()
    assert (rows.query("metric == 'parity/positions' and context == 48")["value"] == 16).all()
    agrees = rows.query("metric == 'quality/top1_agrees' and context == 48")["value"]
    assert agrees.between(0, 16).all() and agrees.mean() > 15


def test_an_arm_that_is_not_timed_is_compared_over_as_little_as_an_exact_one():
    registered = {
        "candidates": ["K1", "K2", "K5"],
        "timed_in_full": ["K5"],
        "decision": {"profiles": ["K2", "K5"]},
        "parity": {"slow": [], "chunks": 4, "slow_chunks": 1, "decode_steps": 3},
        "quality": {
            "chunks": 64,
            "reported_chunks": 8,
            "places": 4,
            "chunk_tokens": 16,
            "decode": {"context": 512, "steps": 32},
        },
    }
    for profile, few in (("default", True), ("full", False)):
        chunks = {
            name: parity_stage.chunks(registered, profile, name, 512, 8192)
            for name in ("K1", "K2", "K5")
        }
        assert chunks == {"K1": 4, "K2": 64, "K5": 4 if few else 64}
        assert parity_stage.decode_steps(registered, profile, "K5", 512) == (3 if few else 32)


def test_a_text_is_fed_after_the_context_and_chunks_are_of_their_text(run, model):
    """Rows of two texts, each after the same filled context, by the plainest of decodes."""
    (folder,) = folders(run, 48)
    tokenizer = model.tokenizer
    texts = corpus.places(tokenizer, 48, 2, 12)
    spec = ParitySpec(
        gguf=str(run.parent / "models" / "tiny-llama.gguf"),
        snapshot=str(folder),
        texts=texts,
        reference="K1",
        candidates=["K1", "K2"],
        positions={"K1": [0, 0], "K2": [12, 7]},
        chunk=5,
        decode={"K2": 3},
        page_tokens=16,
        threads=1,
    )
    rows = parity.measure(spec, lambda name: None)
    by = {(r["metric"], r["index"]): r["value"] for r in rows}
    # Text 0 has chunks 0, 2 and 4, of 5, 5 and 2 positions; text 1 has 1 and 3, of 5 and 2.
    sizes = {i: by["parity/positions", i] for i in range(5)}
    assert sizes == {0: 5, 2: 5, 4: 2, 1: 5, 3: 2}
    ids = json.loads((folder / "tokens.json").read_text())["ids"]
    logits = {}
    for name in ("K1", "K2"):
        for text, part in enumerate(texts):
            with opened(name, shape_of(model), tokens=64, page_tokens=16) as (_, (session,)):
                fill(session, Snapshot.open(folder))
                assert session.length(0) == len(ids)
                decoder = model.decoder(activations="fp32")
                logits[name, text] = np.stack(
                    [decoder.step([session], [i])[0].copy() for i in part]
                )
    expected = {text: parity.compare(logits["K2", text], logits["K1", text]) for text in range(2)}
    for index, (text, start, stop) in enumerate([(0, 0, 5), (1, 0, 5), (0, 5, 10), (1, 5, 7)]):
        part = expected[text][start:stop]
        # A KLD of some 1e-6 sums differences of FP32 logits of another order.
        assert by["quality/kld", index] == pytest.approx(part[:, 1].mean(), rel=0.05)
        assert by["quality/worst_kld", index] == pytest.approx(part[:, 1].max(), rel=0.05)
        assert by["quality/top1_agrees", index] == part[:, 2].sum()
        difference = by["parity/max_abs_logit_difference", index]
        assert difference == pytest.approx(part[:, 0].max(), rel=0.05)
    for step in range(3):
        assert by["quality/decode_kld", step] == pytest.approx(expected[0][step, 1])


def test_an_arm_that_raises_costs_its_own_rows(run, model, monkeypatch):
    (folder,) = folders(run, 48)
    real = parity.feed

    def feed(model, name, *rest):
        if name == "A2":
            raise RuntimeError("no such luck")
        real(model, name, *rest)

    monkeypatch.setattr(parity, "feed", feed)
    spec = ParitySpec(
        gguf=str(run.parent / "models" / "tiny-llama.gguf"),
        snapshot=str(folder),
        texts=[[5, 6, 7]],
        reference="K1",
        candidates=["A2", "K1", "K2"],
        positions={"A2": [3], "K1": [3], "K2": [3]},
        chunk=None,
        decode={},
        page_tokens=16,
        threads=1,
    )
    rows = parity.measure(spec, lambda name: None)
    failed = [r for r in rows if r["metric"] == "failed"]
    assert [r["candidate"] for r in failed] == ["A2"] and "no such luck" in failed[0]["text"]
    assert {r["candidate"] for r in rows} == {"A2", "K2"}
    # Without the reference, which took the process down before, there is nothing to say.
    assert (
        parity.measure(dataclasses.replace(spec, candidates=["A2", "K2"]), lambda name: None) == []
    )


def test_divergence_and_agreement_by_hand():
    ours = np.log(np.array([0.25, 0.25, 0.5], np.float32)) + np.float32(3)
    theirs = np.log(np.array([0.5, 0.25, 0.25], np.float32))
    found = parity.compare(np.stack([ours, theirs]), np.stack([theirs, theirs]))
    # 0.5 log 2 + 0.25 log 1 - 0.25 log 2; log 0.5 + 3 - log 0.25
    np.testing.assert_allclose(found[0], [3 + math.log(2), 0.25 * math.log(2), 0.0], atol=1e-6)
    assert found[1].tolist() == [0.0, 0.0, 1.0]


def test_a_small_divergence_keeps_its_digits_and_a_wild_logit_is_not_finite():
    """Against scipy.special.rel_entr over float64 softmaxes, on logits as large as a model's."""
    rng = np.random.default_rng(1)
    theirs = (rng.standard_normal((4, 5000)) * 6).astype(np.float32)
    ours = theirs + (rng.standard_normal((4, 5000)) * 1e-3).astype(np.float32)
    p, q = (softmax(a.astype(np.float64), axis=1) for a in (theirs, ours))
    found = parity.compare(ours, theirs)
    np.testing.assert_allclose(found[:, 1], rel_entr(p, q).sum(axis=1), rtol=1e-6)
    assert (found[:, 1] < 1e-5).all()
    for value in (np.nan, np.inf, -np.inf):
        wild = ours.copy()
        wild[2, 7] = value
        assert np.isnan(parity.compare(wild, theirs)[2]).all()
        assert np.isfinite(parity.compare(wild, theirs)[:2]).all()


def test_direct_write_is_taken_and_changes_no_byte(run, arguments):
    assert direct_write.main(arguments) == 0
    rows = table(run, "direct_write")
    assert rows.query("metric == 'failed'").empty
    # K2's elements are FP16: it hands out no slots, so both its ways are one.
    with_slots = [n for n in ARMS if Capability.RESERVE_SLOT in candidates()[n].capabilities]
    assert "K2" not in with_slots
    arms = {f"{name}.{way}" for name in with_slots for way in ("direct", "append")}
    steps = rows.query("metric == 'm2/step_ms'")
    assert set(steps["candidate"]) == arms
    by_slot = rows.query("metric == 'm2/by_slot'").groupby("candidate")["value"].agg(set)
    for name in with_slots:
        assert by_slot[f"{name}.direct"] == {1.0} and by_slot[f"{name}.append"] == {0.0}
        for metric in ("output_xxh3", "rows_xxh3"):
            own = rows[rows["metric"] == metric].groupby("candidate")["text"].agg(set)
            assert (
                own[f"{name}.direct"] == own[f"{name}.append"] and len(own[f"{name}.direct"]) == 1
            )
