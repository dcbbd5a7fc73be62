"""``generate`` with a cold store: what a new process restores decodes as if it had never left."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtrial.cold import Identity, open_cold
from kvtrial.contract import Unsupported
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.synthetic import ModelSizes, write_synthetic
from kvtrial.engine.transformer import Model, greedy
from kvtrial.tools import generate
from kvtrial.tools.generate import BLOCK_TOKENS, Continuation

TINY = Path(__file__).parent.parent / "data" / "llama-tiny-q4_1.gguf"
P = 16

#: Restores argv[2]'s tokens and decodes; prints rows restored, tokens, and the logits' bytes.
RESTORE = """
import json, sys
from test_generate_cold import decode, open_known
model, store, cold = open_known(sys.argv[1])
prompt = json.loads(sys.argv[2])
session = store.open_session()
rows = cold.restore(prompt, session)
if rows == len(prompt):
    session.rollback_tail(1)
print(json.dumps([rows, *decode(model, session, prompt)]))
"""


def identity_of(model, store, activations="quantised"):
    return Identity.of(
        store,
        model_sha256=model.sha256,
        rope_base=model.config.rope_base,
        activations=activations,
    )


def open_known(folder, activations="quantised"):
    model = Model.from_gguf(read_gguf(TINY))
    store = model.open_store("K1", tokens=256, page_tokens=P)
    identity = identity_of(model, store, activations)
    return model, store, open_cold("Z2", folder, identity)


def decode(model, session, prompt, steps=8):
    """Tokens and logits of greedy steps, the prompt's last token first."""
    decoder = model.decoder()
    token, tokens, logits = prompt[-1], [], []
    for _ in range(steps):
        found = decoder.step([session], [token])[0]
        logits.append(found.tobytes().hex())
        token = greedy(found)
        tokens.append(token)
    return tokens, logits, session.length(0)


@pytest.mark.parametrize("rows", [3 * P, 3 * P + 1, 3 * P + 5])
def test_a_session_restored_in_a_new_process_decodes_bitwise_the_same(rows, tmp_path):
    model, store, cold = open_known(tmp_path / "cold")
    prompt = [(7 * i) % model.config.vocab for i in range(rows)]
    session = store.open_session()
    model.prefill(session, prompt)
    with cold:
        cold.spill(session, prompt)
    # A prompt known to its end: its last position is decoded again, for its logits.
    session.rollback_tail(1)
    expected = decode(model, session, prompt)
    done = subprocess.run(
        [sys.executable, "-c", RESTORE, str(tmp_path / "cold"), json.dumps(prompt)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        stdout=subprocess.PIPE,
        check=True,
    )
    restored, tokens, logits, length = json.loads(done.stdout)
    assert restored == rows
    assert (tokens, logits, length) == expected
    assert length == rows + 7


def continued(text, folder, store="K1"):
    made = Continuation(text, model=str(TINY), tokens=6, store=store, cold=folder)
    return "".join(made), made


def recorded(text, folder, monkeypatch, **kwargs):
    """The text, every step's logits as bytes, and the continuation."""
    logits = []

    def recording(found):
        logits.append(found.tobytes())
        return greedy(found)

    with monkeypatch.context() as patch:
        patch.setattr(generate, "greedy", recording)
        made, continuation = continued(text, folder, **kwargs)
    return made, logits, continuation


def test_a_known_text_is_restored_and_goes_on_the_same(tmp_path):
    text = "abc " * 40
    plain, _ = continued(text, None)
    first, made = continued(text, tmp_path / "cold")
    assert first == plain and made.restored is None
    assert made.spilled.pages_written > 0 and made.spilled.pages_shared == 0
    again, known = continued(text, tmp_path / "cold")
    assert again == plain
    whole = (len(known._prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert known.restored.tokens == made.spilled.rows == whole > 0
    assert known.restored.restore_ms > 0 and known.restored.prefill_ms > 0
    assert known.spilled.pages_written == 0
    longer, more = continued(text + "and more", tmp_path / "cold")
    assert longer == continued(text + "and more", None)[0]
    assert more.restored.tokens >= whole


def test_rows_that_other_activations_computed_are_a_miss(tmp_path):
    text, folder = "abc " * 40, tmp_path / "cold"
    model, store, cold = open_known(folder, "fp32")
    prompt = model.tokenizer.encode(text)
    session = store.open_session()
    model.prefill(session, prompt, activations="fp32")
    with cold:
        cold.spill(session, prompt)
        assert cold.contains(prompt) == len(prompt)
    found, made = continued(text, folder)
    assert made.restored is None and made.spilled.pages_shared == 0
    assert found == continued(text, None)[0]


@pytest.mark.parametrize("store", ["K1", "K1T", "K2", "K3"])
def test_every_bit_of_the_logits_is_that_of_a_text_without_a_cold_store(
    store, tmp_path, monkeypatch
):
    """Rows that a prefill made from position 16 on, or that were decoded, gave another text."""
    text = "a b c " * 60
    known = len(continued(text[:90], tmp_path / "cold", store=store)[1]._prompt)
    assert known % BLOCK_TOKENS % P != 0
    answer, plain, _ = recorded(text, None, monkeypatch, store=store)
    _, restored, made = recorded(text, tmp_path / "cold", monkeypatch, store=store)
    assert made.restored.tokens == BLOCK_TOKENS and restored == plain
    # A text that goes on with what was made before.
    text += answer + "d" * 70
    _, plain, _ = recorded(text, None, monkeypatch, store=store)
    _, restored, made = recorded(text, tmp_path / "cold", monkeypatch, store=store)
    assert made.restored.tokens >= 2 * BLOCK_TOKENS and restored == plain


def test_a_text_of_no_whole_block_leaves_nothing(tmp_path):
    encode = Model.from_gguf(read_gguf(TINY)).tokenizer.encode
    tried = ("a b" * n + "b" * m for n in range(200) for m in range(3))
    text = next(text for text in tried if len(encode(text)) == BLOCK_TOKENS)
    plain, _ = continued(text, None)
    made, nothing = continued(text, tmp_path / "cold")
    assert made == plain and nothing.spilled is None
    _, one_more = continued(text + "a b", tmp_path / "cold")
    assert one_more.restored is None and one_more.spilled.rows == BLOCK_TOKENS


def test_an_interrupt_leaves_the_prompt(tmp_path):
    made = Continuation("abc " * 40, model=str(TINY), tokens=6, store="K1", cold=tmp_path / "cold")
    pieces = iter(made)
    next(pieces)
    pieces.close()
    whole = (len(made._prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert made.spilled.rows == whole
    assert continued("abc " * 40, tmp_path / "cold")[1].restored.tokens == whole


def test_an_interrupted_prefill_leaves_what_it_finished(tmp_path, monkeypatch):
    prefill = Model.prefill

    def interrupted(model, session, ids, **kwargs):
        prefill(model, session, ids[:BLOCK_TOKENS], **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Model, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            continued("abc " * 80, tmp_path / "cold")
    _, known = continued("abc " * 80, tmp_path / "cold")
    assert known.restored.tokens == BLOCK_TOKENS < known.spilled.rows


def test_a_store_that_can_not_spill_is_refused(tmp_path):
    with pytest.raises(Unsupported, match=r"K0 can't spill .* K1"):
        Continuation("a", model=str(TINY), tokens=1, store="K0", cold=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_saved(tmp_path):
    command = [sys.executable, "-m", "kvtrial", "generate", "abc " * 40, "--model", str(TINY)]
    command += ["--tokens", "4", "--store", "K1", "--cold", str(tmp_path / "cold")]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert "restored" not in runs[0].stderr
    assert re.search(
        r"\d+ tokens of the prompt in .*cold: \d+ pages written, 0 were there", runs[0].stderr
    )
    assert re.search(
        r"\d+ tokens of the prompt restored in [\d.]+ ms instead of computed in about \d+ ms: "
        r"-?\d+ ms saved",
        runs[1].stderr,
    )
    assert re.search(r"0 pages written, \d+ were there", runs[1].stderr)


def test_a_model_that_was_replaced_while_it_was_loaded_leaves_the_new_one_nothing(tmp_path):
    """The hash was taken of the path: the new model was given the old one's rows."""
    path = tmp_path / "m.gguf"
    shape = {"layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 32, "ffn": 64, "vocab": 269}
    shape |= {"architecture": "llama", "kind": "Q8_0", "context": 512, "rope_base": 1e4}
    prompt = list(range(40))
    spilled = []
    for seed in (1, 2):
        write_synthetic(tmp_path / "next.gguf", "m", ModelSizes(**shape, seed=seed))
        if seed == 1:
            (tmp_path / "next.gguf").replace(path)
            old = Model.from_gguf(read_gguf(path))
        else:
            (tmp_path / "next.gguf").replace(path)
    for model in (old, Model.from_gguf(read_gguf(path))):
        store = model.open_store("K1", tokens=64, page_tokens=P)
        identity = identity_of(model, store)
        session = store.open_session()
        with open_cold("Z2", tmp_path / "cold", identity) as cold:
            assert cold.contains(prompt) == 0
            model.prefill(session, prompt)
            cold.spill(session, prompt)
            assert cold.contains(prompt) == 40
        spilled.append(identity.model_sha256)
    assert spilled[1] == hashlib.sha256(path.read_bytes()).hexdigest() != spilled[0]
