"""M2: one block, a fresh process in which every candidate runs its whole decode, one after another.

``python -m kvtrial.measure.block SPEC.json OUT.json`` with SPEC:

==============  ====================================================================================
gguf            path of the model
candidates      names, in the order of this block
stands_for      name to the candidate that it stands for, where that is another (A/A); optional
baseline        the candidate whose tokens the others' are compared with; optional
snapshots       folders of the filled contexts, one a session
threads         threads of decoder and stores
page_tokens     P
warmup_steps    decoded and dropped before the counted ones
decode_steps    counted greedy steps
seed            of the order in which a pool hands out its pages
probes          passes of the probes, as registered; null where the machine is not probed; optional
check           whether attention is held against the oracle after the last step; optional
==============  ====================================================================================

A candidate that raises costs its own rows only. Tokens are compared when all arms are done: timing
counts only for an arm that gave the baseline's, up to a tie.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtrial import engine, reference
from kvtrial.candidates import get
from kvtrial.contract import Capability, KVSession, KVStore, Profile
from kvtrial.measure import clock
from kvtrial.measure.child import Row, Spec, failed_row, main, no_collection
from kvtrial.measure.probes import Probes
from kvtrial.measure.stores import Snapshot, fill, opened, row_at, shape_of
from kvtrial.measure.surroundings import Bracket, reading_rows

COST_REPETITIONS = 16


def measure(spec: Spec, note: Callable[[str], None]) -> list[Row]:
    """All rows of the block."""
    model = engine.load(spec["gguf"])
    snapshots = [Snapshot.open(folder) for folder in spec["snapshots"]]
    passes = spec.get("probes", {})
    probe = None if passes is None else Probes(spec["threads"], **passes)
    rows: list[Row] = []
    outputs: dict[str, Decoded] = {}
    # Between two arms the machine is read twice, so at the block's ends too: see `gates.readings`.
    if probe is not None:
        rows += reading_rows(probe, 0, place=0)
    for place, name in enumerate(spec["candidates"]):
        note(name)
        columns = {"candidate": name, "place": place}
        try:
            found, outputs[name] = run_arm(model, name, snapshots, spec, probe, columns)
            rows += found
        except Exception as error:
            rows.append({**columns, "metric": "failed", "text": failed_row(error)})
    if probe is not None:
        rows += reading_rows(probe, 1, place=len(spec["candidates"]) - 1)
    baseline = outputs.get(spec.get("baseline", ""))
    if baseline is not None:
        for name, decoded in outputs.items():
            rows += decoded.compared(baseline, {"candidate": name})
    return rows


def run_arm(
    model: Any,
    name: str,
    snapshots: list[Snapshot],
    spec: Spec,
    probe: Probes | None,
    columns: dict[str, Any],
) -> tuple[list[Row], Decoded]:
    """One candidate's decode and its costs; the decode alone where the machine is not probed."""
    name = spec.get("stands_for", {}).get(name, name)
    steps = spec["warmup_steps"] + spec["decode_steps"]
    with opened(
        name,
        shape_of(model),
        tokens=snapshots[0].tokens + steps,
        sessions=len(snapshots),
        page_tokens=spec["page_tokens"],
        threads=spec["threads"],
        page_seed=spec["seed"],
    ) as (store, sessions):
        for session, snapshot in zip(sessions, snapshots):
            fill(session, snapshot)
        decoder = model.decoder(
            threads=spec["threads"], activations="quantised", batch=len(sessions)
        )
        first = np.array([s.next_id for s in snapshots], np.int64)
        if probe is None:
            decoded = _decode(decoder, sessions, first, steps)
            return decoded.rows(spec["warmup_steps"], columns), decoded
        with Bracket(probe, **columns) as bracket:
            decoded = _decode(decoder, sessions, first, steps)
        rows = bracket.rows + decoded.rows(spec["warmup_steps"], columns)
        rows += _bytes(store, sessions, spec["decode_steps"], columns)
        if spec.get("check"):
            rows.append(_checked(sessions, snapshots, get(name).profile, spec["seed"], columns))
        rows += _costs(sessions[0], snapshots[0], get(name).capabilities, columns)
        return rows, decoded


class Decoded:
    """What a decode gave: int64 (steps,) times in ns, int64 (steps, sessions) tokens.

    ``margins``: float64 (steps, sessions), difference of the two largest logits.
    """

    def __init__(self, steps: int, sessions: int) -> None:
        self.step_ns = np.zeros(steps, np.int64)
        self.attention_ns = np.zeros(steps, np.int64)
        self.tokens = np.zeros((steps, sessions), np.int64)
        self.margins = np.zeros((steps, sessions))

    def compared(self, baseline: Decoded, columns: dict[str, Any]) -> list[Row]:
        """How long each session gave the baseline's tokens, and the baseline's margin where it
        ceased to; past the first difference the two decode different texts."""
        rows: list[Row] = []
        for session, differs in enumerate((self.tokens != baseline.tokens).T):
            at = {**columns, "index": session}
            agreed = int(differs.argmax()) if differs.any() else len(differs)
            rows.append({**at, "metric": "m2/agreed_steps", "value": float(agreed)})
            if differs.any():
                margin = float(baseline.margins[agreed, session])
                rows.append({**at, "metric": "m2/margin_at_difference", "value": margin})
        return rows

    def rows(self, warmup: int, columns: dict[str, Any]) -> list[Row]:
        """Rows of the steps after the warm-up; the hash is over all tokens, the warm-up's too."""
        rows: list[Row] = []
        for index, (step, attention) in enumerate(
            zip(self.step_ns[warmup:].tolist(), self.attention_ns[warmup:].tolist())
        ):
            at = {**columns, "index": index}
            rows.append({**at, "metric": "m2/step_ms", "value": step / 1e6})
            rows.append({**at, "metric": "m2/attention_ms", "value": attention / 1e6})
        digest = hashlib.sha256(self.tokens.astype("<i8").tobytes()).hexdigest()
        return [
            *rows,
            {**columns, "metric": "m2/tokens", "value": float(self.tokens[warmup:].size)},
            {**columns, "metric": "output_sha256", "text": digest},
        ]


def _decode(decoder: Any, sessions: list[KVSession], ids: np.ndarray, steps: int) -> Decoded:
    """Greedy steps, each timed from the call to the chosen tokens."""
    decoded = Decoded(steps, len(sessions))
    with no_collection():
        for index in range(steps):
            start = clock.now_ns()
            logits = decoder.step(sessions, ids)
            ids = logits.argmax(axis=1)
            stop = clock.now_ns()
            decoded.step_ns[index] = clock.elapsed_ns(start, stop, f"decode step {index}")
            decoded.attention_ns[index] = decoder.attention_ns
            decoded.tokens[index] = ids
            second, first = np.partition(logits, -2, axis=1)[:, -2:].T
            decoded.margins[index] = first.astype(np.float64) - second
    return decoded


def _bytes(
    store: KVStore, sessions: list[KVSession], steps: int, columns: dict[str, Any]
) -> list[Row]:
    """Bytes read and bytes held, from the lengths after the last step."""
    layers = store.spec.layers
    end = sum(s.length(0) for s in sessions) / len(sessions)
    mean_length = end - (steps - 1) / 2  # step i of n reads end - n + 1 + i rows of each layer
    return [
        {
            **columns,
            "metric": "m2/kv_bytes_per_token",
            "value": float(layers * store.row_bytes * mean_length),
        },
        {**columns, "metric": "m2/resident_bytes", "value": float(store.resident_bytes)},
    ]


def _checked(
    sessions: list[KVSession],
    snapshots: list[Snapshot],
    profile: Profile,
    seed: int,
    columns: dict[str, Any],
) -> Row:
    """Attention of one layer of one session beside the oracle over what it was filled with and the
    appended rows as it gives them back.

    Tokens show what a store gave up to the first tie; this shows that no old row was lost on the way.
    Layer, session and query are drawn anew for each cell.
    """
    draw = np.random.default_rng([seed, len(sessions), snapshots[0].tokens])
    chosen = int(draw.integers(len(sessions)))
    session, snapshot = sessions[chosen], snapshots[chosen]
    spec = session.store.spec
    layer = int(draw.integers(spec.layers))
    q = draw.standard_normal((spec.q_heads, spec.head_dim), np.float32)
    appended = session.read(layer, np.arange(snapshot.tokens, session.length(layer)))
    filled = snapshot.k[layer], snapshot.v[layer]
    k, v = (np.concatenate(rows) for rows in zip(filled, appended))
    scale, out = 1.0 / math.sqrt(spec.head_dim), np.empty_like(q)
    session.attend(layer, q, out, scale)
    error = np.abs(out - reference.attention(q, k, v, scale))
    bound = reference.tolerance(profile, q, k, v, scale)
    error_in_bounds = float((error / bound).max())
    return {**columns, "metric": "m2/output_error", "index": layer, "value": error_in_bounds}


def _costs(
    session: KVSession,
    snapshot: Snapshot,
    capabilities: frozenset[Capability],
    columns: dict[str, Any],
) -> list[Row]:
    """Costs of append, rollback and branch; none for a verb that the candidate lacks."""
    layers = session.store.spec.layers
    new = [row_at(snapshot, layer, 0) for layer in range(layers)]
    rows: list[Row] = []

    def timed(metric: str, index: int, work: Callable[[], object]) -> None:
        start = clock.now_ns()
        work()
        spent = clock.elapsed_ns(start, clock.now_ns(), metric)
        rows.append({**columns, "metric": metric, "index": index, "value": spent / 1e3})

    def append() -> None:
        position = np.array([session.length(0)], np.int64)
        for layer, (k, v) in enumerate(new):
            session.append(layer, position, k, v)

    with no_collection():
        if Capability.ROLLBACK in capabilities:
            for index in range(COST_REPETITIONS):
                timed("m2/append_us", index, append)
                timed("m2/rollback_us", index, lambda: session.rollback_tail(1))
        if Capability.BRANCH in capabilities:
            for index in range(COST_REPETITIONS):
                timed("m2/branch_us", index, lambda: session.begin_branch().close())
    return rows


if __name__ == "__main__":
    main(measure, sys.argv)
