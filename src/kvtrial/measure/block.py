"""One block: a fresh process in which all arms of a cell decode in rotation.

``python -m kvtrial.measure.block SPEC.json OUT.json`` with a `BlockSpec`.

Every step is fed the text's own next token; its argmax is part of the step and then ignored, so that all
arms do the same work at every step. An arm that raises ends the process: the block is run again without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvtrial import engine
from kvtrial.candidates import get
from kvtrial.contract import F32, I64, Capability, KVSession, KVStore, Profile
from kvtrial.host import machine
from kvtrial.measure import clock, kept, parity, rotation
from kvtrial.measure.accounts import Accounts, stood_still_ns
from kvtrial.measure.baton import Baton
from kvtrial.measure.child import Row, blamed, main, no_collection
from kvtrial.measure.probes import Probes
from kvtrial.measure.specs import BlockSpec
from kvtrial.measure.stores import Snapshot, fill, opened, row_at, shape_of
from kvtrial.measure.surroundings import environment_rows, reading_rows, throttled_rows
from kvtrial.registration import Rotation

COST_REPETITIONS = 16
#: Rounds at the beginning that take all arms whose speed is not known yet.
SHOWING_ROUNDS = 2


@dataclass
class Arm:
    """A store with its filled sessions, and what its timed steps gave.

    Attributes
    ----------
    step_ns, attention_ns : dict of int to int
        Counted round → nanoseconds, of timed steps alone.
    kept : list of (int, kept.Call)
        Number of the session, and the call.
    """

    name: str
    candidate: str
    store: KVStore
    sessions: list[KVSession]
    decoder: Any
    spin: float = 0.0
    threads: int = 1
    step_ns: dict[int, int] = field(default_factory=dict)
    attention_ns: dict[int, int] = field(default_factory=dict)
    stood_still_ns: int = 0
    disk_faults: int = 0
    kept: list[tuple[int, kept.Call]] = field(default_factory=list)
    digest: Any = field(default_factory=xxhash.xxh3_128)

    @property
    def profile(self) -> Profile:
        """How it stores numbers."""
        return get(self.candidate).profile

    def begin_again(self, snapshots: list[Snapshot]) -> None:
        """Drop what was appended since the sessions were filled; not every candidate can roll back."""
        for session in self.sessions:
            session.close()
        self.sessions = [self.store.open_session() for _ in snapshots]
        for session, snapshot in zip(self.sessions, snapshots):
            fill(session, snapshot)

    def step(self, sessions: list[Any], ids: I64) -> F32:
        """One decode step as it is timed: feed a token to each session, pick the next, ignore it.

        Returns the logits, a view that is good until the next step of any arm.
        """
        # By the thread's own time an interruption lengthens the spin as much as the step; where others do part of
        # the step, only the wall's says how long it took.
        now = clock.own_ns if self.threads == 1 else clock.now_ns
        start = now()
        logits: F32 = self.decoder.step(sessions, ids)
        logits.argmax(axis=1)
        if self.spin:
            stop = now()
            until = stop + self.spin * (stop - start)
            while now() < until:
                pass
        return logits


@dataclass
class Agreement:
    """How an arm's logits compare with the reference's at equal input, by round."""

    shift: list[float] = field(default_factory=list)
    kld: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)

    def add(self, ours: F32, theirs: F32) -> None:
        """Logits (sessions, V) of one round."""
        shift, kld, top1 = parity.compare(ours, theirs).T
        self.shift.append(float(shift.max()))
        self.kld.append(float(kld.mean()))
        self.top1.append(float(top1.mean()))

    def rows(self, name: str) -> list[Row]:
        """As events, one a round."""
        return [
            {"candidate": name, "metric": f"m2/logits_{what}", "index": index, "value": value}
            for what in ("shift", "kld", "top1")
            for index, value in enumerate(getattr(self, what))
        ]


def measure(spec: BlockSpec, note: Callable[[str], None]) -> list[Row]:
    """All rows of the block, or of this process's part of it."""
    if not spec.candidates:
        raise SystemExit("no arm is left to measure: each one failed, for the reason that was said")
    if spec.cpu is not None:
        os.sched_setaffinity(0, {spec.cpu})
    model = engine.load(spec.gguf)
    snapshots = [Snapshot.open(folder) for folder in spec.snapshots]
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        if spec.probes is not None:
            probes = Probes(spec.threads, **spec.probes)
            probe = stack.enter_context(contextlib.closing(probes))
            rows += reading_rows(probe, 0)
        start = time.monotonic()
        arms = open_arms(stack, model, snapshots, spec, note)
        rows.append({"metric": "block/opened_s", "value": time.monotonic() - start})
        rows += rotate(arms, snapshots, spec, note)
        rows += environment_rows()
        for arm in arms.values():
            with blamed(arm.name, note):
                rows += _checked(arm, snapshots, spec)
                rows += _bytes(arm, snapshots[0].tokens, spec.rotation["warmup_rounds"])
                rows += _alone(arm, snapshots, spec)
                rows += _costs(arm, snapshots[0])
    return rows


def open_arms(
    stack: contextlib.ExitStack,
    model: Any,
    snapshots: list[Snapshot],
    spec: BlockSpec,
    note: Callable[[str], None],
) -> dict[str, Arm]:
    """All arms, filled from the snapshots. They share the decoders' scratch, one for each way in."""
    decoders = {
        way: model.decoder(
            threads=spec.threads,
            activations="quantised",
            batch=len(snapshots),
            direct=way == "direct",
        )
        for way in ("direct", "append")
    }
    arms = {}
    for name in spec.own or spec.candidates:
        candidate = spec.stands_for.get(name, name)
        with blamed(name, note):
            store, sessions = stack.enter_context(
                opened(
                    candidate,
                    shape_of(model),
                    tokens=snapshots[0].tokens + steps_of(spec),
                    sessions=len(snapshots),
                    page_tokens=spec.page_tokens,
                    threads=spec.threads,
                    page_seed=spec.seed,
                )
            )
            for session, snapshot in zip(sessions, snapshots):
                fill(session, snapshot)
        decoder = decoders[spec.ways.get(name, "direct")]
        spin = spec.spins.get(name, 0.0)
        arms[name] = Arm(name, candidate, store, sessions, decoder, spin, spec.threads)
    return arms


def steps_of(spec: BlockSpec) -> int:
    """Steps that a fast arm makes at most: what sessions and forced streams have to hold."""
    arms, warmup = len(spec.candidates), spec.rotation["warmup_rounds"]
    return rotation.most_steps(arms, spec.rounds, warmup, spec.alone_steps)


@dataclass
class Stepper:
    """Makes one step of one arm, and books where its time went."""

    spec: BlockSpec
    forced: I64  # (F, sessions): the text's own next tokens
    accounts: Accounts
    note: Callable[[str], None]
    baton: Baton

    def step(
        self, arm: Arm, number: int, *, timed: bool, draw: np.random.Generator | None = None
    ) -> F32:
        """Step ``number`` from the filled context on; logits (sessions, V) are good until the next one.

        With ``draw`` one session's attention in one layer is kept, both drawn from it.
        """
        self.baton.take(number)
        sessions: list[Any] = list(arm.sessions)
        warmup = self.spec.rotation["warmup_rounds"]
        which, watched = 0, None
        if draw is not None:
            which = int(draw.integers(len(sessions)))
            watched = kept.Kept(sessions[which], int(draw.integers(arm.store.spec.layers)))
            sessions[which] = watched
        with blamed(arm.name, self.note):
            before = self.accounts.read()
            start = clock.now_ns()
            logits = arm.step(sessions, self.forced[number])
            stop = clock.now_ns()
            after = self.accounts.read()
        if timed:
            index = number - warmup
            arm.step_ns[index] = clock.elapsed_ns(start, stop, f"step {number} of {arm.name}")
            arm.attention_ns[index] = arm.decoder.attention_ns
            arm.disk_faults += after.disk_faults - before.disk_faults
            arm.stood_still_ns = max(arm.stood_still_ns, stood_still_ns(before, after))
        if warmup <= number < warmup + self.spec.rounds:  # what an arm does in every block
            arm.digest.update(np.ascontiguousarray(logits).data)
        if watched is not None and watched.call is not None:
            arm.kept.append((which, watched.call))
        return logits


def rotate(
    arms: dict[str, Arm], snapshots: list[Snapshot], spec: BlockSpec, note: Callable[[str], None]
) -> list[Row]:
    """The rounds, and what is known when they are over.

    The order of the arms is drawn for every round: what the machine does to them for longer than a round
    then meets all alike. A slow arm comes last, and in every eighth round only: it would take most of the
    time, and leaves the caches and the clock as no fast arm does. Before its step it gets, untimed, the rows
    that it missed; the first fast arm after it is not timed in its round.
    """
    rules = spec.rotation
    warmup, every = rules["warmup_rounds"], rules["slow_every"]
    throttled = machine.throttle_events()
    forced = np.stack([snapshot.forced for snapshot in snapshots], axis=1)
    with contextlib.closing(Accounts()) as accounts, no_collection():
        stepper = Stepper(spec, forced, accounts, note, Baton(**vars(spec.baton)))
        slow = _slow(arms, stepper)
        if spec.slow is None:
            for name in slow:  # from here on as in a block that was told
                arms[name].begin_again(snapshots)
        fast = [name for name in spec.candidates if name not in slow]
        own = [name for name in fast if name in arms]
        source = arms[spec.reference if spec.reference in own else own[0]]
        orders = rotation.orders(fast, spec.rounds, spec.seed)
        checked = _drawn(len(orders), fast, slow, rules, spec.seed)
        agreements = {name: Agreement() for name in arms if spec.compare}
        after_slow = False
        for number in range(SHOWING_ROUNDS, warmup + len(orders)):
            counted = number - warmup  # below 0 while all warm up
            logits: dict[str, F32] = {}
            for place, name in enumerate(orders[max(counted, 0)]):
                if name not in arms:
                    stepper.baton.give(number)
                    continue
                timed = counted >= 0 and not (after_slow and place == 0)
                given = stepper.step(
                    arms[name], number, timed=timed, draw=checked.get((name, counted))
                )
                if agreements and counted >= 0:
                    logits[name] = given.copy()
            after_slow = bool(slow) and counted >= 0 and (counted + 1) % every == 0
            for name in rotation.turn(slow, counted // every) if after_slow else ():
                with blamed(name, note):
                    _catch_up(arms[name], source)
                given = stepper.step(
                    arms[name], number, timed=True, draw=checked.get((name, counted))
                )
                if agreements:
                    logits[name] = given.copy()
            for name in logits:
                if source.name in logits and name != source.name:
                    agreements[name].add(logits[name], logits[source.name])
        complete = accounts.complete
    rows = [row for arm in arms.values() for row in _step_rows(arm, len(snapshots), complete)]
    rows += [{"candidate": name, "metric": "rotation/slow", "value": 1.0} for name in slow]
    rows += throttled_rows(throttled)
    for name, agreement in agreements.items():
        rows += agreement.rows(name)
    return rows


def _slow(arms: dict[str, Arm], stepper: Stepper) -> list[str]:
    """The first rounds show who is slow; those that the block was told of are spared them.

    By the thread's own time, and the quicker of an arm's steps: on a busy machine a step of the wall's time may be
    any arm's, and one that is taken for slow is measured in every eighth round of the whole cell.
    """
    told = stepper.spec.slow
    shown = [name for name in stepper.spec.candidates if name not in (told or ())]
    least_ns = {name: sys.maxsize for name in shown if name in arms}
    for number in range(SHOWING_ROUNDS):
        for name in rotation.orders(shown, 1, stepper.spec.seed + number)[0]:
            if name not in arms:
                stepper.baton.give(number)
                continue
            start = clock.own_ns()
            stepper.step(arms[name], number, timed=False)
            spent = clock.elapsed_ns(start, clock.own_ns(), f"a first step of {name}")
            least_ns[name] = min(least_ns[name], spent)
    if told is None:
        ratio = stepper.spec.rotation["slow_ratio"]
        told = rotation.slow_arms(least_ns, ratio, stepper.spec.reference)
    return [name for name in arms if name in told]


def _drawn(
    rounds: int, fast: list[str], slow: list[str], rules: Rotation, seed: int
) -> dict[tuple[str, int], np.random.Generator]:
    """(arm, counted round) → what draws session and layer, for the calls that are checked."""
    draw = np.random.default_rng([seed, 1])
    turns = {
        **dict.fromkeys(fast, np.arange(rounds)),
        **dict.fromkeys(slow, np.arange(rules["slow_every"] - 1, rounds, rules["slow_every"])),
    }
    return {
        (name, int(number)): np.random.default_rng([seed, int(number), place])
        for place, (name, own) in enumerate(turns.items())
        for number in draw.permutation(own)[: rules["output_steps"]]
    }


def _catch_up(arm: Arm, source: Arm) -> None:
    """Give a slow arm the rows that the source appended since its last step."""
    for own, other in zip(arm.sessions, source.sessions):
        # The source has already made this round's step, whose row the arm appends itself.
        positions = np.arange(own.length(0), other.length(0) - 1)
        if len(positions) == 0:
            continue
        for layer in range(arm.store.spec.layers):
            own.append(layer, positions, *other.read(layer, positions))


def _step_rows(arm: Arm, sessions: int, complete: bool) -> list[Row]:
    at = {"candidate": arm.name}
    rows: list[Row] = []
    for index in sorted(arm.step_ns):
        for metric, spent in (("step", arm.step_ns), ("attention", arm.attention_ns)):
            value = spent[index] / 1e6
            rows.append({**at, "metric": f"m2/{metric}_ms", "index": index, "value": value})
    if complete:
        still_s = arm.stood_still_ns / 1e9
        rows.append({**at, "metric": "rotation/stood_still_s", "value": still_s})
    rows.append({**at, "metric": "rotation/disk_faults", "value": float(arm.disk_faults)})
    rows.append({**at, "metric": "m2/tokens", "value": float(len(arm.step_ns) * sessions)})
    rows.append({**at, "metric": "output_xxh3", "text": arm.digest.hexdigest()})
    return rows


def _checked(arm: Arm, snapshots: list[Snapshot], spec: BlockSpec) -> list[Row]:
    """The kept calls against the oracle and the store; and the rows' hash, equal in every block."""
    rows: list[Row] = []
    for index, (which, call) in enumerate(arm.kept):
        session, at = arm.sessions[which], {"candidate": arm.name, "index": index}
        error = kept.output_error(call, session, snapshots[which], arm.profile)
        rows.append({**at, "metric": "m2/output_error", "value": error})
        row = kept.row_error(call, session, arm.profile)
        rows.append({**at, "metric": "m2/row_error", "value": row})
        rows.append({**at, "metric": "m2/by_slot", "value": float(call.by_slot)})
    digest = xxhash.xxh3_128()
    for session, snapshot in zip(arm.sessions, snapshots):
        # As many as every block has, however many rounds whole cycles are.
        steps = spec.rotation["warmup_rounds"] + spec.rounds
        positions = np.arange(snapshot.tokens, min(session.length(0), snapshot.tokens + steps))
        for layer in range(arm.store.spec.layers):
            for array in session.read(layer, positions):
                digest.update(np.ascontiguousarray(array).data)
    rows.append({"candidate": arm.name, "metric": "rows_xxh3", "text": digest.hexdigest()})
    return rows


def _bytes(arm: Arm, filled: int, warmup: int) -> list[Row]:
    """Bytes of a position in all layers, bytes that a timed step reads on average, and bytes held."""
    layers = arm.store.spec.layers
    # A step reads the rows before it and its own.
    mean_length = filled + warmup + 1 + sum(arm.step_ns) / max(1, len(arm.step_ns))
    found = {
        "m2/row_bytes": layers * arm.store.row_bytes,
        "m2/kv_bytes_per_token": layers * arm.store.row_bytes * mean_length,
        "m2/resident_bytes": arm.store.resident_bytes,
    }
    return [{"candidate": arm.name, "metric": m, "value": float(v)} for m, v in found.items()]


def _alone(arm: Arm, snapshots: list[Snapshot], spec: BlockSpec) -> list[Row]:
    """Steps of one arm after the other, where weights and rows would stay in the cache between them.

    In the rotation every arm reads from memory; for such an arm a decode alone would be another figure.
    """
    row_bytes = arm.store.spec.layers * arm.store.row_bytes
    held = Path(spec.gguf).stat().st_size + row_bytes * sum(s.length(0) for s in arm.sessions)
    if not spec.alone_steps or held > machine.last_level_cache_bytes(spec.threads):
        return []
    forced = np.stack([snapshot.forced for snapshot in snapshots], axis=1)
    first = arm.sessions[0].length(0) - snapshots[0].tokens
    rows: list[Row] = []
    with no_collection():
        for index in range(spec.alone_steps):
            start = clock.now_ns()
            arm.step(list(arm.sessions), forced[first + index])
            spent = clock.elapsed_ns(start, clock.now_ns(), f"a step of {arm.name} alone")
            at = {"candidate": arm.name, "index": index}
            rows.append({**at, "metric": "m2/alone_step_ms", "value": spent / 1e6})
    return rows


def _costs(arm: Arm, snapshot: Snapshot) -> list[Row]:
    """Costs of append, rollback and branch; none for a verb that the candidate lacks."""
    session, capabilities = arm.sessions[0], get(arm.candidate).capabilities
    layers = session.store.spec.layers
    new = [row_at(snapshot, layer, 0) for layer in range(layers)]
    rows: list[Row] = []

    def timed(metric: str, index: int, work: Callable[[], object]) -> None:
        start = clock.now_ns()
        work()
        spent = clock.elapsed_ns(start, clock.now_ns(), metric)
        rows.append({"candidate": arm.name, "metric": metric, "index": index, "value": spent / 1e3})

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
    main(BlockSpec, measure, sys.argv)
