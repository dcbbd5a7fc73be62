"""Whether a prefix is worth restoring: the cold tier's times beside the time to compute the same rows.

Pure: events in, plain values out.

A prefill is measured for short prefixes alone. For a longer one `recompute_ms` is that of the longest
measured in proportion to the tokens, and ``estimated``: attention makes it take longer than that, so the
comparison leans towards computing.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvtrial.decision.contrasts import digits

_CACHES = {"warm": "restore_warm_ms", "cold": "restore_cold_ms"}


def restore_against_recompute(rows: pd.DataFrame, prefix_tokens: int) -> dict[str, Any]:
    """Medians by prefix, and from which prefix on a restore is the faster of the two.

    Parameters
    ----------
    rows : DataFrame
        Events of the stage ``cold_tier``.
    prefix_tokens : int
        The registered prefix; its rows may carry context 0.

    Returns
    -------
    dict
        ``recompute``: by prefix ``context``, ``recompute_ms`` and whether it is ``estimated``, and
        ``restore_ms`` by store and page cache. ``break_even_tokens``: by store and page cache the
        smallest measured prefix from which on every restore is faster, or None.
    """
    times = rows.assign(context=rows["context"].replace(0, prefix_tokens))
    computed = _medians(times, "recompute", "recompute_ms")
    if not computed:
        return {"recompute": [], "break_even_tokens": {}}
    restored = {
        store: {cache: _medians(times, store, metric) for cache, metric in _CACHES.items()}
        for store in ("Z1", "Z2")
    }
    contexts = sorted(
        {*computed} | {n for caches in restored.values() for by in caches.values() for n in by}
    )
    longest = max(computed)
    table = [
        {
            "context": n,
            "recompute_ms": digits(computed.get(n, computed[longest] * n / longest)),
            "estimated": n not in computed,
            "restore_ms": {
                store: {cache: digits(by[n]) if n in by else None for cache, by in caches.items()}
                for store, caches in restored.items()
            },
        }
        for n in contexts
    ]
    return {
        "recompute": table,
        "break_even_tokens": {
            store: {cache: _break_even(table, store, cache) for cache in _CACHES}
            for store in restored
        },
    }


def _medians(rows: pd.DataFrame, candidate: str, metric: str) -> dict[int, float]:
    own = rows[(rows["candidate"] == candidate) & (rows["metric"] == f"cold/{metric}")]
    return {int(str(n)): float(v.median()) for n, v in own.groupby("context")["value"]}


def _break_even(table: list[dict[str, Any]], store: str, cache: str) -> int | None:
    found = None
    for row in reversed(table):
        ms = row["restore_ms"][store][cache]
        if ms is not None and ms > row["recompute_ms"]:
            break
        if ms is not None:
            found = int(row["context"])
    return found
