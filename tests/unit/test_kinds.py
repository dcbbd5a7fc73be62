"""Tensor kinds against weights that the `gguf` package has made of the same random blocks.

tests/data/kinds.npz: for each kind ``NAME_blocks`` (uint8) and ``NAME_weights`` (float32), by gguf's
``quants.dequantize`` from blocks of random bits with finite scales.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from kvtrial.engine._weights import Matrix

from kvtrial.engine import load
from kvtrial.engine.errors import NonFiniteWeight, UnsupportedTensorType
from kvtrial.engine.gguf import TensorToWrite, read_gguf, write_gguf
from kvtrial.engine.kinds import KEPT, OTHERS, TensorKind, kept
from kvtrial.engine.synthetic import ModelSizes, write_synthetic

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "kinds.npz")
NAMES = sorted({name.rpartition("_")[0] for name in GOLDEN.files})


def weights(kind: TensorKind, blocks: np.ndarray) -> np.ndarray:
    """What the engine multiplies with: the blocks as they are kept, packed and taken out again."""
    size = blocks.size // kind.block_bytes * kind.block_size
    cols = max(32, KEPT[kind].kind.block_size)
    matrix = Matrix("w", KEPT[kind].kind.name, size // cols, cols, kept(kind, blocks))
    out = np.empty((size // cols, cols), np.float32)
    matrix.dequantise(0, size // cols, out)
    return out.reshape(-1)


def test_every_kind_has_golden_values():
    assert set(NAMES) == {kind.name for kind in TensorKind} - {"F32", "F16"}
    assert set(KEPT) == set(TensorKind)
    assert not {kind.value for kind in TensorKind} & set(OTHERS)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_peers(name: str):
    kind = TensorKind[name]
    right = GOLDEN[f"{name}_weights"]
    assert np.abs(right).max() > 0.01
    off = np.abs(weights(kind, GOLDEN[f"{name}_blocks"]).astype(np.float64) - right)
    by_block = np.abs(right).reshape(-1, 32).max(axis=1, keepdims=True).astype(np.float64)
    allowed = {
        # An odd q times a half is rounded in float32 by both.
        "exact": 2.0**-23 * by_block,
        # q up to 31 times the scale's rounding, and that of the minimum: 2^-11 of each.
        "scale": 2.0**-11 * (by_block + 2 * by_block),
        # Half a step, and the step's own rounding.
        "half a step": by_block / 254 + 2.0**-11 * by_block,
    }[KEPT[kind].loss]
    assert (off.reshape(-1, 32) <= allowed + 2.0**-25).all()


def test_some_kinds_move_no_weight():
    """What the table calls exact is so, bit for bit."""
    for name in ("BF16", "Q4_0", "Q5_0", "IQ4_NL"):
        right = GOLDEN[f"{name}_weights"]
        np.testing.assert_array_equal(weights(TensorKind[name], GOLDEN[f"{name}_blocks"]), right)


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


EXACT = {"attn_q": TensorKind.BF16, "attn_v": TensorKind.Q4_0, "ffn_up": TensorKind.Q5_0}
NEAR = {"attn_q": TensorKind.Q4_K, "attn_v": TensorKind.Q6_K, "ffn_down": TensorKind.Q5_K}


@pytest.mark.parametrize(("kinds", "allowed"), [(EXACT, 1e-4), (NEAR, 5e-2)])
def test_a_mixed_file_gives_the_logits_of_its_weights(model: Path, kinds, allowed: float):
    ids = np.arange(20)
    ours = load(mixed(model, kinds)).logits(ids)
    right = load(as_float(model, kinds)).logits(ids)
    assert np.abs(right).max() > 1
    assert np.abs(ours - right).max() < allowed


def test_all_kinds_that_do_not_run_are_said_at_once(model: Path):
    data = bytearray(
        mixed(model, {"attn_q": TensorKind.Q4_0, "ffn_up": TensorKind.Q4_0}).read_bytes()
    )
    for name, number in ((b"blk.0.attn_q.weight", 16), (b"blk.0.ffn_up.weight", 99)):
        at = data.index(name) + len(name) + 4 + 2 * 8
        data[at : at + 4] = number.to_bytes(4, "little")
    model.write_bytes(data)
    said = (
        r"IQ2_XXS \(1 tensors, such as 'blk.0.attn_q.weight'\), type 99 \(1 .*llama-quantize.* Q8_0"
    )
    with pytest.raises(UnsupportedTensorType, match=said):
        load(model)


def test_a_scale_that_overflows_as_it_is_kept_is_refused(model: Path):
    """Of Q4_K 60,000 times a sub-block's 63 is no half any more."""
    file = mixed(model, {"attn_q": TensorKind.Q4_K})
    data = bytearray(file.read_bytes())
    block = GOLDEN["Q4_K_blocks"][:144].tobytes()
    at = data.index(block)
    data[at : at + 2] = np.float16(60000).tobytes()
    data[at + 4] = 63
    file.write_bytes(data)
    said = r"attn_q.weight' \(Q4_K\) has weights past what Q4_1 holds, as which it is kept"
    with pytest.raises(NonFiniteWeight, match=said):
        load(file)
