"""What of a file does not run here: all of it at once, before its weights take memory, with the ways out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtrial.contract.arguments import shown
from kvtrial.engine.architecture import ARCHITECTURES, Architecture
from kvtrial.engine.errors import (
    GgufInvalid,
    ModelError,
    TokenizerUnsupported,
    UnsupportedArchitecture,
    UnsupportedTensorType,
)
from kvtrial.engine.gguf import GgufFile, Strange
from kvtrial.engine.kinds import OTHERS, TensorKind
from kvtrial.engine.tokenizer import unsupported

#: Keys of a family with which a layer would do what none does here, and the values with which it does not.
#: Factors of RoPE's single pairs are a tensor, ``rope_freqs.weight``.
_RUNS: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none", "linear"),
    "expert_count": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "use_parallel_residual": (False,),
}
#: Tensors that some files of these architectures have beside those that are used here.
_CHANGES_OUTPUT = re.compile(r"\.bias$|\.scale$|_norm\.weight$|^rope_")
#: What else is to be said of one that does not run.
_MORE = {
    "rope.scaling.type": ", or factors in rope_freqs.weight",
    "expert_count": ": a mixture of experts does not run",
}
#: What ends the name of a part of a model.
_PART = re.compile(r"-\d{5}-of-(?=\d{5}\.gguf$)")
#: So many names of tensors are in a message; the count is of all.
_NAMED = 4


class Obstacle(NamedTuple):
    """A key or tensors that do not run: the error that it is alone, and what it says."""

    error: type[ModelError]
    said: str


def refuse(file: GgufFile, reads_text: bool = False) -> None:
    """Raise the error of the first obstacle, whose message has all of them and the ways out.

    Parameters
    ----------
    file : GgufFile
    reads_text : bool
        A file without a tokenizer is refused too; else it runs on ids.

    Raises
    ------
    GgufInvalid
        It is no model, or a part of one.
    UnsupportedTensorType, UnsupportedArchitecture, TokenizerUnsupported
    """
    if problem := _no_whole_model(file):
        raise GgufInvalid(f"{file.path}: {problem}")
    metadata, names = file.metadata, [*file.tensors, *file.strange]
    found = [
        *_of_types(file.strange),
        *_of_family(metadata, names),
        *_of_tokenizer(metadata, reads_text),
    ]
    if found:
        said = "; ".join(obstacle.said for obstacle in found)
        only_types = all(obstacle.error is UnsupportedTensorType for obstacle in found)
        raise found[0].error(f"{file.path}: {said}. {_ways_out(file.path, only_types)}")


def _no_whole_model(file: GgufFile) -> str | None:
    """What the file is if no model, and what to do with it; None for a model."""
    said = {key: value for key, value in file.metadata.items() if isinstance(value, (str, int))}
    kind, count = said.get("general.type"), said.get("split.count", 1)
    path = shlex.quote(str(file.path))
    if kind == "adapter":
        return (
            "is an adapter (LoRA), not a model; allowed: a whole model: merge the two by llama.cpp's "
            f"`llama-export-lora -m MODEL.gguf --lora {path} -o MERGED.gguf`"
        )
    if kind == "mmproj" or said.get("general.architecture") == "clip":
        return (
            "reads images or sound for a model (mmproj); allowed: a model of text: give the other file, "
            "that of the language model"
        )
    if kind not in (None, "model"):
        return f"general.type is {shown(kind)}; allowed: 'model'; give the file of a model"
    if isinstance(count, int) and count > 1:
        first = _PART.sub("-00001-of-", str(file.path))
        return (
            f"is one of {count} parts of a model (split.count); allowed: a whole model: join them by llama.cpp's "
            f"`llama-gguf-split --merge {shlex.quote(first)} WHOLE.gguf`, which takes the first part's name"
        )
    return None


def _ways_out(path: Path, only_types: bool) -> str:
    """To convert a file helps where nothing but its types stands in the way."""
    quoted = shlex.quote(str(path))
    measure = f"measure its shape with random weights: `kvtrial models --synthetic {quoted}`"
    if not only_types:
        return measure[0].upper() + measure[1:]
    return (
        f"Convert it by llama.cpp's `llama-quantize --allow-requantize {quoted} OUT.gguf Q8_0`, or better from "
        f"its F16 original; or {measure}"
    )


def _of_types(strange: Mapping[str, Strange]) -> Iterable[Obstacle]:
    if not strange:
        return
    by_number: dict[int, list[str]] = {}
    for name, tensor in strange.items():
        by_number.setdefault(tensor.number, []).append(name)
    met = (
        f"{OTHERS.get(number, f'type {number}')} "
        + (f"({names[0]})" if len(names) == 1 else f"({len(names)} tensors, such as {names[0]})")
        for number, names in sorted(by_number.items())
    )
    allowed = ", ".join(kind.name for kind in TensorKind)
    yield Obstacle(UnsupportedTensorType, f"has tensors of {', '.join(met)}; allowed: {allowed}")


def _of_family(metadata: Mapping[str, Any], tensors: Iterable[str]) -> Iterable[Obstacle]:
    name = metadata.get("general.architecture")
    family = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if family is None:
        said = f"general.architecture is {shown(name)}; allowed: {', '.join(ARCHITECTURES)}"
        yield Obstacle(UnsupportedArchitecture, said)
    for key, values in _RUNS.items():
        value = metadata.get(f"{name}.{key}")
        if value is not None and not (isinstance(value, (str, int, float)) and value in values):
            allowed = f"{', '.join(map(str, values))}, or no such key{_MORE.get(key, '')}"
            said = f"{name}.{key} is {shown(value)}; allowed: {allowed}"
            yield Obstacle(UnsupportedArchitecture, said)
    yield from _of_heads(metadata, str(name))
    if family is not None and (changing := _changing(family, tensors)):
        more = f" and {len(changing) - _NAMED} more" if len(changing) > _NAMED else ""
        yield Obstacle(
            UnsupportedArchitecture,
            f"{name} has no use for {', '.join(changing[:_NAMED])}{more}, without which the model's output would "
            "be another; allowed: a model without them",
        )


def _of_heads(metadata: Mapping[str, Any], name: str) -> Iterable[Obstacle]:
    """Heads of two sizes, RoPE of a part of them, and a window; keys that are no numbers are another's to
    refuse."""
    read = {
        key: metadata.get(f"{name}.{key}")
        for key in (
            "embedding_length", "attention.head_count", "attention.key_length", "attention.value_length",
            "rope.dimension_count", "attention.sliding_window", "context_length",
        )
    }  # fmt: skip
    sizes = {key: value for key, value in read.items() if type(value) is int and value > 0}
    window = sizes.get("attention.sliding_window")
    if window is not None and window < sizes.get("context_length", window + 1):
        said = (
            f"{name}.attention.sliding_window is {window} of {shown(read['context_length'])} positions; allowed: "
            "the model's context_length, 0, or no such key: here a position reads all before it"
        )
        yield Obstacle(UnsupportedArchitecture, said)
    head_dim = sizes.get("attention.key_length")
    if head_dim is None and {"embedding_length", "attention.head_count"} <= set(sizes):
        head_dim = sizes["embedding_length"] // sizes["attention.head_count"]
    if head_dim is None:
        return
    for key, what in (
        ("attention.value_length", "K and V of one head_dim"),
        ("rope.dimension_count", "all dimensions of a head are turned"),
    ):
        if sizes.get(key, head_dim) != head_dim:
            said = f"{name}.{key} is {sizes[key]} of {head_dim}; allowed: {what}"
            yield Obstacle(UnsupportedArchitecture, said)


def _changing(family: Architecture, tensors: Iterable[str]) -> list[str]:
    """Names of tensors that the family's layers make no use of, though a model that has them needs them."""
    used = {"output_norm.weight", "rope_freqs.weight"}
    inside = {"attn_norm.weight", "ffn_norm.weight"}
    if family.qkv_bias:
        inside |= {f"attn_{part}.bias" for part in "qkv"}
    if family.qk_norm:
        inside |= {f"attn_{part}_norm.weight" for part in "qk"}
    return sorted(
        name
        for name in tensors
        if _CHANGES_OUTPUT.search(name)
        and name not in used
        and re.sub(r"^blk\.\d+\.", "", name) not in inside
    )


def _of_tokenizer(metadata: Mapping[str, Any], reads_text: bool) -> Iterable[Obstacle]:
    """Of a tokenizer that is there; without one a model runs on ids."""
    if reads_text or "tokenizer.ggml.model" in metadata:
        for said in unsupported(metadata):
            yield Obstacle(TokenizerUnsupported, said)
