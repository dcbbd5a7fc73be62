"""Sequences of two pages in a cold store: what its tests spill, restore and damage."""

from __future__ import annotations

import numpy as np

from kvtrial.cold import open_cold

P = 16


def tokens(n, first=0):
    return np.arange(n) + 1000 * first


def spilled(kind, folder, store, *firsts):
    with open_cold(kind, folder, store.identity()) as cold:
        for first in firsts:
            cold.spill(store.filled(2 * P, seed=first), tokens(2 * P, first), batch_pages=1)


def restored(cold, store, first):
    back = store.open_session()
    rows = cold.restore(tokens(2 * P, first), back)
    want = [layer[: rows // P] for layer in store.filled(2 * P, seed=first).contents()]
    assert back.contents() == (want if rows else [[], []])
    return rows


def damage(file, of):
    """Flip a bit in the middle of the bytes ``of``."""
    data = bytearray(file.read_bytes())
    at = data.index(of) + len(of) // 2
    data[at] ^= 1
    file.write_bytes(data)
