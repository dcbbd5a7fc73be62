"""Files that do not run, as they are met: each is told whole, with its values, what is allowed and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtrial.engine.config import ModelConfig
from kvtrial.engine.errors import (
    GgufInvalid,
    ModelError,
    ModelNotFetched,
    TokenizerUnsupported,
    UnknownModel,
    UnsupportedArchitecture,
)
from kvtrial.engine.gguf import STRINGS, TensorToWrite, read_gguf, write_gguf
from kvtrial.engine.kinds import TensorKind
from kvtrial.engine.synthetic import ModelSizes, sizes_like, write_synthetic
from kvtrial.run import models


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    sizes = ModelSizes(
        "llama", "Q8_0", layers=2, q_heads=4, kv_heads=2, head_dim=32, ffn=64, vocab=288, context=64,
        rope_base=1e4, seed=3,
    )  # fmt: skip
    write_synthetic(path, "m", sizes)
    return path


def f32(name: str, *shape: int) -> TensorToWrite:
    return TensorToWrite(name, TensorKind.F32, shape, [np.zeros(shape, "<f4").tobytes()])


def changed(path: Path, keys: dict[str, Any], more: tuple[TensorToWrite, ...] = ()) -> Path:
    """The file with keys of ``llama``, or whole ones, replaced (None: taken out), and more tensors."""
    file = read_gguf(path)
    full = {key if key.split(".")[0] in ROOTS else f"llama.{key}": v for key, v in keys.items()}
    metadata = {key: v for key, v in (file.metadata | full).items() if v is not None}
    tensors = [
        TensorToWrite(t.name, t.kind, t.shape, [t.data.tobytes()]) for t in file.tensors.values()
    ]
    write_gguf(path, metadata, [*tensors, *more])
    return path


ROOTS = ("general", "tokenizer", "split", "gemma3")
SYNTHETIC = r"kvtrial models --synthetic"
#: What a file has → the error, and what its message has, in order.
STRANGE: dict[str, tuple[dict[str, Any], type[ModelError], list[str]]] = {
    "YaRN": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        UnsupportedArchitecture,
        ["rope.scaling.type is 'yarn'; allowed: none, linear, or no such key, or factors in rope_freqs.weight"],
    ),
    "experts": (
        {"expert_count": 8, "expert_used_count": 2},
        UnsupportedArchitecture,
        ["llama.expert_count is 8; allowed: 0, or no such key: a mixture of experts does not run"],
    ),
    "window": (
        {"attention.sliding_window": 16},
        UnsupportedArchitecture,
        ["attention.sliding_window is 16 of 64 positions; allowed: the model's context_length, 0,"],
    ),
    "another family": (
        {
            "general.architecture": "gemma3", "gemma3.final_logit_softcapping": 30.0,
            "gemma3.attention.sliding_window": 8,
        },
        UnsupportedArchitecture,
        ["architecture is 'gemma3'; allowed: llama, qwen2, qwen3, gemma", "softcapping is 30.0", "window is 8 of"],
    ),
    "an encoder": (
        {"attention.causal": False},
        UnsupportedArchitecture,
        ["attention.causal is False; allowed: True"],
    ),
    "several": (
        {"rope.scaling.type": "longrope", "expert_count": 4, "tokenizer.ggml.pre": "command-r"},
        UnsupportedArchitecture,
        ["'longrope'", "expert_count is 4", "tokenizer.ggml.pre is 'command-r'; allowed: deepseek-llm, gpt-2"],
    ),
    "WordPiece": (
        {"tokenizer.ggml.model": "bert"},
        TokenizerUnsupported,
        ["tokenizer.ggml.model is 'bert'; allowed: gpt2 (byte-level BPE), llama (SentencePiece)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STRANGE)
def test_all_that_stands_in_the_way_is_said_at_once(sound: Path, case: str):
    keys, error, said = STRANGE[case]
    path = changed(sound, keys)
    with pytest.raises(error) as refused:
        ModelConfig.from_gguf(read_gguf(path))
    message = str(refused.value)
    at = [message.index(part) for part in (str(path), *said, SYNTHETIC)]
    assert at == sorted(at) and "llama-quantize" not in message


def test_keys_that_change_nothing_run(sound: Path):
    harmless = {
        "rope.scaling.type": "none",
        "expert_count": 0,
        "attention.sliding_window": 64,
        "attention.causal": True,
        "general.type": "model",
        "split.count": np.uint16(1),
    }
    assert ModelConfig.from_gguf(read_gguf(changed(sound, harmless))).layers == 2


#: Files that are no model, or not all of one → what to do with them.
NO_MODEL = {
    "adapter": ({"general.type": "adapter"}, r"is an adapter \(LoRA\), .*`llama-export-lora -m MODEL.gguf --lora "),
    "mmproj": ({"general.architecture": "clip"}, "reads images or sound .* give the other file"),
    "imatrix": ({"general.type": "imatrix"}, "general.type is 'imatrix'; allowed: 'model'"),
    "part": (
        {"split.count": np.uint16(3), "split.no": np.uint16(1)},
        r"is one of 3 parts .*`llama-gguf-split --merge '.*a b-00001-of-00003.gguf' WHOLE.gguf`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_MODEL)
def test_what_is_no_whole_model_says_what_it_is(tmp_path: Path, case: str):
    keys, said = NO_MODEL[case]
    path = tmp_path / "a b-00002-of-00003.gguf"
    write_gguf(path, keys, [f32("blk.0.attn_q.weight.lora_a", 2, 8)])
    with pytest.raises(GgufInvalid, match=said):
        ModelConfig.from_gguf(read_gguf(path))


def test_a_trial_refuses_a_file_before_it_has_a_name(sound: Path, tmp_path: Path, monkeypatch):
    """A model without a tokenizer runs on ids; a trial reads text."""
    monkeypatch.setenv("KVTRIAL_RESULTS", str(tmp_path / "results"))
    changed(sound, {"tokenizer.ggml.model": None})
    assert ModelConfig.from_gguf(read_gguf(sound)).vocab == 288
    with pytest.raises(
        TokenizerUnsupported, match=r"tokenizer.ggml.model is missing; allowed: gpt2"
    ):
        models.register(sound)
    assert not list((tmp_path / "results" / "models").glob("*.json"))


def test_paths_of_other_things_are_told_apart(tmp_path: Path):
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelNotFetched, match=r"folder\.gguf' \(it is a folder\); give the path"):
        models.path_of(tmp_path / "folder.gguf")
    with pytest.raises(ModelNotFetched, match=r"no file 'https://hub\.example/x\.gguf'; give"):
        models.path_of("https://hub.example/x.gguf")
    for other in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(UnknownModel, match=r"ends in \.gguf; .*convert_hf_to_gguf\.py FOLDER"):
            models.path_of(str(other))
    with pytest.raises(
        UnknownModel, match=r"'org/model'; known: .* on a hub .* config/models\.yaml"
    ):
        models.path_of("org/model")


def test_a_shape_is_read_of_files_that_do_not_run(sound: Path):
    sizes = sizes_like(
        read_gguf(changed(sound, {"expert_count": 8, "tokenizer.ggml.model": "bert"}))
    )
    assert (sizes.layers, sizes.q_heads, sizes.kv_heads, sizes.head_dim, sizes.ffn) == (
        2,
        4,
        2,
        32,
        64,
    )


def test_strings_are_decoded_when_one_is_asked_for(sound: Path):
    """One that is not UTF-8 is an error of whoever reads it; those of other keys are not."""
    tokens = list(read_gguf(sound).metadata["tokenizer.ggml.tokens"])
    assert (
        len(tokens) == 288 and tokens[-1] == "<|endoftext|>" and tokens[257:259] == tokens[257:][:2]
    )
    data = bytearray(sound.read_bytes())
    data[data.index(b"<|endoftext|>")] = 0xFF
    sound.write_bytes(data)
    metadata = read_gguf(sound).metadata
    broken, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(broken, STRINGS) and len(broken) == 288 and broken
    assert " " in merges[0] and repr(broken) == "an array of 288 strings"
    with pytest.raises(GgufInvalid, match=r"'tokenizer.ggml.tokens' is not UTF-8"):
        broken[0]
