"""The engine against an independent peer (tests/data): logits, files that lack or add tensors."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import numpy as np
import pytest
from kvtrial.engine._weights import Matrix
from numpy_store import open_numpy

from kvtrial.contract import InvalidArgument, PoolExhausted
from kvtrial.engine import load, weights
from kvtrial.engine.errors import (
    GgufInvalid,
    GgufTruncated,
    MissingTensor,
    ModelTooLarge,
    NonFiniteLogits,
    UnknownToken,
    UnsupportedArchitecture,
)
from kvtrial.engine.gguf import (
    GgufFile,
    GgufTensor,
    TensorKind,
    TensorToWrite,
    read_gguf,
    write_gguf,
)
from kvtrial.engine.synthetic import SYNTHETIC_KEY, ModelSizes, is_synthetic
from kvtrial.engine.transformer import LOGITS_ROWS, Model, greedy

DATA = Path(__file__).parent.parent / "data"
TINY = ("llama-tiny-q4_1", "qwen2-tiny-q8_0")


def file_of(name: str) -> GgufFile:
    return read_gguf(DATA / f"{name}.gguf")


def changed(file: GgufFile, *, without=(), tensors=(), **metadata) -> GgufFile:
    """A copy of a file with some tensors or architecture keys taken out or replaced."""
    kept = {k: t for k, t in file.tensors.items() if k not in without}
    kept |= {t.name: t for t in tensors}
    keys = {
        f"{file.metadata['general.architecture']}.{k.replace('__', '.')}": v
        for k, v in metadata.items()
    }
    return dataclasses.replace(file, tensors=kept, metadata=file.metadata | keys)


def on_numpy(file: GgufFile, monkeypatch, slots: bool = True) -> Model:
    model = Model.from_gguf(file)
    monkeypatch.setattr(
        model, "open_store", lambda name, *, tokens, threads=1: open_numpy(model, tokens, slots)
    )
    return model


def kld(reference: np.ndarray, ours: np.ndarray) -> float:
    p, q = (
        x - np.log(np.exp(x).sum())
        for x in (a.astype(np.float64) - a.max() for a in (reference, ours))
    )
    return float((np.exp(p) * (p - q)).sum())


@pytest.fixture(params=TINY)
def tiny(request, monkeypatch):
    expected = json.loads((DATA / f"{request.param}.json").read_text())
    return on_numpy(file_of(request.param), monkeypatch), expected


def test_logits_are_the_peers(tiny):
    model, expected = tiny
    logits = model.logits(expected["ids"], activations="fp32")
    for position, row in expected["logits_at"].items():
        row = np.array(row)
        assert np.abs(logits[int(position)] - row).max() <= 1e-4 * np.abs(row).max()
    assert logits.argmax(axis=1).tolist() == expected["argmax"]


def test_a_prefill_gives_the_logits_of_all_positions_in_pieces(tiny):
    """Rows are the peers' (`test_logits_are_the_peers`); no piece holds more than `LOGITS_ROWS`."""
    model, expected = tiny
    ids = (expected["ids"] * 3)[: LOGITS_ROWS + 36]
    whole = model.logits(ids)
    for chunk in (512, 80):
        pieces = []
        session = model.open_store("any", tokens=len(ids)).open_session()
        last = model.prefill(session, ids, chunk, activations="fp32", each=pieces.append)
        sizes = [len(piece) for piece in pieces]
        assert sizes == ([64, 36] if chunk == 512 else [64, 16, 20])
        rows = np.concatenate(pieces)
        np.testing.assert_allclose(rows, whole, atol=1e-5 * np.abs(whole).max())
        assert np.array_equal(last, rows[-1])


def test_texts_side_by_side_have_the_logits_of_texts_alone(tiny):
    """A text that runs over a chunk's end, sessions that are not empty, and one that is longer than a piece."""
    model, expected = tiny
    ids = expected["ids"]
    texts = [ids[:5], (ids * 12)[:520], ids[3:4], (ids * 2)[:70]]
    sessions = [model.open_store("any", tokens=530).open_session() for _ in texts]
    model.prefill(sessions[0], ids[:2], activations="fp32")
    found = [[] for _ in texts]

    def each(text, first, logits):
        assert first == sum(map(len, found[text])) and len(logits) <= LOGITS_ROWS
        found[text].append(logits)

    model.prefill_texts(sessions, texts, each, threads=2, activations="fp32")
    for text, (own, rows) in enumerate(zip(texts, map(np.concatenate, found))):
        alone = model.logits([*ids[:2], *own])[2:] if text == 0 else model.logits(own)
        np.testing.assert_allclose(rows, alone, atol=1e-5 * np.abs(alone).max())
    assert [session.length(0) for session in sessions] == [7, 520, 1, 70]


def test_quantised_activations_stay_close(tiny):
    model, expected = tiny
    logits = model.logits(expected["ids"], activations="quantised")
    rows = {int(p): np.array(row) for p, row in expected["logits_at"].items()}
    assert np.mean([kld(row, logits[p]) for p, row in rows.items()]) <= 1e-3


def test_decode_with_float_activations_is_the_prefill(tiny):
    model, expected = tiny
    ids = expected["ids"]
    session = model.open_store("any", tokens=len(ids)).open_session()
    decoder = model.decoder(activations="fp32")
    decoded = np.stack([decoder.step([session], [i])[0].copy() for i in ids])
    prefilled = model.logits(ids, activations="fp32")
    np.testing.assert_allclose(decoded, prefilled, atol=1e-5 * np.abs(prefilled).max())


def test_a_quantised_prefill_stays_as_close_as_the_decode(tiny):
    model, expected = tiny
    divergence = []
    for position, row in expected["logits_at"].items():
        n = int(position) + 1
        session = model.open_store("any", tokens=n).open_session()
        divergence.append(kld(np.array(row), model.prefill(session, expected["ids"][:n])))
    assert np.mean(divergence) <= 1e-3


def test_a_quantised_prefill_rounds_as_the_decode_does(tiny):
    """The first layer's rows are one product behind the embedding: there nothing has grown yet."""
    model, expected = tiny
    ids = expected["ids"][:21]
    decoded, prefilled = (model.open_store("any", tokens=21).open_session() for _ in range(2))
    decoder = model.decoder()
    for i in ids:
        decoder.step([decoded], [i])
    model.prefill(prefilled, ids)
    for ours, theirs in zip(prefilled.rows[0], decoded.rows[0]):
        np.testing.assert_allclose(ours, theirs, atol=1e-6 * np.abs(theirs).max())


def test_chunks_of_any_size_give_the_same_logits(tiny):
    """B22: the causal end of a chunk is the session's end; A17: a step right at a page's end."""
    model, expected = tiny
    ids = expected["ids"][:49]
    whole = model.logits(ids, activations="fp32")
    divergence = []
    for chunk in (1, 7, 16, 48):
        session = model.open_store("any", tokens=49).open_session()
        seen = []
        last = model.prefill(
            session,
            ids[:48],
            chunk=chunk,
            progress=lambda *done, seen=seen: seen.append(done),
            activations="fp32",
        )
        assert seen[-1] == (48, 48)
        np.testing.assert_allclose(last, whole[47], atol=1e-5 * np.abs(whole).max())
        step = model.decoder(activations="fp32").step([session], ids[48:])[0]
        np.testing.assert_allclose(step, whole[48], atol=1e-5 * np.abs(whole).max())
        assert session.length(0) == 49
        quantised = model.open_store("any", tokens=48).open_session()
        divergence.append(kld(whole[47], model.prefill(quantised, ids[:48], chunk=chunk)))
    assert max(divergence) <= 1e-3


@pytest.mark.parametrize("activations", ["quantised", "fp32"])
def test_direct_writes_threads_and_batches_change_no_bit(tiny, activations):
    model, expected = tiny
    ids = np.array(expected["ids"][:36]).reshape(3, 12)

    def run(batch: int, **settings):
        """Logits (3, 12, vocab) and rows of three sequences, ``batch`` at a time."""
        logits, rows = [], []
        for first in range(0, 3, batch):
            store = model.open_store("any", tokens=12)
            sessions = [store.open_session() for _ in range(batch)]
            decoder = model.decoder(batch=batch, activations=activations, **settings)
            steps = [
                decoder.step(sessions, ids[first : first + batch, i]).copy() for i in range(12)
            ]
            logits += list(np.stack(steps, axis=1))
            rows += [s.rows for s in sessions]
        return np.stack(logits).tobytes(), np.stack(rows).tobytes()

    alone = run(1, direct=False)
    assert run(1, direct=True) == alone
    assert run(3, direct=True) == alone
    assert run(3, direct=False, threads=3) == alone


def test_a_store_without_slots_gives_the_same_bits(tiny, monkeypatch):
    model, expected = tiny
    ids = expected["ids"][:8]
    with_slots = model.logits(ids, activations="quantised")
    without = on_numpy(model.file, monkeypatch, slots=False)
    assert without.logits(ids, activations="quantised").tobytes() == with_slots.tobytes()


def test_a_full_store_drops_the_unfinished_step(tiny):
    model, expected = tiny
    session = model.open_store("any", tokens=4).open_session()
    model.prefill(session, expected["ids"][:4])
    with pytest.raises(PoolExhausted):
        model.decoder().step([session], [1])
    with pytest.raises(PoolExhausted):
        model.prefill(session, [1, 2])
    assert [session.length(layer) for layer in range(model.config.layers)] == [4] * (
        model.config.layers
    )


def test_generate_counts_steps_and_bytes(tiny):
    model, expected = tiny
    made = model.generate(expected["ids"][:10], 5, activations="fp32")
    again = model.generate([*expected["ids"][:10], *made.ids[:2]], 3, activations="fp32")
    assert len(made.ids) == 5 and made.step_ns.shape == (5,) and (made.step_ns > 0).all()
    assert again.ids == made.ids[2:]
    row = 8 * model.config.kv_heads * model.config.head_dim * model.config.layers
    assert made.kv_bytes_read == (10 + 11 + 12 + 13 + 14) * row


def test_the_step_is_timed_by_region_and_attention_can_be_swapped(tiny):
    model, _ = tiny
    session = model.open_store("any", tokens=4).open_session()
    decoder = model.decoder()
    decoder.step([session], [1])
    assert set(decoder.scheduler.region_ns) == {
        "embed", "project", "attention", "feed_forward", "head",
    }  # fmt: skip
    assert 0 < decoder.attention_ns < sum(decoder.scheduler.region_ns.values())
    calls = []
    decoder.scheduler.regions.attention = calls.append
    decoder.step([session], [1])
    assert calls == list(range(model.config.layers))


# --- files -----------------------------------------------------------------------------------------


def test_the_output_matrix_is_used_when_there_is_one(monkeypatch):
    """C6, both ways."""
    file = file_of("llama-tiny-q4_1")
    own, tied = (on_numpy(f, monkeypatch) for f in (file, changed(file, without=["output.weight"])))
    assert not own.config.tied and tied.config.tied
    ids = [1, 2, 3]
    assert np.abs(own.logits(ids) - tied.logits(ids)).max() > 0.1
    embedding = file.tensors["token_embd.weight"]
    copied = dataclasses.replace(embedding, name="output.weight")
    same = on_numpy(changed(file, tensors=[copied]), monkeypatch)
    assert same.logits(ids).tobytes() == tied.logits(ids).tobytes()


@pytest.mark.parametrize("name", ["blk.0.ffn_up.weight", "blk.1.attn_q.bias", "output_norm.weight"])
def test_a_missing_tensor_is_named(name):
    """C7, C8."""
    with pytest.raises(MissingTensor, match=name):
        Model.from_gguf(changed(file_of("qwen2-tiny-q8_0"), without=[name]))


def test_the_bias_counts(monkeypatch):
    """C8."""
    file = file_of("qwen2-tiny-q8_0")
    bias = file.tensors["blk.0.attn_q.bias"]
    zeroed = dataclasses.replace(bias, data=np.zeros_like(bias.data))
    ids = list(range(8))
    plain = on_numpy(file, monkeypatch).logits(ids)
    without = on_numpy(changed(file, tensors=[zeroed]), monkeypatch).logits(ids)
    assert np.abs(plain - without).max() > 1e-3


def test_unknown_tensors_are_listed_and_warned_of():
    """C18."""
    extra = GgufTensor("blk.0.mystery", TensorKind.F32, (2,), np.zeros(8, np.uint8))
    file = changed(file_of("llama-tiny-q4_1"), tensors=[extra])
    with pytest.warns(UserWarning, match=r"blk\.0\.mystery"):
        model = Model.from_gguf(file)
    assert model.unused_tensors == ("blk.0.mystery",)


@pytest.mark.parametrize(
    "name",
    ["blk.0.attn_q.bias", "blk.1.attn_output.bias", "output.bias", "blk.0.attn_q_norm.weight"],
)
def test_a_tensor_that_would_change_the_output_is_refused(name):
    """Case: a llama file with attention biases ran without them, and every output was wrong."""
    extra = GgufTensor(name, TensorKind.F32, (2,), np.zeros(8, np.uint8))
    with pytest.raises(UnsupportedArchitecture, match=name.replace(".", r"\.")):
        Model.from_gguf(changed(file_of("llama-tiny-q4_1"), tensors=[extra]))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"rope__scaling__type": "yarn"}, UnsupportedArchitecture, "yarn"),
        ({"rope__scaling__factor": -4.0}, GgufInvalid, r"rope\.scaling\.factor is -4\.0"),
        ({"rope__dimension_count": 16}, UnsupportedArchitecture, "16 of 32"),
        ({"attention__head_count_kv": 2}, GgufInvalid, "9 query heads over 2"),
        ({"attention__head_count": 0}, GgufInvalid, "head_count is 0"),
        ({"attention__key_length": 33}, UnsupportedArchitecture, "32 of 33"),
        ({"attention__key_length": 33, "rope__dimension_count": 33}, GgufInvalid, "head_dim is 33"),
        ({"block_count": None}, GgufInvalid, "block_count is missing"),
        ({"rope__freq_base": "many"}, GgufInvalid, "'many'"),
        ({"feed_forward_length": 64}, GgufInvalid, "ffn_gate"),
    ],
)
def test_wrong_metadata_is_refused(keys, error, message):
    with pytest.raises(error, match=message):
        Model.from_gguf(changed(file_of("llama-tiny-q4_1"), **keys))


@pytest.mark.parametrize("named", [{}, {"rope__scaling__type": "none"}])
def test_the_attention_factor_counts_for_queries_and_keys(named):
    """With or without a type of scaling: 2 for both is 4 for the queries alone."""
    file = file_of("llama-tiny-q4_1")
    queries = {1: [], 4: []}
    for i in range(file.metadata["llama.block_count"]):
        name = f"blk.{i}.attn_q.weight"
        tensor = file.tensors[name]
        values = np.empty(tensor.shape, np.float32)
        Matrix(name, tensor.kind.name, *tensor.shape, tensor.data).dequantise(
            0, len(values), values
        )
        for factor, tensors in queries.items():
            tensors.append(stored(name, factor * values))
    by_key = changed(file, tensors=queries[1], rope__scaling__attn_factor=2.0, **named)
    by_weight = changed(file, tensors=queries[4])
    ids = [5, 6, 7, 8]
    found, expected = (Model.from_gguf(f).logits(ids) for f in (by_key, by_weight))
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, Model.from_gguf(file).logits(ids))


def test_generation_stops_where_the_context_is_full():
    model = Model.from_gguf(changed(file_of("llama-tiny-q4_1"), context_length=8))
    beyond = model.generate([1, 2, 3], 20, beyond_context=True)
    assert len(beyond.ids) == len(beyond.step_ns) == 20
    made = model.generate(
        [1, 2, 3], 10**12
    )  # eight positions hold three and five: the last has none
    assert made.ids == beyond.ids[:6] and len(made.step_ns) == 6
    assert model.generate([1, 2, 3], 6).ids == made.ids
    assert len(model.generate(range(8), 5).ids) == 1
    with pytest.raises(InvalidArgument, match=r"9 tokens; .* for 8 positions: .*--beyond"):
        model.generate(range(9), 1)
    assert len(model.generate(range(9), 1, beyond_context=True).ids) == 1


def test_rope_pairs_by_architecture():
    """C9, against rotations written out: llama turns (2i, 2i + 1), qwen2 turns (i, i + D / 2)."""
    from kvtrial.engine._regions import rope_turns, rotate_rows

    rng = np.random.default_rng(9)
    row = rng.standard_normal((1, 2, 8)).astype(np.float32)
    frequencies = 10000.0 ** (-np.arange(4) / 4)
    turn = np.exp(3j * frequencies)
    interleaved = (row[..., 0::2] + 1j * row[..., 1::2]) * turn
    halves = (row[..., :4] + 1j * row[..., 4:]) * turn
    turns = rope_turns(np.array([3]), frequencies)
    for paired, expected in (
        (False, np.stack([interleaved.real, interleaved.imag], axis=-1).reshape(row.shape)),
        (True, np.concatenate([halves.real, halves.imag], axis=-1)),
    ):
        out = row.copy()
        rotate_rows(out, turns, paired, threads=1)
        np.testing.assert_allclose(out, expected, atol=1e-6)
    configs = [Model.from_gguf(file_of(name)).config for name in TINY]
    assert [c.architecture.halves for c in configs] == [False, True]


# --- calls -----------------------------------------------------------------------------------------


def test_greedy_takes_the_first_maximum_and_refuses_what_is_not_finite():
    """B10, B21."""
    assert greedy(np.array([0, 1, 1], np.float32)) == 1
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(NonFiniteLogits, match="logit 2"):
            greedy(np.array([0, 1, bad, 1], np.float32))


def test_non_finite_rows_raise_in_generate(tiny, monkeypatch):
    """B10, end to end: attention that gives NaN never becomes token 0."""
    model, expected = tiny
    store = model.open_store("any", tokens=20)
    session = store.open_session()
    monkeypatch.setattr(model, "open_store", lambda *a, **k: store)
    monkeypatch.setattr(store, "open_session", lambda: session)
    monkeypatch.setattr(session, "attend", lambda layer, q, out, scale: out.fill(np.nan))
    for activations in ("quantised", "fp32"):
        with pytest.raises(NonFiniteLogits):
            model.generate(expected["ids"][:1], 1, activations=activations)


def test_wrong_calls_are_refused(tiny):
    model, _ = tiny
    session = model.open_store("any", tokens=4).open_session()
    other = Model.from_gguf(file_of(next(n for n in TINY if not model.name.startswith(n))))
    for ids in ([320], [-1]):
        with pytest.raises(UnknownToken, match="allowed: 0 to 319"):
            model.prefill(session, ids)
    for ids in ([], [1.5]):
        with pytest.raises(InvalidArgument):
            model.prefill(session, ids)
    with pytest.raises(InvalidArgument, match="each once"):
        model.decoder(batch=2).step([session, session], [1, 2])
    with pytest.raises(InvalidArgument, match="open it with"):
        other.decoder().step([session], [1])
    with pytest.raises(InvalidArgument, match="allowed: quantised, fp32"):
        model.decoder(activations="int4")
    assert session.length(0) == 0


def stored(name: str, values: np.ndarray) -> GgufTensor:
    return GgufTensor(name, TensorKind.F32, values.shape, values.view(np.uint8).ravel())


@pytest.mark.parametrize("kind", [TensorKind.F32, TensorKind.F16])
def test_a_file_that_is_written_to_and_cut_in_use_changes_no_logit(tmp_path, kind):
    """Unpacked weights stayed in the file's map: other logits without a word, then SIGBUS."""
    file, path = file_of(TINY[0]), tmp_path / "m.gguf"
    rng = np.random.default_rng(1)
    dtype = {TensorKind.F32: "<f4", TensorKind.F16: "<f2"}[kind]
    tensors = [
        TensorToWrite(t.name, kind, t.shape, [rng.standard_normal(t.shape).astype(dtype).tobytes()])
        for t in file.tensors.values()
    ]
    write_gguf(path, file.metadata, tensors)
    model = load(path)
    expected = model.logits([1, 2, 3])
    decoder, session = model.decoder(), model.open_store("K1", tokens=4).open_session()
    stepped = decoder.step([session], [1]).copy()
    session.rollback_tail(1)
    size = path.stat().st_size
    with path.open("r+b") as written:
        written.seek(size // 4)
        written.write(bytes(size - size // 4))
        assert np.array_equal(model.logits([1, 2, 3]), expected)
        written.truncate(100)
    assert np.array_equal(model.logits([1, 2, 3]), expected)
    assert np.array_equal(decoder.step([session], [1]), stepped)
    with pytest.raises(GgufTruncated, match="100 bytes"):
        model.sha256  # noqa: B018  what was loaded has no name any more


@pytest.mark.parametrize("refusal", [MemoryError("no"), OSError(errno.ENOMEM, "no")])
def test_memory_that_the_system_refuses_is_said_of_the_file(monkeypatch, refusal):
    def refuse(nbytes):
        raise refusal

    monkeypatch.setattr(weights, "_huge_pages", refuse)
    path = DATA / f"{TINY[0]}.gguf"
    said = rf"{path.name}: has {path.stat().st_size} bytes.*; \d+ bytes are available: free"
    with pytest.raises(ModelTooLarge, match=said):
        load(path)
    refusal = OSError(errno.EIO, "a disk")
    with pytest.raises(OSError, match="a disk"):
        load(path)


def padded(file: GgufFile, rows: int, best: int, *, tied: bool) -> GgufFile:
    """The file with ``rows`` rows for its 320 tokens, of which ``best`` or the next wins every argmax."""
    embedding = file.tensors["token_embd.weight"]
    hidden = embedding.shape[1]
    values = np.zeros((rows, hidden), np.float32)
    values[:320] = np.random.default_rng(3).standard_normal((320, hidden), np.float32)[:rows]
    table = stored("token_embd.weight", values)
    if tied:
        values[best] = 1e3 * values[:320].mean(axis=0)
        return changed(file, tensors=[table], without=["output.weight"])
    output = np.zeros((rows, hidden), np.float32)
    output[:320] = values[:320]
    output[best] = 1e3
    output[best + 1] = -1e3
    return changed(file, tensors=[table, stored("output.weight", output)])


@pytest.mark.parametrize("name", TINY)
def test_a_padded_row_is_no_token(name):
    """Padding that would win every argmax: 330 rows for 320 tokens, the output tied or not."""
    file = padded(file_of(name), 330, 325, tied=False)
    model = Model.from_gguf(file)
    assert model.config.vocab == model.tokenizer.vocab_size == 320
    made = model.generate([5, 6, 7], 8)
    assert max(made.ids) < 320
    assert isinstance(model.tokenizer.decode(made.ids), str)
    assert model.prefill(model.open_store("K1", tokens=3).open_session(), [5, 6, 7]).shape == (320,)
    with pytest.raises(UnknownToken, match=r"token id 325; allowed: 0 to 319"):
        model.generate([325], 1)
    tied = Model.from_gguf(padded(file_of(name), 330, 325, tied=True))
    assert tied.logits([1, 2]).shape == (2, 320)


def test_fewer_rows_than_tokens_are_refused_with_both_numbers():
    file = file_of(TINY[0])
    whole = file.tensors["token_embd.weight"]
    short = stored("token_embd.weight", np.zeros((300, whole.shape[1]), np.float32))
    with pytest.raises(GgufInvalid, match="has 300 rows for the 320 tokens of tokenizer"):
        Model.from_gguf(changed(file, tensors=[short]))


def test_a_file_without_a_tokenizer_has_as_many_tokens_as_rows():
    file = file_of(TINY[0])
    metadata = {k: v for k, v in file.metadata.items() if not k.startswith("tokenizer")}
    assert Model.from_gguf(dataclasses.replace(file, metadata=metadata)).config.vocab == 320


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", "2"), ("q_heads", 0), ("head_dim", 0), ("ffn", 0), ("architecture", ["llama"])],
)
def test_a_model_that_is_made_has_sizes(name, value):
    sizes = {
        "architecture": "llama", "kind": "Q8_0", "layers": 1, "q_heads": 2, "kv_heads": 1,
        "head_dim": 32, "ffn": 64, "vocab": 269, "context": 64, "rope_base": 1e4, "seed": 1,
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=rf"\b{name}\b.*(give|allowed)"):
        ModelSizes(**{**sizes, name: value})


@pytest.mark.parametrize("mark", [[], ["yes", "no"], "false", 1])
def test_a_mark_of_another_kind_is_none(mark):
    file = file_of("llama-tiny-q4_1")
    marked = dataclasses.replace(file, metadata={**file.metadata, SYNTHETIC_KEY: mark})
    assert is_synthetic(marked) is False
