"""Models of registered sizes with seeded random weights, for machines without the real ones.

The weights come from integers of PCG64's raw stream, which NumPy keeps stable, and two scales per
tensor, so a file is the same bytes on every machine. The tokenizer in it is a working byte-level one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial.contract import InvalidArgument
from kvtrial.contract.arguments import integer, shown
from kvtrial.engine.architecture import ARCHITECTURES
from kvtrial.engine.config import Keys
from kvtrial.engine.gguf import STRINGS, GgufFile, TensorToWrite, write_gguf
from kvtrial.engine.kinds import QK, TensorKind
from kvtrial.engine.tokenizer import CONTROL, byte_tokens

U8 = npt.NDArray[np.uint8]

#: Metadata key that marks a file made here.
SYNTHETIC_KEY = "kvtrial.synthetic"

_PRE_TOKENIZER = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2", "gemma": "smollm"}
_MERGES = ("Ġ t", "h e", "i n", "r e", "o n", "e r", "Ġ a", "Ġt he", "a n", "e n", "Ġ s", "o r")
_NORMAL, _UNUSED = 1, 5
_KINDS = ("Q8_0", "Q4_1")
_LEAST_VOCAB = 256 + len(_MERGES) + 1
_CHUNK_BLOCKS = 1 << 17
#: Between the bits of a weight in Q4_1 and in Q8_0.
_BITS_BETWEEN = (20 + 34) * 8 / 2 / QK


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a synthetic model, as in the architecture's own configuration.

    ``kind`` is the format of the matrices, ``Q8_0`` or ``Q4_1``; ``vocab`` at least 269. ``width`` is that of the
    residual stream where it is another than query heads times head_dim.
    """

    architecture: str
    kind: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_base: float
    seed: int
    width: int | None = None

    def __post_init__(self) -> None:
        """`InvalidArgument` for a family or format that is not made, and for a size that no model has."""
        for name, allowed in (("architecture", ARCHITECTURES), ("kind", _KINDS)):
            if getattr(self, name) not in list(allowed):
                raise InvalidArgument(
                    f"{name} is {shown(getattr(self, name))}; allowed: {', '.join(allowed)}"
                )
        for name in ("layers", "q_heads", "kv_heads", "head_dim", "ffn", "context"):
            integer(getattr(self, name), name, 1)
        integer(self.vocab, "vocab", _LEAST_VOCAB)
        integer(self.seed, "seed", 0)
        for name in ("hidden", "ffn", "q_rows"):
            if getattr(self, name) % QK:
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)}; {self.kind} has blocks of {QK}: give a multiple of it"
                )

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.q_rows if self.width is None else self.width

    @property
    def q_rows(self) -> int:
        """Elements of all query heads."""
        return self.q_heads * self.head_dim


def sizes_like(file: GgufFile) -> ModelSizes:
    """Sizes of a model whose decode reads as much as that of the file: any file's, also of a family, of tensor
    types or of a tokenizer that do not run. A family that is not known is taken for a ``llama``.

    Raises
    ------
    GgufInvalid
        A key of the shape is missing or no number.
    InvalidArgument
        Sizes that have no whole blocks.
    """
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    shapes |= {name: tensor.shape for name, tensor in file.strange.items()}
    weights = sum(map(math.prod, shapes.values()))
    family = str(file.metadata.get("general.architecture"))
    read = Keys(file, family)
    q_heads, width = read.integer("attention.head_count"), read.integer("embedding_length")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    rows = len(tokens) if isinstance(tokens, STRINGS) else shapes.get("token_embd.weight", (0,))[0]
    return ModelSizes(
        architecture=family if family in ARCHITECTURES else "llama",
        # Whichever has about as many bytes a weight.
        kind="Q4_1" if 8 * file.size < _BITS_BETWEEN * weights else "Q8_0",
        layers=read.integer("block_count"),
        q_heads=q_heads,
        kv_heads=read.integer("attention.head_count_kv", q_heads),
        head_dim=read.integer("attention.key_length", width // q_heads),
        ffn=read.integer("feed_forward_length"),
        vocab=max(rows, _LEAST_VOCAB),
        context=read.integer("context_length"),
        rope_base=read.number("rope.freq_base", 10000.0),
        seed=0,
        width=width,
    )


def is_synthetic(file: GgufFile) -> bool:
    """Whether the file was made here: its weights are random."""
    return file.metadata.get(SYNTHETIC_KEY) is True


def write_synthetic(path: str | Path, name: str, sizes: ModelSizes) -> None:
    """Write a GGUF of ``sizes``, tied output; what the family has beside: biases, norms of heads."""
    write_gguf(path, _metadata(name, sizes), list(_tensors(sizes)))


def _metadata(name: str, sizes: ModelSizes) -> dict[str, Any]:
    arch = sizes.architecture
    joined = [merge.replace(" ", "") for merge in _MERGES]
    tokens = [*byte_tokens(), *joined]
    filler = sizes.vocab - len(tokens) - 1
    types = [_NORMAL] * len(tokens) + [_UNUSED] * filler + [CONTROL]
    tokens += [f"[unused{i}]" for i in range(filler)] + ["<|endoftext|>"]
    own = {} if sizes.width is None else {f"{arch}.attention.key_length": sizes.head_dim}
    return own | {
        "general.architecture": arch,
        "general.name": name,
        SYNTHETIC_KEY: True,
        f"{arch}.block_count": sizes.layers,
        f"{arch}.context_length": sizes.context,
        f"{arch}.embedding_length": sizes.hidden,
        f"{arch}.feed_forward_length": sizes.ffn,
        f"{arch}.attention.head_count": sizes.q_heads,
        f"{arch}.attention.head_count_kv": sizes.kv_heads,
        f"{arch}.rope.freq_base": float(sizes.rope_base),
        f"{arch}.rope.dimension_count": sizes.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.vocab_size": sizes.vocab,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _PRE_TOKENIZER[arch],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.eos_token_id": sizes.vocab - 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def _tensors(sizes: ModelSizes) -> Iterator[TensorToWrite]:
    hidden, ffn, family = sizes.hidden, sizes.ffn, ARCHITECTURES[sizes.architecture]
    kv = sizes.kv_heads * sizes.head_dim
    # A stream of its own per tensor: matrices are drawn as they are written, biases at once.
    streams = (np.random.PCG64([sizes.seed, i]) for i in itertools.count())
    kind = TensorKind[sizes.kind]

    def matrix(name: str, rows: int, cols: int) -> TensorToWrite:
        chunks = _random_blocks(next(streams), kind, rows * cols // QK, cols)
        return TensorToWrite(f"{name}.weight", kind, (rows, cols), chunks)

    def vector(name: str, values: npt.NDArray[Any]) -> TensorToWrite:
        return TensorToWrite(name, TensorKind.F32, values.shape, [values.astype("<f4").tobytes()])

    def small(size: int) -> npt.NDArray[np.float32]:
        integers = next(streams).random_raw(size).astype("<u8").view(np.int8)[:size]
        return integers.astype(np.float32) / np.float32(256)

    ones = np.ones(hidden, np.float32)
    yield matrix("token_embd", sizes.vocab, hidden)
    yield vector("output_norm.weight", ones)
    for layer in range(sizes.layers):
        block = f"blk.{layer}"
        yield vector(f"{block}.attn_norm.weight", ones)
        yield vector(f"{block}.ffn_norm.weight", ones)
        for part, rows in (("attn_q", sizes.q_rows), ("attn_k", kv), ("attn_v", kv)):
            yield matrix(f"{block}.{part}", rows, hidden)
            if family.qkv_bias:
                yield vector(f"{block}.{part}.bias", small(rows))
        for part in ("attn_q", "attn_k") if family.qk_norm else ():
            yield vector(f"{block}.{part}_norm.weight", 1 + small(sizes.head_dim))
        yield matrix(f"{block}.attn_output", hidden, sizes.q_rows)
        yield matrix(f"{block}.ffn_gate", ffn, hidden)
        yield matrix(f"{block}.ffn_up", ffn, hidden)
        yield matrix(f"{block}.ffn_down", hidden, ffn)


def _random_blocks(
    stream: np.random.PCG64, kind: TensorKind, blocks: int, cols: int
) -> Iterator[bytes]:
    """Quantised blocks whose matrix keeps a unit vector's size: weights have variance 1 / cols."""
    payload_bytes = {TensorKind.Q8_0: 32, TensorKind.Q4_1: 16}[kind]
    if kind is TensorKind.Q8_0:  # uniform over 256 levels
        head = [math.sqrt(12 / (256**2 - 1) / cols)]
    else:  # uniform over 16 levels, centred by the block's minimum
        scale = math.sqrt(12 / (16**2 - 1) / cols)
        head = [scale, -7.5 * scale]
    scales = np.array(head, "<f2").view(np.uint8)
    for start in range(0, blocks, _CHUNK_BLOCKS):
        count = min(_CHUNK_BLOCKS, blocks - start)
        raw = stream.random_raw(count * payload_bytes // 8).astype("<u8")
        out = np.empty((count, kind.block_bytes), np.uint8)
        out[:, : scales.size] = scales
        out[:, scales.size :] = raw.view(np.uint8).reshape(count, payload_bytes)
        yield out.tobytes()
