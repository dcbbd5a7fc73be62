"""How fast this machine is with this model, in a few seconds: what the estimate is made of.

gguf            path of the model
candidates      name to the contexts, in positions, at which it is measured
page_tokens     P
probes          passes of the probes, as registered
baseline        of the parity check
prompts         token ids of its prompts
prefill         store, activations and chunk (positions) that contexts are filled by; null where all of
                them are there
==============  ====================================================================================
=======
``python -m kvtrial.measure.calibrate SPEC.json OUT.json`` with a `CalibrateSpec`.

Nothing is decided from these numbers, which are seconds:

======================  ============================================================================
calibrate/start_s       from the start of the process to its work
calibrate/load_s        loading the model
calibrate/probe_s       one reading of the probes
calibrate/arm_s         opening and filling a candidate's store; ``index``: the context
calibrate/step_s        one step; ``index``: the context
calibrate/attention_s   of that, attention, all layers
calibrate/prompts_s     the baseline's prefill of all prompts, as parity makes it, compared
calibrate/position_s    the same by position
calibrate/prefill_s     a chunk on all CPUs; ``index``: positions filled before
======================  ============================================================================
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from kvtrial import engine
from kvtrial.host import machine
from kvtrial.measure import clock, parity
from kvtrial.measure.child import Row, main, no_collection
from kvtrial.measure.probes import Probes
from kvtrial.measure.specs import CalibrateSpec, Filling, ParitySpec
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of

#: Rounds; the first warms up, the others' mean counts.
STEPS = 3
#: Positions before the second chunk of a prefill.
FILLED = 4096


def measure(spec: CalibrateSpec, note: Callable[[str], None]) -> list[Row]:
    """All rows."""
    start_s = time.time() - psutil.Process().create_time()
    start = time.monotonic()
    model = engine.load(spec.gguf)
    rows = [_row("start_s", start_s), _row("load_s", time.monotonic() - start), _probe(spec)]
    contexts = sorted(set(itertools.chain(*(spec.contexts[name] for name in spec.candidates))))
    # One layer's rows for every layer: what is in them costs nothing more or less.
    snapshot = Snapshot.synthetic({**shape_of(model), "layers": 1}, contexts[-1], seed=0)
    rows += _parity(model, spec, note)
    if spec.prefill is not None:
        rows += _prefill(model, snapshot, spec.prefill, spec.page_tokens)
    for context in contexts:
        names = [name for name in spec.candidates if context in spec.contexts[name]]
        rows += _round(model, names, snapshot.first(context), spec, note)
    return rows


def _row(name: str, seconds: float, **columns: Any) -> Row:
    return {"metric": f"calibrate/{name}", "value": seconds, **columns}


def _probe(spec: CalibrateSpec) -> Row:
    probe = Probes(1, **spec.probes)
    start = time.monotonic()
    probe.measure()
    spent = time.monotonic() - start
    probe.close()
    return _row("probe_s", spent)


def _round(
    model: Any,
    names: list[str],
    snapshot: Snapshot,
    spec: CalibrateSpec,
    note: Callable[[str], None],
) -> list[Row]:
    """A few rounds of all arms at one context, as many open at once as memory holds."""
    rows: list[Row] = []
    decoder = model.decoder(threads=1, activations="quantised")
    token = np.zeros(1, np.int64)
    with contextlib.ExitStack() as stack, no_collection():
        arms = {}
        for name in names:
            note(name)
            start = time.monotonic()
            try:
                _, (session,) = stack.enter_context(
                    opened(
                        name,
                        shape_of(model),
                        tokens=snapshot.tokens + STEPS,
                        page_tokens=spec.page_tokens,
                    )
                )
            except machine.NotEnoughMemory:
                break  # those that are left are taken for as fast as at another context
            fill(session, snapshot)
            arms[name] = session
            at = {"candidate": name, "index": snapshot.tokens}
            rows.append(_row("arm_s", time.monotonic() - start, **at))
        times: dict[str, list[tuple[int, int]]] = {name: [] for name in arms}
        for _ in range(STEPS):
            for name, session in arms.items():
                note(name)
                start_ns = clock.now_ns()
                decoder.step([session], token)
                times[name].append((clock.now_ns() - start_ns, decoder.attention_ns))
    for name, own in times.items():
        step, attention = np.mean(own[1:], axis=0) / 1e9
        at = {"candidate": name, "index": snapshot.tokens}
        rows += [_row("step_s", float(step), **at), _row("attention_s", float(attention), **at)]
    return rows


def _parity(model: Any, spec: CalibrateSpec, note: Callable[[str], None]) -> list[Row]:
    prompts = spec.prompts
    few = ParitySpec(
        gguf=spec.gguf,
        candidates=[],
        snapshot=None,
        texts=prompts,
        reference=spec.baseline,
        positions={},
        chunk=None,
        decode={},
        page_tokens=spec.page_tokens,
        threads=machine.usable_cpus(),
    )
    start = time.monotonic()
    parity.feed(
        model,
        spec.baseline,
        few,
        [len(ids) for ids in prompts],
        0,
        lambda text, first, logits: parity.compare(logits, logits),
        note,
    )
    spent = time.monotonic() - start
    return [_row("prompts_s", spent), _row("position_s", spent / sum(map(len, prompts)))]


def _prefill(model: Any, snapshot: Snapshot, way: Filling, page_tokens: int) -> list[Row]:
    """A chunk into an empty session and one behind a long context: attention makes the difference."""
    chunk = np.ones(way.chunk, np.int64)
    long = min(snapshot.tokens, FILLED)
    # The first one makes threads and buffers.
    _chunk_s(model, snapshot, 0, chunk[:16], way, page_tokens)
    return [
        _row(
            "prefill_s",
            _chunk_s(model, snapshot, filled, chunk, way, page_tokens),
            index=filled,
        )
        for filled in (0, long)
    ]


def _chunk_s(
    model: Any, snapshot: Snapshot, filled: int, ids: Any, way: Filling, page_tokens: int
) -> float:
    """Seconds of prefilling ids on all CPUs, behind so many positions."""
    threads = machine.usable_cpus()
    with opened(
        way.store,
        shape_of(model),
        tokens=filled + len(ids),
        page_tokens=page_tokens,
        threads=threads,
    ) as (_, (session,)):
        fill(session, snapshot, filled)
        start = time.monotonic()
        model.prefill(session, ids, threads=threads, activations=way.activations)
        return time.monotonic() - start


if __name__ == "__main__":
    main(CalibrateSpec, measure, sys.argv)
