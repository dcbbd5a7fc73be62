"""Tensor kinds against weights that the `gguf` package has made of the same random blocks.

tests/data/kinds.npz: for each kind ``NAME_blocks`` (uint8) and ``NAME_weights`` (float32), by gguf's
``quants.dequantize`` from blocks of random bits with finite scales.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvtrial.engine._panels import Quads
from kvtrial.engine._weights import Matrix, form_of

from kvtrial.engine import load
from kvtrial.engine.errors import NonFiniteWeight, UnsupportedTensorType
from kvtrial.engine.gguf import TensorToWrite, read_gguf, write_gguf
from kvtrial.engine.kinds import OTHERS, TensorKind
from kvtrial.engine.synthetic import ModelSizes, write_synthetic

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "kinds.npz")
NAMES = sorted({name.rpartition("_")[0] for name in GOLDEN.files})


#: As what each kind is packed.
FORMS = {
    "Q4_0": "Q4_1", "Q4_1": "Q4_1", "Q5_0": "Q8_0", "Q8_0": "Q8_0", "IQ4_NL": "Q8_0", "Q4_K": "S4", "IQ4_XS": "S8",
    "Q5_1": "S6", "Q2_K": "S6", "Q3_K": "S6", "Q5_K": "S6", "Q6_K": "S6", "BF16": "F32",
}  # fmt: skip


def packed(kind: TensorKind, blocks: np.ndarray, cols: int = 256, threads: int = 1) -> Matrix:
    """The blocks, as many as make whole rows of ``cols``, as the engine packs them."""
    rows = blocks.size // kind.block_bytes * kind.block_size // cols
    data = blocks[: rows * cols // kind.block_size * kind.block_bytes]
    return Matrix("w", kind.name, rows, cols, data, None, threads)


def weights(matrix: Matrix) -> np.ndarray:
    out = np.empty((matrix.rows, matrix.cols), np.float32)
    matrix.dequantise(0, matrix.rows, out)
    return out


def test_every_kind_has_golden_values():
    assert set(NAMES) == {kind.name for kind in TensorKind} - {"F32", "F16"} == set(FORMS)
    assert {name: form_of(name) for name in NAMES} == FORMS
    assert not {kind.value for kind in TensorKind} & set(OTHERS)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_peers(name: str):
    """But for the last bits of float32, in which d (q - 32) and d q - 32 d are rounded."""
    kind = TensorKind[name]
    got = weights(packed(kind, GOLDEN[f"{name}_blocks"]))
    right = GOLDEN[f"{name}_weights"][: got.size].reshape(got.shape)
    assert np.abs(right).max() > 0.01
    off = np.abs(got.astype(np.float64) - right).reshape(-1, 16).max(axis=1)
    assert (off <= 2.0**-17 * np.abs(right).reshape(-1, 16).max(axis=1)).all()


def test_some_kinds_move_no_bit():
    for name in ("BF16", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"):
        got = weights(packed(TensorKind[name], GOLDEN[f"{name}_blocks"]))
        right = GOLDEN[f"{name}_weights"][: got.size].reshape(got.shape)
        np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"BF16"}))
@pytest.mark.parametrize("n", [1, 3, 5])
def test_products_are_those_of_the_peers_weights(name: str, n: int):
    """By floats, and by bytes against the vectors that the bytes stand for; by decode and prefill."""
    kind = TensorKind[name]
    matrix = packed(kind, GOLDEN[f"{name}_blocks"], threads=2)
    right = (
        GOLDEN[f"{name}_weights"][: matrix.rows * 256].reshape(matrix.rows, 256).astype(np.float64)
    )
    x = np.random.default_rng(n).standard_normal((n, 256)).astype(np.float32)
    size = np.abs(x).astype(np.float64) @ np.abs(right).T
    assert (np.abs(matrix.multiply(x) - x @ right.T) <= 1e-5 * size).all()
    unit = x.reshape(n, 8, 32).astype(np.float64)
    step = (np.abs(unit).max(axis=2, keepdims=True) / 127).astype(np.float32).astype(np.float64)
    rounded = (np.rint(unit / step) * step).reshape(n, 256)
    wanted = rounded @ right.T
    assert (np.abs(matrix.multiply(x, quantised=True) - wanted) <= 1e-5 * size).all()
    quads, out = Quads(n, 256), np.empty((n, matrix.rows), np.float32)
    quads.take(x, 1)
    quads.multiply(matrix, out, 2)
    assert (np.abs(out - wanted) <= 1e-5 * size).all()


@pytest.mark.parametrize("name", sorted(set(FORMS) - {"BF16"}))
def test_rows_and_threads_change_no_bit(name: str):
    """Of a panel that is not full, and of one that others packed beside it."""
    kind = TensorKind[name]
    blocks = np.tile(GOLDEN[f"{name}_blocks"], 8)
    whole = packed(kind, blocks)
    row = 256 // kind.block_size * kind.block_bytes
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
    right = whole.multiply(x, quantised=True)
    assert packed(kind, blocks, threads=3).multiply(x, quantised=True).tobytes() == right.tobytes()
    for rows in (1, 7, 9):
        few = Matrix("w", name, rows, 256, blocks[: rows * row])
        assert few.multiply(x, quantised=True).tobytes() == right[:, :rows].tobytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    sizes = {"layers": 1, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256}
    path = tmp_path / "m.gguf"
    write_synthetic(
        path,
        "m",
        ModelSizes("llama", "Q8_0", **sizes, vocab=288, context=64, rope_base=1e4, seed=3),
    )
    return path


def mixed(path: Path, kinds: dict[str, TensorKind]) -> Path:
    """The model with some matrices in other kinds, of golden blocks over and over."""
    file = read_gguf(path)
    tensors = []
    for tensor in file.tensors.values():
        kind, data = tensor.kind, tensor.data
        for part, wanted in kinds.items():
            if part in tensor.name:
                kind = wanted
                n = int(np.prod(tensor.shape)) // kind.block_size * kind.block_bytes
                data = np.resize(GOLDEN[f"{kind.name}_blocks"], n)
        tensors.append(TensorToWrite(tensor.name, kind, tensor.shape, [data.tobytes()]))
    out = path.with_name("mixed.gguf")
    write_gguf(out, file.metadata, tensors)
    return out


def as_float(path: Path, kinds: dict[str, TensorKind]) -> Path:
    """The same with those matrices in F32, of the golden weights."""
    file = read_gguf(mixed(path, kinds))
    tensors = []
    for tensor in file.tensors.values():
        kind, data = tensor.kind, tensor.data
        if any(part in tensor.name for part in kinds):
            values = np.resize(GOLDEN[f"{kind.name}_weights"], int(np.prod(tensor.shape)))
            kind, data = TensorKind.F32, values.astype("<f4")
        tensors.append(TensorToWrite(tensor.name, kind, tensor.shape, [data.tobytes()]))
    out = path.with_name("float.gguf")
    write_gguf(out, file.metadata, tensors)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_a_file_gives_the_logits_of_its_weights(model: Path, name: str):
    """Of one kind mixed with Q8_0: those of a file that has the peer's weights in F32. By quantised activations
    the divergence is no more than that of Q8_0 alone."""
    kinds = dict.fromkeys(("attn_q", "attn_v", "ffn_up", "ffn_down"), TensorKind[name])
    ids = np.arange(20)
    ours, right = load(mixed(model, kinds)), load(as_float(model, kinds)).logits(ids)
    assert np.abs(right).max() > 1
    np.testing.assert_allclose(ours.logits(ids), right, atol=1e-4)
    assert divergence(right, ours.logits(ids, activations="quantised")) < 2e-3


def divergence(right: np.ndarray, got: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of the tokens' chances, in nats."""
    p, q = (
        x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=1)[:, None]
        for x in (right, got)
    )
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def test_all_kinds_that_do_not_run_are_said_at_once(model: Path):
    data = bytearray(
        mixed(model, {"attn_q": TensorKind.Q4_0, "ffn_up": TensorKind.Q4_0}).read_bytes()
    )
    for name, number in ((b"blk.0.attn_q.weight", 16), (b"blk.0.ffn_up.weight", 99)):
        at = data.index(name) + len(name) + 4 + 2 * 8
        data[at : at + 4] = number.to_bytes(4, "little")
    model.write_bytes(data)
    said = (
        r"IQ2_XXS \(blk.0.attn_q.weight\), type 99 \(blk.0.ffn_up.weight\); .*llama-quantize.* Q8_0"
    )
    with pytest.raises(UnsupportedTensorType, match=said):
        load(model)


def test_an_offset_that_overflows_is_refused(model: Path):
    """Of Q6_K -32 times 3,000 is no half any more."""
    file = mixed(model, {"attn_q": TensorKind.Q6_K})
    data = bytearray(file.read_bytes())
    block = GOLDEN["Q6_K_blocks"][:210].tobytes()
    at = data.index(block) + 208
    data[at : at + 2] = np.float16(3000).tobytes()
    file.write_bytes(data)
    said = r"attn_q.weight' \(Q6_K\) has blocks whose lowest weights are past what FP16 holds"
    with pytest.raises(NonFiniteWeight, match=said):
        load(file)
