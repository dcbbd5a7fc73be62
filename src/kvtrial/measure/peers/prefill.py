"""Prefill by our engine: the time from a prompt to the logits after it.

``python -m kvtrial.measure.peers.prefill SPEC.json OUT.json`` with a `PrefillSpec`.

A few tokens are prefilled first and forgotten: they bring weights and code into memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from kvtrial import engine
from kvtrial.measure import clock
from kvtrial.measure.child import Row, failed_row, main, no_collection
from kvtrial.measure.specs import PrefillSpec
from kvtrial.measure.stores import opened, shape_of

WARMUP_TOKENS = 32


def measure(spec: PrefillSpec, note: Callable[[str], None]) -> list[Row]:
    """The time that each candidate takes for the prompt."""
    model = engine.load(spec.gguf)
    ids, threads = spec.ids, spec.threads

    def arm(name: str) -> int:
        with opened(
            name,
            shape_of(model),
            tokens=len(ids),
            sessions=2,
            page_tokens=spec.page_tokens,
            threads=threads,
        ) as (_, (warm, session)):
            model.prefill(warm, ids[:WARMUP_TOKENS], threads=threads)
            return timed(lambda: model.prefill(session, ids, threads=threads))

    return each(spec, note, arm)


def each(spec: PrefillSpec, note: Callable[[str], None], arm: Callable[[str], int]) -> list[Row]:
    """Rows of ``arm(name)``, nanoseconds, for every candidate; one that raises costs its own row."""
    rows: list[Row] = []
    for place, name in enumerate(spec.candidates):
        note(name)
        columns = {"candidate": name, "place": place}
        try:
            rows.append({**columns, "metric": "prefill/ms", "value": arm(name) / 1e6})
        except Exception as error:
            rows.append({**columns, "metric": "failed", "text": failed_row(error)})
    return rows


def timed(work: Callable[[], object]) -> int:
    """Nanoseconds of ``work``."""
    with no_collection():
        start = clock.now_ns()
        work()
        return clock.elapsed_ns(start, clock.now_ns(), "prefill")


if __name__ == "__main__":
    main(PrefillSpec, measure, sys.argv)
