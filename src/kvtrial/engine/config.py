"""A model's shape and constants, read from the metadata of its GGUF file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvtrial.contract import MAX_GROUP, MAX_HEAD_DIM, InvalidArgument
from kvtrial.contract.arguments import shown
from kvtrial.engine import support
from kvtrial.engine.architecture import ARCHITECTURES, Architecture
from kvtrial.engine.errors import GgufInvalid
from kvtrial.engine.gguf import STRINGS, GgufFile


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer.

    Attributes
    ----------
    architecture : Architecture
        The family: what its layers do.
    layers, q_heads, kv_heads, head_dim, hidden, ffn : int
    vocab : int
        Tokens. Where the file's matrices have more rows, as padding, those are left out: no text has
        such a token, so none is to be chosen.
    rope_base : float
        Angle of pair i at position p: p / rope_factor * rope_base ** (-2i / head_dim).
    rms_eps : float
    context_length : int
        Positions that the model was trained for; `room` tells what is left of them.
    tied : bool
        The output matrix is the embedding.
    rope_factor : float
        Positions are divided by it (linear scaling). Factors of single pairs are in the file's
        ``rope_freqs.weight``, see `Weights.rope_factors`.
    attention_factor : float
        Of rotated queries and of rotated keys (``rope.scaling.attn_factor``).
    """

    architecture: Architecture
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int
    vocab: int
    rope_base: float
    rms_eps: float
    context_length: int
    tied: bool
    rope_factor: float = 1.0
    attention_factor: float = 1.0

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return math.sqrt(self.hidden) if self.architecture.scaled_embedding else 1.0

    @property
    def attention_scale(self) -> float:
        """Factor of q · k; both were to be turned by RoPE times `attention_factor`, as llama.cpp does
        it whether or not the file names a type of scaling."""
        return float(self.head_dim**-0.5) * self.attention_factor**2

    @property
    def store_shape(self) -> dict[str, Any]:
        """What a KV store has to know of it: layers, q_heads, kv_heads, head_dim."""
        return {
            "layers": self.layers,
            "q_heads": self.q_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }

    def room(self, prompt: int) -> int:
        """Tokens that can be made after ``prompt`` tokens inside `context_length`; the last one made
        takes no position.

        Raises
        ------
        InvalidArgument
            The prompt alone is longer.
        """
        if prompt > self.context_length:
            raise InvalidArgument(
                f"the prompt has {prompt} tokens; the model was trained for {self.context_length} "
                "positions: shorten it, or allow more by beyond_context (--beyond-context)"
            )
        return self.context_length - prompt + 1

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Read and check the keys.

        Raises
        ------
        UnsupportedTensorType, UnsupportedArchitecture, TokenizerUnsupported
            All that does not run of the file; see `kvtrial.engine.support`.
        GgufInvalid
            A key is missing, of the wrong type, or contradicts another.
        MissingTensor
            No embedding.
        """
        support.refuse(file)
        architecture = ARCHITECTURES[file.metadata["general.architecture"]]
        read = Keys(file, architecture.name)
        embedding = file.tensor("token_embd.weight").shape
        if len(embedding) != 2:
            raise GgufInvalid(
                f"{file.path}: token_embd.weight has shape {embedding}; it is a matrix"
            )
        q_heads = read.integer("attention.head_count")
        hidden = read.integer("embedding_length")
        head_dim = read.integer("attention.key_length", hidden // q_heads)
        config = cls(
            architecture=architecture,
            layers=read.integer("block_count"),
            q_heads=q_heads,
            kv_heads=read.integer("attention.head_count_kv", q_heads),
            head_dim=head_dim,
            hidden=hidden,
            ffn=read.integer("feed_forward_length"),
            vocab=_vocab(file, embedding[0]),
            rope_base=read.number("rope.freq_base", 10000.0),
            rms_eps=read.number("attention.layer_norm_rms_epsilon"),
            context_length=read.integer("context_length"),
            tied="output.weight" not in file.tensors,
            rope_factor=_rope_factor(read),
            attention_factor=read.number("rope.scaling.attn_factor", 1.0),
        )
        config._check(file, read)
        return config

    def _check(self, file: GgufFile, read: Keys) -> None:
        if self.q_heads % self.kv_heads or self.q_heads // self.kv_heads > MAX_GROUP:
            raise GgufInvalid(
                f"{file.path}: {self.q_heads} query heads over {self.kv_heads} KV heads; allowed: a "
                f"multiple, 1 to {MAX_GROUP} times"
            )
        if self.head_dim % 2 or self.head_dim > MAX_HEAD_DIM:
            raise GgufInvalid(
                f"{file.path}: head_dim is {self.head_dim}; allowed: even, up to {MAX_HEAD_DIM}"
            )
        for key in ("attention.value_length", "rope.dimension_count"):
            read.integer(key, self.head_dim)  # another number was refused, another type was not


def _rope_factor(read: Keys) -> float:
    """What positions are divided by; 1 where they are not scaled."""
    if read.raw("rope.scaling.type") == "none":
        return 1.0
    for key in ("rope.scaling.factor", "rope.scale_linear"):  # the second is of old files
        value = read.raw(key)
        if value is not None and not (type(value) in (int, float) and value == 0):
            return read.number(key)
    return 1.0


def _vocab(file: GgufFile, rows: int) -> int:
    """Tokens of the file's tokenizer; as many as rows where it has none."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, STRINGS) or not tokens:
        return rows
    if len(tokens) > rows:
        raise GgufInvalid(
            f"{file.path}: token_embd.weight has {rows} rows for the {len(tokens)} tokens of "
            "tokenizer.ggml.tokens; allowed: at least as many; convert the model again"
        )
    return len(tokens)


class Keys:
    """Typed look-ups of an architecture's keys; `GgufInvalid` names one that is missing or of another type."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def raw(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.raw(key)
        if value is None:
            value = default
        if value is None:
            raise GgufInvalid(
                f"{self.file.path}: metadata key {self.architecture}.{key} is missing; convert the "
                "model again"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
            raise GgufInvalid(
                f"{self.file.path}: metadata key {self.architecture}.{key} is {shown(value)}; allowed: "
                "an integer from 1 on"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
            raise GgufInvalid(
                f"{self.file.path}: metadata key {self.architecture}.{key} is {shown(value)}; allowed: a "
                "positive number"
            )
        return float(value)
