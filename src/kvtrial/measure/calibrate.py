"""How fast this machine is with this model, in a few seconds: what the estimate is made of.

``python -m kvtrial.measure.calibrate SPEC.json OUT.json`` with SPEC: gguf, candidates, contexts (a
short and a long one, in positions), page_tokens, baseline. Nothing is decided from these numbers.

Rows are seconds: ``calibrate/prefill_s`` of the short context on all CPUs; ``calibrate/fill_s``,
``step_s`` and ``attention_s`` (of one step, all layers) for each candidate and context, which is the
column ``index``; ``calibrate/exact_step_s``, a step of the baseline with FP32 activations.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtrial import machine, models
from kvtrial.measure import clock
from kvtrial.measure.child import Row, Spec, failed_row, main
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of

#: The first step warms up; the faster of the others counts.
STEPS = 3


def measure(spec: Spec, note: Callable[[str], None]) -> list[Row]:
    """All rows."""
    start = time.monotonic()
    model = models.load_model(spec["gguf"])
    rows: list[Row] = [{"metric": "calibrate/load_s", "value": time.monotonic() - start}]
    shape = shape_of(model)
    short, long = spec["contexts"]
    rows.append(_prefill(model, shape, spec, short))
    # One layer's rows for every layer: what is in them costs nothing more or less.
    snapshot = Snapshot.synthetic({**shape, "layers": 1}, long, seed=0)
    for name in spec["candidates"]:
        note(name)
        try:
            for context in (short, long):
                rows += _arm(model, shape, name, snapshot, context, spec)
        except Exception as error:
            rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
    return rows


def _prefill(model: Any, shape: dict[str, int], spec: Spec, tokens: int) -> Row:
    threads = machine.usable_cpus()
    where = {"tokens": tokens, "page_tokens": spec["page_tokens"], "threads": threads}
    with opened(spec["prefill_store"], shape, **where) as (_, (session,)):
        start = clock.now_ns()
        model.prefill(session, np.ones(tokens, np.int64), threads=threads)
        spent = clock.elapsed_ns(start, clock.now_ns(), "prefill")
    return {"metric": "calibrate/prefill_s", "index": tokens, "value": spent / 1e9}


def _arm(
    model: Any, shape: dict[str, int], name: str, snapshot: Snapshot, context: int, spec: Spec
) -> list[Row]:
    found: dict[str, float] = {}
    where = {"tokens": context + 2 * STEPS, "page_tokens": spec["page_tokens"]}
    with opened(name, shape, **where) as (_, (session,)):
        start = clock.now_ns()
        fill(session, snapshot, context)
        found["fill_s"] = clock.elapsed_ns(start, clock.now_ns(), "fill") / 1e9
        found["step_s"], found["attention_s"] = _step(model, session, "quantised")
        if name == spec["baseline"]:
            found["exact_step_s"], _ = _step(model, session, "fp32")
    return [
        {"candidate": name, "metric": f"calibrate/{key}", "index": context, "value": value}
        for key, value in found.items()
    ]


def _step(model: Any, session: Any, activations: str) -> tuple[float, float]:
    """Seconds of the fastest step after the first, and of its attention."""
    decoder = model.decoder(threads=1, activations=activations, batch=1)
    ids = np.zeros(1, np.int64)
    times: list[tuple[float, float]] = []
    for index in range(STEPS):
        start = clock.now_ns()
        decoder.step([session], ids)
        spent = clock.elapsed_ns(start, clock.now_ns(), f"step {index}")
        times.append((spent / 1e9, decoder.attention_ns / 1e9))
    return min(times[1:])


if __name__ == "__main__":
    main(measure, sys.argv)
