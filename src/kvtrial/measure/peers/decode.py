"""Decode by our arms and by llama.cpp's settings in one rotation: a round gives each of them one step.

``python -m kvtrial.measure.peers.decode SPEC.json OUT.json`` with a `BlockSpec`, whose
candidates are names of both. What the machine does for longer than a round meets both engines alike.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

from kvtrial import engine
from kvtrial.contract import I64
from kvtrial.measure import clock, rotation
from kvtrial.measure.child import Row, blamed, failed_row, main, no_collection
from kvtrial.measure.peers.programs import PEERS
from kvtrial.measure.specs import BlockSpec
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of

#: With several threads an engine's workers spin after their step, and would hold a core of the next one's.
REST_S = 0.005

#: Appends one token, and picks the next, which is ignored: every arm is fed the text's own.
Step = Callable[[int], object]


def measure(spec: BlockSpec, note: Callable[[str], None]) -> list[Row]:
    """Step times of every arm."""
    snapshot = Snapshot.open(spec.snapshots[0])
    names = spec.candidates
    room = snapshot.tokens + rotation.most_steps(
        len(names), spec.rounds, spec.rotation["warmup_rounds"], 0
    )
    rows: list[Row] = []
    steps: dict[str, Step] = {}
    with contextlib.ExitStack() as stack:
        ours = _ours(stack, spec, snapshot, room)
        for name in names:
            note(name)
            try:
                steps[name] = (
                    _theirs(stack, spec, snapshot, room, name) if name in PEERS else ours(name)
                )
            except Exception as error:
                rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
        return rows + _rotate(steps, snapshot.forced, spec, note)


def _ours(
    stack: contextlib.ExitStack, spec: BlockSpec, snapshot: Snapshot, room: int
) -> Callable[[str], Step]:
    """What opens and fills a store of ours; all share one decoder."""
    model = engine.load(spec.gguf)
    threads = spec.threads
    decoder = model.decoder(threads=threads, activations="quantised", batch=1)

    def arm(name: str) -> Step:
        _, (session,) = stack.enter_context(
            opened(
                name,
                shape_of(model),
                tokens=room,
                page_tokens=spec.page_tokens,
                threads=threads,
                page_seed=spec.seed,
            )
        )
        fill(session, snapshot)
        return lambda token: decoder.step([session], [token]).argmax()

    return arm


def _theirs(
    stack: contextlib.ExitStack, spec: BlockSpec, snapshot: Snapshot, room: int, name: str
) -> Step:
    """A context of llama.cpp, filled with the same rows."""
    from kvtrial.measure.peers import llama

    context = stack.enter_context(llama.opened(spec.gguf, name, room, spec.threads))
    context.fill(snapshot.k, snapshot.v)
    return lambda token: context.eval([token]).argmax()


def _rotate(
    steps: dict[str, Step], forced: I64, spec: BlockSpec, note: Callable[[str], None]
) -> list[Row]:
    """The rounds; the first ones warm up."""
    warmup = spec.rotation["warmup_rounds"]
    orders = rotation.orders(list(steps), spec.rounds, spec.seed)
    rows: list[Row] = []
    with no_collection():
        for number in range(warmup + len(orders) if steps else 0):
            token = int(forced[number])
            for place, name in enumerate(orders[max(0, number - warmup)]):
                if spec.threads > 1:
                    time.sleep(REST_S)
                with blamed(name, note):
                    start = clock.now_ns()
                    steps[name](token)
                    stop = clock.now_ns()
                spent = clock.elapsed_ns(start, stop, f"step {number} of {name}")
                if number >= warmup:
                    rows.append(
                        {
                            "candidate": name,
                            "place": place,
                            "metric": "m2/step_ms",
                            "index": number - warmup,
                            "value": spent / 1e6,
                        }
                    )
    return rows


if __name__ == "__main__":
    main(BlockSpec, measure, sys.argv)
