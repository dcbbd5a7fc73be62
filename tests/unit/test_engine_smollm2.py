"""The default model against transformers (FP32) and llama.cpp on the same file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy_store import open_numpy

from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.transformer import Model
from kvtrial.host import paths

GREEDY = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2-greedy.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def model():
    path = paths.results_dir() / "models" / "smollm2-135m-instruct-q4_1.gguf"
    if not path.is_file():
        pytest.fail(f"{path} is missing; run: make model")
    loaded = Model.from_gguf(read_gguf(path))
    assert loaded.sha256 == GREEDY["model_sha256"]
    loaded.open_store = lambda name, *, tokens, threads=1: open_numpy(loaded, tokens)
    return loaded


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def test_float_activations_give_the_reference_and_quantised_ones_beat_llamacpp(model):
    """The peer's file holds its five likeliest tokens a position. Float activations reproduce them,
    so their whole distribution stands for the peer's in the divergence of the quantised ones."""
    decoded, prefilled, agreement = [], [], []
    for prompt in GREEDY["prompts"]:
        reference = log_softmax(model.logits(prompt["ids"], activations="fp32"))
        quantised = log_softmax(model.logits(prompt["ids"], activations="quantised"))
        for row, top5 in zip(reference, prompt["fp32_prompt_top5_logprob"]):
            tokens, logprobs = zip(*top5)
            np.testing.assert_allclose(row[list(tokens)], logprobs, atol=2e-4)
        kld = (np.exp(reference) * (reference - quantised)).sum(axis=1)
        decoded.append(kld.mean())
        rows = []
        for n in range(1, len(reference) + 1):
            session = model.open_store("any", tokens=n).open_session()
            rows.append(model.prefill(session, prompt["ids"][:n]))
        kld = (np.exp(reference) * (reference - log_softmax(np.stack(rows)))).sum(axis=1)
        prefilled.append(kld.mean())
        first = [top5[0][0] for top5 in prompt["fp32_prompt_top5_logprob"]]
        agreement.append(np.mean(quantised.argmax(axis=1) == first))
    prompts = GREEDY["prompts"]
    theirs = np.mean([p["llamacpp_mean_kld_vs_fp32"] for p in prompts])
    assert np.mean(decoded) <= theirs
    assert np.mean(prefilled) <= theirs
    assert np.mean(agreement) >= np.mean([p["llamacpp_top1_agreement"] for p in prompts])


@pytest.mark.parametrize("prompt", GREEDY["prompts"], ids=lambda p: p["prompt"][:20])
def test_greedy_tokens_up_to_the_first_near_tie(model, prompt):
    """Float activations: the reference's tokens, as far as its margins are above rounding."""
    margins = np.array(prompt["fp32_top2_margin"])
    near = np.flatnonzero(margins < 1e-3)
    sure = int(near[0]) if near.size else len(margins)
    assert sure >= 8
    made = model.generate(prompt["ids"], sure, activations="fp32")
    assert made.ids == prompt["fp32_greedy_64"][:sure]
