"""What `kvtrial models` says of a model, and the file of random weights that stands for one that does not run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvtrial import engine
from kvtrial.engine.errors import UnknownModel, UnsupportedArchitecture, UnsupportedTensorType
from kvtrial.engine.gguf import TensorKind, TensorToWrite, read_gguf, write_gguf
from kvtrial.engine.synthetic import ModelSizes, write_synthetic
from kvtrial.run import models
from kvtrial.tools import command, needs

SIZES = ModelSizes(
    "qwen3", "Q8_0", layers=2, q_heads=4, kv_heads=2, head_dim=64, ffn=96, vocab=288, context=128, rope_base=1e5,
    seed=3, width=96,
)  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path / "results"))
    path = tmp_path / "own.gguf"
    write_synthetic(path, "own", SIZES)
    return path


def test_a_file_is_told_with_what_it_needs(own: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("kvtrial.host.machine.available_memory_bytes", lambda: 10**9)
    assert command.main(["models", "--model", str(own), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["layers"], told["q_heads"], told["kv_heads"], told["head_dim"]) == (2, 4, 2, 64)
    # Q, K, V and out of 256, 128, 128 and 96 rows, three of the feed-forward, embedding; 34 bytes a 32.
    matrices = 2 * (96 * (256 + 128 + 128) + 256 * 96 + 3 * 96 * 96) + 288 * 96
    vectors = 4 * (96 + 2 * (2 * 96 + 2 * 64))
    assert told["weight_bytes"] == matrices // 32 * 34 + vectors
    # K and V of two heads of 64, two layers.
    assert told["profiles"]["fp32"]["bytes_a_token"] == 2 * 2 * 2 * 64 * 4
    assert told["profiles"]["fp16"]["bytes_a_token"] == 2 * 2 * 2 * 64 * 2
    assert told["profiles"]["fp32"]["fits_tokens"] == (10**9 - told["weight_bytes"]) // 2048
    assert command.main(["models", "--model", str(own)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[1:])) <= 80
    assert "  qwen3, synthetic, 2 layers, 4/2 heads of 64" in lines
    assert any(line.split()[:2] == ["fp32", "2,048"] for line in lines)


def test_names_are_told_here_or_not(own: Path, capsys) -> None:
    assert command.main(["models"]) == 0
    said = capsys.readouterr().out
    assert "  not here: kvtrial fetch tiny-llama\n" in said
    assert max(map(len, said.splitlines())) <= 80
    with pytest.raises(UnknownModel, match="no model 'nobody'"):
        needs.of_model("nobody")


def strange(path: Path, **changed: object) -> Path:
    """The file with a family, keys and a tensor type that do not run."""
    file = read_gguf(path)
    tensors = [TensorToWrite(t.name, t.kind, t.shape, [t.data]) for t in file.tensors.values()]
    bias = np.zeros(96, "<f4")
    tensors.append(TensorToWrite("blk.0.attn_output.bias", TensorKind.F32, (96,), [bias]))
    metadata = {
        **file.metadata,
        "qwen3.rope.scaling.type": "yarn",
        "tokenizer.ggml.pre": "mystery",
        **changed,
    }
    out = path.with_name("strange.gguf")
    write_gguf(out, metadata, tensors)
    raw = bytearray(out.read_bytes())
    for name, number in ((b"blk.0.attn_q.weight", 39), (b"blk.1.ffn_up.weight", 16)):
        at = raw.index(name) + len(name) + 4 + 2 * 8
        raw[at : at + 4] = number.to_bytes(4, "little")
    out.write_bytes(raw)
    return out


def test_all_that_stands_in_the_way_is_said_at_once_with_the_ways_out(own: Path, capsys) -> None:
    path = strange(own)
    with pytest.raises(UnsupportedTensorType) as refused:
        engine.load(path)
    said = str(refused.value)
    for part in (
        "IQ2_XXS (blk.1.ffn_up.weight)",
        "MXFP4 (blk.0.attn_q.weight)",
        "qwen3.rope.scaling.type is 'yarn'; allowed: none, linear",
        "qwen3 has no use for blk.0.attn_output.bias, without which",
        "tokenizer.ggml.pre is 'mystery'; allowed: deepseek-llm, gpt-2",
        f"Measure its shape with random weights: `kvtrial models --synthetic {path}`",
    ):
        assert part in said, part
    assert "llama-quantize" not in said  # other types would not be enough
    assert needs.of_model(str(path))["refused"] == said
    with pytest.raises(
        UnsupportedArchitecture, match=r"general\.architecture is 'phi3'; allowed: llama"
    ):
        engine.load(with_keys(own, **{"general.architecture": "phi3"}))


def with_keys(path: Path, **keys: object) -> Path:
    file = read_gguf(path)
    tensors = [TensorToWrite(t.name, t.kind, t.shape, [t.data]) for t in file.tensors.values()]
    out = path.with_name("keys.gguf")
    write_gguf(out, {**file.metadata, **keys}, tensors)
    return out


def test_random_weights_stand_for_a_file_that_does_not_run(own: Path, capsys) -> None:
    path = strange(own)
    assert command.main(["models", "--synthetic", str(path)]) == 0
    made, said = capsys.readouterr().out.splitlines()
    assert "kvtrial run --model" in said
    like, model = engine.load(own), engine.load(made)
    assert model.synthetic and model.config == like.config
    name = models.register(made)  # as `make verdict MODEL=path` does
    assert models.is_synthetic(name) and models.path_of(name).samefile(made)
