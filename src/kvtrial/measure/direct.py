"""Direct write: the same decode with rows written into the cache, and by way of scratch and append.

``python -m kvtrial.measure.direct SPEC.json OUT.json`` with the SPEC of `kvtrial.measure.block` and
``direct_first``, which way runs first in this block (it alternates).

The engine reserves a slot where the store hands one out and falls back to scratch and append where
it doesn't. The warm-up steps run through `Watched`, which counts the way that the rows really took;
the counted steps run on the session itself.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtrial import engine
from kvtrial.candidates import get
from kvtrial.contract import F32, Capability, KVSession
from kvtrial.measure import clock
from kvtrial.measure.child import Row, Spec, failed_row, main, no_collection
from kvtrial.measure.probes import Probes
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of
from kvtrial.measure.surroundings import Bracket, reading_rows


class Watched:
    """A session that counts how its rows come in."""

    def __init__(self, session: KVSession) -> None:
        self._session = session
        self.reserved_rows = 0
        self.appended_rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def reserve_slot(self, layer: int, positions: Any) -> tuple[F32, F32] | None:
        """The session's slot, counted where there is one."""
        views = self._session.reserve_slot(layer, positions)
        if views is not None:
            self.reserved_rows += len(positions)
        return views

    def append(self, layer: int, positions: Any, k: F32, v: F32) -> None:
        """Append, counted."""
        self.appended_rows += len(positions)
        self._session.append(layer, positions, k, v)


def measure(spec: Spec, note: Callable[[str], None]) -> list[Row]:
    """All rows of the block."""
    model = engine.load(spec["gguf"])
    snapshot = Snapshot.open(spec["snapshots"][0])
    probe = Probes(spec["threads"], **spec.get("probes", {}))
    # Twice at the block's ends, as between two arms: see `gates.readings`.
    rows = reading_rows(probe, 0, place=0)
    for place, name in enumerate(spec["candidates"]):
        note(name)
        columns = {"candidate": name, "place": place}
        try:
            with Bracket(probe, **columns) as bracket:
                found = _both_ways(model, name, snapshot, spec, columns)
            rows += bracket.rows + found
        except Exception as error:
            rows.append({**columns, "metric": "failed", "text": failed_row(error)})
    return rows + reading_rows(probe, 1, place=len(spec["candidates"]) - 1)


def _both_ways(
    model: Any, name: str, snapshot: Snapshot, spec: Spec, columns: dict[str, Any]
) -> list[Row]:
    rows: list[Row] = []
    outputs: dict[str, str] = {}
    has_slots = Capability.RESERVE_SLOT in get(name).capabilities
    for way in ("direct", "append") if spec["direct_first"] else ("append", "direct"):
        times, watched, outputs[way] = _decode(model, name, snapshot, spec, way == "direct")
        if way == "direct":
            share = watched.reserved_rows / (watched.reserved_rows + watched.appended_rows)
            row_bytes = 4 * 2 * model.config.kv_heads * model.config.head_dim
            saved = row_bytes * watched.reserved_rows / spec["warmup_steps"]
            rows.append({**columns, "metric": "direct/reserved_share", "value": share})
            rows.append({**columns, "metric": "direct/bytes_not_copied", "value": saved})
        if has_slots:  # else both ways are one, and there is nothing to compare
            rows += [
                {**columns, "metric": "direct/step_ms", "index": i, "value": t / 1e6, "text": way}
                for i, t in enumerate(times)
            ]
    same = float(outputs["direct"] == outputs["append"])
    rows.append({**columns, "metric": "direct/identical", "value": same})
    return rows


def _decode(
    model: Any, name: str, snapshot: Snapshot, spec: Spec, direct: bool
) -> tuple[list[int], Watched, str]:
    """Times in ns of the counted steps, the watched warm-up, and a hash over logits and cache."""
    warmup, steps = spec["warmup_steps"], spec["warmup_steps"] + spec["decode_steps"]
    with opened(
        name,
        shape_of(model),
        tokens=snapshot.tokens + steps,
        page_tokens=spec["page_tokens"],
        threads=spec["threads"],
    ) as (store, (session,)):
        fill(session, snapshot)
        watched = Watched(session)
        decoder = model.decoder(threads=spec["threads"], direct=direct)
        ids = np.array([snapshot.next_id], np.int64)
        digest = hashlib.sha256()
        times: list[int] = []
        with no_collection():
            for index in range(steps):
                running = [watched if index < warmup else session]
                start = clock.now_ns()
                logits = decoder.step(running, ids)
                ids = logits.argmax(axis=1)
                stop = clock.now_ns()
                if index >= warmup:
                    times.append(clock.elapsed_ns(start, stop, f"decode step {index}"))
                digest.update(logits.tobytes())
        new = np.arange(snapshot.tokens, snapshot.tokens + steps, dtype=np.int64)
        for layer in range(store.spec.layers):
            for rows in session.read(layer, new):
                digest.update(rows.tobytes())
        return times, watched, digest.hexdigest()


if __name__ == "__main__":
    main(measure, sys.argv)
