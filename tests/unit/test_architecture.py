"""Each model family against a page of NumPy in float64, which knows the families by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtrial.contract import InvalidArgument
from kvtrial.engine import load
from kvtrial.engine.errors import GgufInvalid, UnsupportedArchitecture
from kvtrial.engine.gguf import GgufFile, TensorKind, TensorToWrite, read_gguf, write_gguf
from kvtrial.engine.synthetic import ModelSizes, write_synthetic

#: RoPE pairs halves; Q, K and V have biases; heads of Q and K are normed; the gate is GELU; embeddings scaled
FAMILIES = {
    "llama": (False, False, False, False, False),
    "qwen2": (True, True, False, False, False),
    "qwen3": (True, False, True, False, False),
    "gemma": (True, False, False, True, True),
}
LAYERS, HEADS, KV_HEADS, DIM, BASE, EPS = 2, 6, 2, 16, 10000.0, 1e-6
HIDDEN = 64  # not heads times head_dim
IDS = np.random.default_rng(5).integers(0, 250, 40)
LONG = np.random.default_rng(6).integers(0, 250, 330)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any]:
    path = tmp_path / "m.gguf"
    sizes = {"layers": LAYERS, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "ffn": 64}
    write_synthetic(
        path,
        "m",
        ModelSizes(
            request.param,
            "Q8_0",
            **sizes,
            vocab=288,
            context=512,
            rope_base=BASE,
            seed=7,
            width=HIDDEN,
        ),
    )
    return request.param, load(path)


def values(file: GgufFile, name: str) -> np.ndarray:
    """A tensor in float64."""
    tensor = file.tensor(name)
    if tensor.kind is TensorKind.F32:
        return tensor.data.view("<f4").reshape(tensor.shape).astype(np.float64)
    blocks = tensor.data.reshape(-1, 34)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float64)
    return (scales * blocks[:, 2:].view(np.int8)).reshape(tensor.shape)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


def turned(x: np.ndarray, positions: np.ndarray, halves: bool) -> np.ndarray:
    """x (n, heads, D) by angle position * base ** (-2i / D); ``positions`` (n,), or (n, 1, D / 2) by pair."""
    positions = positions if positions.ndim == 3 else positions[:, None, None]
    angle = positions * BASE ** (-np.arange(DIM // 2) / (DIM // 2))
    first, second = (
        (x[..., : DIM // 2], x[..., DIM // 2 :]) if halves else (x[..., 0::2], x[..., 1::2])
    )
    a, b = (
        first * np.cos(angle) - second * np.sin(angle),
        first * np.sin(angle) + second * np.cos(angle),
    )
    if halves:
        return np.concatenate([a, b], axis=-1)
    return np.stack([a, b], axis=-1).reshape(x.shape)


def activation(x: np.ndarray, gelu: bool) -> np.ndarray:
    if not gelu:
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits(file: GgufFile, name: str, ids: np.ndarray, factors: Any = 1.0) -> np.ndarray:
    """Logits (n, vocab) of all positions, whose angles ``factors`` divide."""
    halves, biases, norms, gelu, scaled = FAMILIES[name]
    n = len(ids)
    embedding = values(file, "token_embd.weight")
    x = embedding[ids] * (math.sqrt(HIDDEN) if scaled else 1)
    seen = np.tril(np.ones((n, n), bool))
    for layer in range(LAYERS):
        own = {
            t.removeprefix(f"blk.{layer}."): t
            for t in file.tensors
            if t.startswith(f"blk.{layer}.")
        }
        w = {short: values(file, whole) for short, whole in own.items()}
        h = normed(x, w["attn_norm.weight"])
        parts = {}
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            rows = h @ w[f"attn_{part}.weight"].T
            if biases:
                rows = rows + w[f"attn_{part}.bias"]
            parts[part] = rows.reshape(n, heads, DIM)
        for part in "qk":
            if norms:
                parts[part] = normed(parts[part], w[f"attn_{part}_norm.weight"])
            where = np.arange(n)[:, None, None] / np.broadcast_to(factors, DIM // 2)
            parts[part] = turned(parts[part], where, halves)
        k, v = (np.repeat(parts[part], HEADS // KV_HEADS, axis=1) for part in "kv")
        scores = np.einsum("nhd,mhd->hnm", parts["q"], k) / math.sqrt(DIM)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hnm,mhd->nhd", weights, v).reshape(n, -1) @ w["attn_output.weight"].T
        h = normed(x, w["ffn_norm.weight"])
        gate = activation(h @ w["ffn_gate.weight"].T, gelu)
        x = x + (gate * (h @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    return normed(x, values(file, "output_norm.weight")) @ embedding.T


def test_prefill_and_decode_are_the_page(family: tuple[str, Any]) -> None:
    """At all positions by prefill; by the decode at the first ones and, after a prefill, at 300 and on."""
    name, model = family
    right = logits(model.file, name, LONG)
    assert np.abs(right).max() > 1  # else the bound below says nothing
    np.testing.assert_allclose(model.logits(LONG), right, atol=2e-4)
    decoder = model.decoder(activations="fp32")
    for first in (0, 300):
        session = model.open_store("K1", tokens=320).open_session()
        if first:
            model.prefill(session, LONG[:first], activations="fp32")
        for position in range(first, first + 10):
            got = decoder.step([session], LONG[position : position + 1])[0]
            np.testing.assert_allclose(got, right[position], atol=2e-4)


def test_slots_and_appends_give_the_same_bits(family: tuple[str, Any]) -> None:
    """A slot's elements are strided in K1T: the norm of a head sums them in the order of a row."""
    _, model = family
    given = {}
    for direct in (True, False):
        session = model.open_store("K1T", tokens=64).open_session()
        decoder = model.decoder(direct=direct)
        given[direct] = [decoder.step([session], [token])[0].tobytes() for token in IDS[:8]]
    assert given[True] == given[False]


def test_what_a_family_has_beside_counts(family: tuple[str, Any]) -> None:
    """The page of another family is another page."""
    name, model = family
    others = [other for other in FAMILIES if other != name]
    right = logits(model.file, name, IDS[:8])
    for other in others:
        try:
            wrong = logits(model.file, other, IDS[:8])
        except KeyError:  # it has tensors that this file lacks
            continue
        assert np.abs(wrong - right).max() > 1e-2, other


def with_rope(path: Path, factors: np.ndarray | None = None, **keys: Any) -> Any:
    """A llama whose angles are scaled, by keys or by a tensor."""
    sizes = {"layers": LAYERS, "q_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "ffn": 64}
    plain = path / "plain.gguf"
    write_synthetic(
        plain,
        "m",
        ModelSizes(
            "llama", "Q8_0", **sizes, vocab=288, context=256, rope_base=BASE, seed=7, width=HIDDEN
        ),
    )
    file = read_gguf(plain)
    tensors = [TensorToWrite(t.name, t.kind, t.shape, [t.data]) for t in file.tensors.values()]
    if factors is not None:
        values = factors.astype("<f4")
        tensors.append(
            TensorToWrite("rope_freqs.weight", TensorKind.F32, values.shape, [values.tobytes()])
        )
    write_gguf(
        path / "scaled.gguf", file.metadata | {f"llama.{k}": v for k, v in keys.items()}, tensors
    )
    return load(path / "scaled.gguf")


@pytest.mark.parametrize(
    ("factors", "keys"),
    [
        (np.geomspace(1, 8, DIM // 2), {}),
        (None, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        (None, {"rope.scale_linear": 4.0}),
    ],
    ids=["by pair", "linear", "of old files"],
)
def test_scaled_angles(tmp_path: Path, factors: np.ndarray | None, keys: dict[str, Any]) -> None:
    """At positions 0 and 1, in the middle and past the length that the model was trained for, 256."""
    model = with_rope(tmp_path, factors, **keys)
    right = logits(model.file, "llama", LONG, 4.0 if factors is None else factors)
    plain = logits(model.file, "llama", LONG)
    assert np.abs(plain[[1, 150, 300, 329]] - right[[1, 150, 300, 329]]).max(axis=1).min() > 1e-2
    np.testing.assert_allclose(model.logits(LONG), right, atol=3e-4)


def test_a_scaling_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedArchitecture,
        match=r"llama\.rope\.scaling\.type is 'yarn'; allowed: none, linear, .*kvtrial models --synthetic",
    ):
        with_rope(tmp_path, **{"rope.scaling.type": "yarn"})
    with pytest.raises(GgufInvalid, match=r"rope_freqs\.weight has factors that are not above 0"):
        with_rope(tmp_path, np.zeros(DIM // 2))


@pytest.mark.parametrize("value", [np.ones(2, np.float32), np.zeros(0, np.float32), ["4"], False])
@pytest.mark.parametrize("key", ["type", "factor"])
def test_a_scaling_of_another_kind_is_named(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises((UnsupportedArchitecture, GgufInvalid), match=r"scaling"):
        with_rope(tmp_path, **{f"rope.scaling.{key}": value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("architecture", "x"), ("kind", "Q6_K"), ("kind", "x"), ("vocab", 268), ("seed", -1)],
)
def test_a_synthetic_model_that_is_not_made_is_refused(name: str, value: Any) -> None:
    sizes: dict[str, Any] = {
        "architecture": "llama", "kind": "Q8_0", "layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 16,
        "ffn": 32, "vocab": 269, "context": 64, "rope_base": 1e4, "seed": 1,
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=f"{name} is .*{value}"):
        ModelSizes(**{**sizes, name: value})
