"""Counts allocation calls inside the store calls of a decode step: a pass of its own, never timed.

``python -m kvtrial.measure.allocation_pass SPEC.json OUT.json`` with an `AllocationSpec`. Started with
`kvtrial.measure.allocations.preload_environment`, or it can't count and says so in a text row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from kvtrial.measure import allocations
from kvtrial.measure.child import Row, failed_row, main
from kvtrial.measure.specs import AllocationSpec
from kvtrial.measure.stores import opened


def measure(spec: AllocationSpec, note: Callable[[str], None]) -> list[Row]:
    """``m2/allocations`` of each step and candidate, over all threads."""
    rows: list[Row] = []
    for name in spec.candidates:
        note(name)
        if not allocations.available():
            text = "not available: the counter needs Linux and glibc"
            rows.append({"candidate": name, "metric": "m2/allocations", "text": text})
            continue
        try:
            counts = count_steps(name, spec)
        except Exception as error:
            rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
            continue
        rows += [
            {"candidate": name, "metric": "m2/allocations", "index": i, "value": float(count)}
            for i, count in enumerate(counts)
        ]
    return rows


def count_steps(name: str, spec: AllocationSpec) -> list[int]:
    """Allocation calls in each of ``steps`` steps: append and attend in every layer.

    The first step warms up what is made once (the interpreter's caches, a thread pool) and is left
    out. The steps go over at least one page's end, where a pool takes a page.
    """
    shape = spec.shape
    steps = spec.steps
    draw = np.random.default_rng(1)
    row = draw.standard_normal((2, 1, shape["kv_heads"], shape["head_dim"]), np.float32)
    q = draw.standard_normal((shape["q_heads"], shape["head_dim"]), np.float32)
    out = np.empty_like(q)
    scale = float(shape["head_dim"]) ** -0.5
    k, v = row
    counts: list[int] = []
    with opened(
        name,
        shape,
        tokens=steps + 1,
        page_tokens=spec.page_tokens,
        threads=spec.threads,
    ) as (_, (session,)):
        for step in range(steps + 1):
            position = np.array([step], np.int64)
            count = 0
            for layer in range(shape["layers"]):
                count += _calls(session.append, layer, position, k, v)
                count += _calls(session.attend, layer, q, out, scale)
            if step:
                counts.append(count)
    return counts


def _calls(verb: Callable[..., None], *args: object) -> int:
    count = allocations.count_calls(verb, *args, every_thread=True)
    assert count is not None  # measure() asked before
    return count


if __name__ == "__main__":
    main(AllocationSpec, measure, sys.argv)
