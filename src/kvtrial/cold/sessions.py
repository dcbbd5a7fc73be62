"""What a session gives to a spill, and what it has to be for one or for a restore."""

from __future__ import annotations

import numpy as np

from kvtrial.cold.disk import Buffer
from kvtrial.cold.errors import IdentityMismatch
from kvtrial.cold.keys import Identity, PageKey
from kvtrial.cold.page import Page, PageMeta, content_address, flat, packed
from kvtrial.contract import Bool, InvalidArgument, KVSession, StepIncomplete, spec_behind

#: What can be seen of an `Identity` at a session's store.
_SEEN = ("page_format", "page_tokens", "layers", "kv_heads", "head_dim", "base_position",
         "kv_head_range")  # fmt: skip


def refuse_other(session: KVSession, identity: Identity) -> None:
    """`IdentityMismatch` for a session whose pages are of another form."""
    spec_behind(session)
    theirs = Identity.of(
        session.store,
        model_sha256=identity.model_sha256,
        rope_base=identity.rope_base,
        activations=identity.activations,
    )
    for name in _SEEN:
        ours, given = getattr(identity, name), getattr(theirs, name)
        if ours != given:
            raise IdentityMismatch(
                f"the session's {name} is {given!r}, the cold store was opened for {ours!r}; "
                "open it with Identity.of(session.store, ...)"
            )


def validity(session: KVSession, identity: Identity, n_tokens: int) -> Bool:
    """bool (L, rows) of a session, where each layer's bitmap ends at its last valid row."""
    base = identity.base_position
    layers = [session.valid(layer) for layer in range(identity.layers)]
    rows = max(len(v) for v in layers)
    if not session.position_holes_allowed and any(len(v) != rows for v in layers):
        raise StepIncomplete(
            f"the layers hold {sorted({len(v) for v in layers})} rows; finish or abandon the step, "
            "then spill"
        )
    # Holes at the end shorten a session's length, so with holes there may be more tokens than rows.
    fits = n_tokens - base >= rows if session.position_holes_allowed else n_tokens - base == rows
    if not fits or n_tokens <= base:
        raise InvalidArgument(
            f"token_ids has {n_tokens} ids, the session {base + rows} positions; give the token of "
            "every position, and at least one row"
        )
    valid = np.zeros((identity.layers, n_tokens - base), bool)
    for layer, bits in enumerate(layers):
        valid[layer, : len(bits)] = bits
    return valid


def take(session: KVSession, index: int, page: PageKey, valid: Bool) -> Page:
    """Page ``index`` of a session, all layers, without a copy; ``valid`` is the whole session's."""
    store = session.store
    start = index * store.spec.page_tokens
    part = valid[:, start : start + len(page.tokens)]
    payload: list[Buffer] = []
    for layer in np.flatnonzero(part.any(axis=1)):
        view = session.page_bytes(int(layer), index)
        if view is None:
            raise InvalidArgument(f"layer {layer} has valid rows in page {index} but no page")
        payload.append(flat(view))
    meta = PageMeta(
        page.parent,
        content_address(payload),
        page.tokens,
        len(part),
        packed(part),
        store.page_nbytes,
    )
    return Page(page.key, meta, payload)
