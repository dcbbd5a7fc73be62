"""Model families as data: what distinguishes the layers of one from another's.

Decode step and prefill read the same record, and so does the reference in the tests: a family that differs
only in what is here is one more line of `ARCHITECTURES`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer of pre-norm layers: attention, then a gated feed-forward.

    Attributes
    ----------
    name : str
        ``general.architecture`` of its GGUF files, and the prefix of their keys.
    halves : bool
        RoPE pairs are (i, i + head_dim / 2); else neighbours (2i, 2i + 1), as GGUF permutes llama's rows.
    qkv_bias : bool
        Biases after Q, K and V.
    qk_norm : bool
        RMSNorm of each head of Q and K, before RoPE.
    gelu : bool
        The gate goes through GELU (its tanh form); else through SiLU.
    scaled_embedding : bool
        Embeddings are multiplied by the square root of the hidden size.
    """

    name: str
    halves: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    gelu: bool = False
    scaled_embedding: bool = False


#: Name → record. What each has is llama.cpp's reading of the family's files.
ARCHITECTURES = {
    family.name: family
    for family in (
        Architecture("llama", halves=False),
        Architecture("qwen2", qkv_bias=True),
        Architecture("qwen3", qk_norm=True),
        Architecture("gemma", gelu=True, scaled_embedding=True),
    )
}
