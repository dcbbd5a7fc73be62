"""Which pages of a sequence of tokens are stored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvtrial.cold import keys
from kvtrial.cold.errors import KeyCollision
from kvtrial.cold.index import Index
from kvtrial.cold.keys import Identity, PageKey
from kvtrial.cold.page import PageMeta
from kvtrial.contract import I64, Bool

#: Pages that are looked up together; a prefix that ends early costs one such step.
_TOGETHER = 256


class Stored(NamedTuple):
    """A page that is stored."""

    page: PageKey
    meta: PageMeta


def stored(index: Index, chain: Sequence[PageKey]) -> list[Stored]:
    """Those pages of a chain that are stored, each compared with what it is asked for."""
    pages = []
    for page, data in zip(chain, index.get_many("prefix", [p.key for p in chain])):
        if data is None:
            continue
        meta = PageMeta.decode(data)
        if meta.parent != page.parent or meta.tokens.tobytes() != page.tokens.tobytes():
            raise KeyCollision(
                f"key {page.key.hex()[:16]} holds another page's tokens; the stored page is "
                "neither served nor replaced"
            )
        pages.append(Stored(page, meta))
    return pages


def longest(index: Index, identity: Identity, tokens: I64) -> list[Stored]:
    """The longest stored prefix: whole pages, then the longest partial page that follows."""
    chain = keys.chain(identity, tokens)
    pages: list[Stored] = []
    after: PageKey | None = None  # the first page that isn't stored
    while after is None and (step := list(islice(chain, _TOGETHER))):
        here = stored(index, step)
        whole = sum(want.key == have.page.key for want, have in zip(step, here))
        pages += here[:whole]
        after = step[whole] if whole < len(step) else None
    if after is None:
        return pages
    tails = [
        PageKey(keys.next_key(after.parent, part), after.parent, part)
        for n in range(min(len(after.tokens), identity.page_tokens - 1), 0, -1)
        if (part := after.tokens[:n]) is not None
    ]
    return pages + stored(index, tails)[:1]


def refuse_other_holes(
    chain: Sequence[PageKey], present: dict[bytes, PageMeta], valid: Bool
) -> None:
    """`KeyCollision` where a page that is stored has other holes than ``valid`` (L, rows)."""
    start = 0
    for i, page in enumerate(chain):
        stop = start + len(page.tokens)
        meta = present.get(page.key)
        if meta is not None and not np.array_equal(meta.valid, valid[:, start:stop]):
            raise KeyCollision(
                f"page {i} of these tokens is stored with other holes; delete the sequence "
                "that holds it, then spill again"
            )
        start = stop
