"""Decode by llama.cpp: the work of `kvtrial.measure.block`, and its SPEC, for arms of `PEERS`.

``python -m kvtrial.measure.peers.llama_decode SPEC.json OUT.json``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kvtrial.measure import clock
from kvtrial.measure.child import Row, Spec, failed_row, main, no_collection
from kvtrial.measure.peers import llama
from kvtrial.measure.stores import Snapshot


def measure(spec: Spec, note: Callable[[str], None]) -> list[Row]:
    """Step times of every arm."""
    snapshot = Snapshot.open(spec["snapshots"][0])
    rows: list[Row] = []
    for place, arm in enumerate(spec["candidates"]):
        note(arm)
        columns = {"candidate": arm, "place": place}
        try:
            rows += _arm(arm, snapshot, spec, columns)
        except Exception as error:
            rows.append({**columns, "metric": "failed", "text": failed_row(error)})
    return rows


def _arm(arm: str, snapshot: Snapshot, spec: Spec, columns: dict[str, Any]) -> list[Row]:
    warmup = spec["rotation"]["warmup_rounds"]
    steps = warmup + spec["rounds"]
    room = snapshot.tokens + steps
    times: list[int] = []
    with llama.opened(spec["gguf"], arm, room, spec["threads"]) as context:
        context.fill(snapshot.k, snapshot.v)
        with no_collection():
            for index, token in enumerate(snapshot.forced[:steps].tolist()):
                start = clock.now_ns()
                context.eval([token]).argmax()  # a step picks its token, and is fed the text's
                stop = clock.now_ns()
                times.append(clock.elapsed_ns(start, stop, f"decode step {index}"))
    return [
        {**columns, "metric": "m2/step_ms", "index": index, "value": spent / 1e6}
        for index, spent in enumerate(times[warmup:])
    ]


if __name__ == "__main__":
    main(measure, sys.argv)
