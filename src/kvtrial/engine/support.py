"""What of a file does not run here: all of it at once, before its weights take memory, with the ways out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtrial.contract import shown
from kvtrial.engine.architecture import ARCHITECTURES, Architecture
from kvtrial.engine.errors import (
    ModelError,
    TokenizerUnsupported,
    UnsupportedArchitecture,
    UnsupportedTensorType,
)
from kvtrial.engine.gguf import GgufFile, Strange
from kvtrial.engine.kinds import OTHERS, TensorKind
from kvtrial.engine.tokenizer import unsupported

#: RoPE scaling that runs; factors of single pairs are a tensor, ``rope_freqs.weight``.
ROPE_SCALING = ("none", "linear")
#: Tensors that some files of these architectures have beside those that are used here.
_CHANGES_OUTPUT = re.compile(r"\.bias$|\.scale$|_norm\.weight$|^rope_")
#: So many names of tensors are in a message; the count is of all.
_NAMED = 4


class Obstacle(NamedTuple):
    """A key or tensors that do not run: the error that it is alone, and what it says."""

    error: type[ModelError]
    said: str


def refuse(file: GgufFile) -> None:
    """Raise the error of the first obstacle, whose message has all of them and the ways out.

    Raises
    ------
    UnsupportedTensorType, UnsupportedArchitecture, TokenizerUnsupported
    """
    metadata, names = file.metadata, [*file.tensors, *file.strange]
    found = [*_of_types(file.strange), *_of_family(metadata, names), *_of_tokenizer(metadata)]
    if found:
        said = "; ".join(obstacle.said for obstacle in found)
        raise found[0].error(f"{file.path}: {said}. {_ways_out(file.path, bool(file.strange))}")


def _ways_out(path: Path, types: bool) -> str:
    convert = ""
    if types:
        convert = (
            "Convert it by llama.cpp's `llama-quantize --allow-requantize IN.gguf OUT.gguf Q8_0`, or better from "
            "its F16 original; or "
        )
    measure = f"measure its shape with random weights: kvtrial models --synthetic '{path}'"
    return f"{convert}{measure}" if convert else measure[0].upper() + measure[1:]


def _of_types(strange: Mapping[str, Strange]) -> Iterable[Obstacle]:
    if not strange:
        return
    by_number: dict[int, list[str]] = {}
    for name, tensor in strange.items():
        by_number.setdefault(tensor.number, []).append(name)
    met = (
        f"{OTHERS.get(number, f'type {number}')} ({len(names)} tensors, such as {names[0]!r})"
        for number, names in sorted(by_number.items())
    )
    allowed = ", ".join(kind.name for kind in TensorKind)
    yield Obstacle(UnsupportedTensorType, f"has tensors of {', '.join(met)}; allowed: {allowed}")


def _of_family(metadata: Mapping[str, Any], tensors: Iterable[str]) -> Iterable[Obstacle]:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        said = f"general.architecture is {shown(name)}; allowed: {', '.join(ARCHITECTURES)}"
        yield Obstacle(UnsupportedArchitecture, said)
        return
    scaling = metadata.get(f"{name}.rope.scaling.type")
    if scaling is not None and not (isinstance(scaling, str) and scaling in ROPE_SCALING):
        yield Obstacle(
            UnsupportedArchitecture,
            f"{name}.rope.scaling.type is {shown(scaling)}; allowed: {', '.join(ROPE_SCALING)}, and factors in "
            "rope_freqs.weight",
        )
    yield from _of_heads(metadata, name)
    if changing := _changing(ARCHITECTURES[name], tensors):
        yield Obstacle(
            UnsupportedArchitecture,
            f"{len(changing)} tensors would change the output and do not run in {name}, such as "
            f"{', '.join(changing[:_NAMED])}; allowed: a model without them",
        )


def _of_heads(metadata: Mapping[str, Any], name: str) -> Iterable[Obstacle]:
    """Heads of two sizes, and RoPE of a part of them; keys that are no numbers are another's to refuse."""
    read = {
        key: metadata.get(f"{name}.{key}")
        for key in (
            "embedding_length", "attention.head_count", "attention.key_length", "attention.value_length",
            "rope.dimension_count",
        )
    }  # fmt: skip
    sizes = {key: value for key, value in read.items() if type(value) is int and value > 0}
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


def _of_tokenizer(metadata: Mapping[str, Any]) -> Iterable[Obstacle]:
    """Of a tokenizer that is there; without one a model runs on ids."""
    if "tokenizer.ggml.model" in metadata:
        for said in unsupported(metadata):
            yield Obstacle(TokenizerUnsupported, said)
