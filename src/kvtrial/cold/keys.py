"""Whose pages they are, and the chain of keys that makes equal prefixes meet.

``key(page i) = BLAKE3(key(page i - 1) ‖ rows ‖ tokens of page i)``, and the chain starts from the
digest of the `Identity` and of the tokens before ``base_position``. So a key names the model, the
form of its pages and every token up to the page's end; a partial last page has a key of its own,
since its row count is part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import blake3
import numpy as np

from kvtrial.contract import I64, InvalidArgument, KVStore, StoreSpec
from kvtrial.contract.arguments import integer, integers, shown

#: Raised when kernels begin to store other bytes under the same `KVStore.page_format`.
KERNEL_ABI = 1
#: An identity's whole numbers, and from where on.
_COUNTS = {
    "page_tokens": 1,
    "layers": 1,
    "kv_heads": 1,
    "head_dim": 1,
    "base_position": 0,
    "kernel_abi": 0,
}


def digest(data: bytes) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3.blake3(data).digest()


@dataclass(frozen=True)
class Identity:
    """Everything but the tokens that decides what a page's bytes mean.

    ``page_format`` is `KVStore.page_format` (layout, dtype and P). Two stores whose identities
    differ in any field never see each other's pages.
    """

    model_sha256: str
    page_format: str
    page_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    rope_base: float
    #: How the rows were computed, "quantised" or "fp32": the same tokens give others.
    activations: str
    base_position: int = 0
    kv_head_range: tuple[int, int] | None = None
    kernel_abi: int = KERNEL_ABI

    def __post_init__(self) -> None:
        """`InvalidArgument` for a field of another kind: equal identities have to have one digest."""
        for name in ("model_sha256", "page_format", "activations"):
            if not isinstance(getattr(self, name), str):
                raise InvalidArgument(f"{name} is {shown(getattr(self, name))}; give a str")
        for name, low in _COUNTS.items():
            object.__setattr__(self, name, integer(getattr(self, name), name, low, 2**62))
        if self.kv_head_range is not None:
            bounds = tuple(integers(self.kv_head_range, "kv_head_range").tolist())
            object.__setattr__(self, "kv_head_range", bounds)
        base = self.rope_base
        if isinstance(base, bool) or not isinstance(base, (int, float, np.integer, np.floating)):
            raise InvalidArgument(f"rope_base is {shown(base)}; give a number")
        try:
            number = float(base)
        except OverflowError:  # of an integer
            number = np.inf
        if not 0 < number < np.inf:
            raise InvalidArgument(f"rope_base is {shown(base)}; allowed: finite and above 0")
        object.__setattr__(self, "rope_base", number)

    @classmethod
    def of(
        cls, store: KVStore, *, model_sha256: str, rope_base: float, activations: str
    ) -> Identity:
        """The identity of what ``store`` holds for a model, whose rows ``activations`` computed."""
        spec = getattr(store, "spec", None)
        if not isinstance(spec, StoreSpec):
            raise InvalidArgument(f"store is {shown(store)}; give what open_store returns")
        return cls(
            model_sha256=model_sha256,
            page_format=store.page_format,
            page_tokens=spec.page_tokens,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            rope_base=rope_base,
            activations=activations,
            base_position=spec.base_position,
            kv_head_range=spec.kv_head_range,
        )

    def digest(self) -> bytes:
        """32 bytes that change with any field."""
        return digest(json.dumps(asdict(self), sort_keys=True).encode())


def as_tokens(token_ids: Any) -> I64:
    """Token ids as int64 (n,); `InvalidArgument` for anything that is not a list of ids >= 0."""
    tokens = integers(token_ids, "token_ids")
    if len(tokens) == 0:
        return tokens
    if tokens.min() < 0 or tokens.max() >= 2**31:
        raise InvalidArgument(
            f"token_ids holds {tokens.min()} to {tokens.max()}; ids lie in [0, 2**31)"
        )
    return tokens.astype(np.int64)


def next_key(parent: bytes, tokens: I64) -> bytes:
    """The key of the page that holds ``tokens`` and follows the page of key ``parent``."""
    rows = tokens.astype("<i8", copy=False)
    return digest(parent + len(rows).to_bytes(4, "little") + rows.tobytes())


class PageKey(NamedTuple):
    """One page of a prefix: its key, its parent's, and its own tokens (rows,) int64."""

    key: bytes
    parent: bytes
    tokens: I64


def chain(identity: Identity, tokens: I64) -> Iterator[PageKey]:
    """The pages of ``tokens``, the last one partial where the count isn't a multiple of P."""
    base, p = identity.base_position, identity.page_tokens
    parent = digest(identity.digest() + tokens[:base].astype("<i8").tobytes())
    for start in range(base, len(tokens), p):
        part = tokens[start : start + p]
        page = PageKey(next_key(parent, part), parent, part)
        yield page
        parent = page.key
