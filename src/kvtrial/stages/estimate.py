"""Stage ``estimate``: how long the trial is going to take, said before it begins.

``python -m kvtrial.stages.estimate --run-dir DIR --gguf FILE --jobs N``

A few steps of every candidate at each context say what a block takes; the rest is counting what the
protocol asks for. Contexts that are filled already cost the look at them. Writes ``estimate.json``:
``stages`` and, for stages of blocks, ``blocks`` by cell, in seconds. What each stage then took is in its
events (``attempt/estimated_s``, ``attempt/taken_s``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time

from kvtrial import candidates
from kvtrial.cold import KINDS
from kvtrial.contract import Capability
from kvtrial.decision.parity import contexts
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.transformer import CHUNK
from kvtrial.host import machine
from kvtrial.host.files import write_text
from kvtrial.measure import child, rotation
from kvtrial.measure.aliases import ARMS, WAYS
from kvtrial.measure.attention import CHECKED_ITERATIONS, SHORTEST_ITERATION_NS
from kvtrial.measure.exclusive import exclusive
from kvtrial.measure.plan import SamplingPlan, cell_name
from kvtrial.measure.specs import CalibrateSpec, Filling
from kvtrial.registration import Protocol
from kvtrial.run.protocol import entrants, untimed
from kvtrial.stages import m1, parity, workload
from kvtrial.stages.common import Cell, Stage
from kvtrial.stages.progress import duration

#: Seconds that a machine of any speed needs, about: a stage's own start, and its entry in MLflow,
STAGE_S = 4.0
#: a candidate's conformance suite at one page size,
CONFORMANCE_S = 2.0
#: the oracle's bound for a position of one query head,
ORACLE_S = 5e-6
#: a crash round and a block of the cold tier,
CRASH_S, COLD_BLOCK_S = 1.0, 6.0
#: and what follows the measurements.
VERDICT_S = 10.0
#: Of a decoded step's attention: a position of the causal block form on all CPUs, but for scalar arms.
BLOCK_FORM = 0.5
#: A step's part outside attention grows little with the sessions: weights are read once.
BATCH_COST = 0.3


class Curve:
    """Seconds at n positions: straight between what was measured, and on beyond its ends."""

    def __init__(self, points: dict[int, float]) -> None:
        self._points = sorted(points.items())

    def __call__(self, positions: float) -> float:
        pairs = list(itertools.pairwise(self._points)) or [(self._points[0], self._points[0])]
        (left, low), (right, high) = next(
            (pair for pair in pairs if positions <= pair[1][0]), pairs[-1]
        )
        slope = (high - low) / (right - left) if right > left else 0.0
        return max(low + slope * (positions - left), 0.0)


class Speed:
    """What `kvtrial.measure.calibrate` found, as functions of the positions.

    Attributes
    ----------
    names : list of str
        Candidates that ran.
    start_s, load_s : float
        Starting a measured process, and loading the model in it.
    probe_s : float
        One reading of the probes.
    prompts_s, position_s : float
        Prefilling the prompts of the parity check, and comparing; and a position of them.
    """

    def __init__(self, rows: list[child.Row]) -> None:
        points: dict[tuple[str, str], dict[int, float]] = {}
        for row in rows:
            if "value" in row:
                key = (row["metric"].removeprefix("calibrate/"), row.get("candidate", ""))
                points.setdefault(key, {})[row.get("index", 0)] = row["value"]
        self.names = [name for metric, name in points if metric == "step_s"]
        self._curves = {key: Curve(found) for key, found in points.items()}
        self.start_s, self.load_s, self.probe_s, self.prompts_s, self.position_s = (
            self.of(f"{once}_s")(0) for once in ("start", "load", "probe", "prompts", "position")
        )

    def of(self, metric: str, name: str = "") -> Curve:
        """``arm_s``, ``step_s`` or ``attention_s`` of a candidate, or ``prefill_s``, by positions."""
        return self._curves[metric, name]

    def step_s(self, name: str, cell: Cell) -> float:
        """One step of all sessions of a cell."""
        context, sessions, threads = (cell[k] for k in ("context", "sessions", "threads"))
        attention = self.of("attention_s", name)(context)
        rest = max(self.of("step_s", name)(context) - attention, 0.0)
        return (attention * sessions + rest * (1 + BATCH_COST * (sessions - 1))) / threads


def block_seconds(
    speed: Speed,
    protocol: Protocol,
    profile: str,
    cells: list[Cell],
    shapes: dict[str, dict[str, int]],
) -> dict[str, dict[str, float]]:
    """Stage → cell → seconds that one block takes, of the arms that the run profile times."""
    left_out = untimed(protocol, profile)
    names = [n for n in protocol["candidates"] if n in speed.names and n not in left_out]
    rules = protocol["direct_write"]
    direct: Cell = {
        "context": rules["context"],
        "sessions": 1,
        "threads": 1,
        "rounds": rules["rounds"],
    }
    cold: Cell = {"context": protocol["cold"]["prefix_tokens"], "sessions": 1, "threads": 1}
    same = protocol["known_answers"]["candidate"]
    slots = [
        n for n in names if Capability.RESERVE_SLOT in candidates.get(n).capabilities for _ in WAYS
    ]
    own_name, own = next(iter(shapes.items()))

    def decodes(cell: Cell, listed: list[str]) -> float:
        return _rotation_block_s(speed, protocol, cell, listed, own["q_heads"])

    def regions(cell: Cell, name: str, listed: list[str]) -> float:
        return speed.start_s + _attention_block_s(speed, protocol, listed, cell, shapes[name], own)

    found = {
        "m1": {
            cell_name({**cell, "shape": name}): regions(cell, name, names)
            for name in shapes
            for cell in cells
            if cell["sessions"] == 1
        },
        "m2": {cell_name(cell): decodes(cell, names) for cell in cells},
        "aa": {
            cell_name(cell): decodes(cell, [same] * len(ARMS) if same in names else [])
            for cell in cells
            if cell["role"] == "primary"
        },
        "direct_write": {cell_name(direct): decodes(direct, slots)},
        "cold_tier": {cell_name(cold): COLD_BLOCK_S},
        "control": {},
    }
    if "control" in protocol:
        once: Cell = {"context": protocol["control"]["context"], "sessions": 1, "threads": 1}
        alone = [name for name in (protocol["control"]["candidate"],) if name in speed.names]
        found["control"] = {
            cell_name(once): decodes(once, [protocol["decision"]["reference"], *alone]),
            cell_name({**once, "shape": own_name}): regions(once, own_name, alone),
        }
    return found


def _rotation_block_s(
    speed: Speed, protocol: Protocol, cell: Cell, names: list[str], q_heads: int
) -> float:
    """A block of whole decodes: arms opened and filled, the rounds, and the oracle afterwards."""
    if not names:
        return 0.0
    rules, context = protocol["rotation"], cell["context"]
    step = {name: speed.step_s(name, cell) for name in set(names)}
    took_ns = {name: round(seconds * 1e9) for name, seconds in step.items()}
    reference = protocol["decision"]["reference"]
    slow = set(rotation.slow_arms(took_ns, rules["slow_ratio"], reference))
    fast = [name for name in names if name not in slow]
    rounds = rotation.rounds_of(len(fast), cell.get("rounds", rules["rounds"]))
    turns = rounds // rules["slow_every"]
    steps = sum(step[n] * (turns if n in slow else rules["warmup_rounds"] + rounds) for n in names)
    filled = cell["sessions"] * sum(speed.of("arm_s", name)(context) for name in names)
    oracle = len(names) * rules["output_steps"] * ORACLE_S * context * q_heads
    return speed.start_s + speed.load_s + speed.probe_s + filled + steps + oracle


def _attention_block_s(
    speed: Speed,
    protocol: Protocol,
    names: list[str],
    cell: Cell,
    shape: dict[str, int],
    own: dict[str, int],
) -> float:
    rules = protocol["m1"]
    context = cell["context"]
    # Time goes with the rows' bytes; scalar arms go with the query heads, which matters less here.
    wider = shape["kv_heads"] * shape["head_dim"] / (own["kv_heads"] * own["head_dim"])
    region = {
        name: wider * speed.of("attention_s", name)(context) / own["layers"] for name in names
    }
    fastest = min(region.values(), default=1.0)
    calls = math.ceil(SHORTEST_ITERATION_NS / 1e9 / max(fastest, 1e-9))
    turned = rules["rotation_llc_multiple"] * machine.last_level_cache_bytes(cell["threads"])
    room = {"tokens": context, "sessions": 1, "page_tokens": protocol["page_tokens"]}
    one_layer = {**shape, "layers": 1}
    regions = {
        name: max(1, math.ceil(turned / candidates.pool_bytes(name, one_layer, **room)))
        for name in names
    }
    fills = sum(
        wider * speed.of("arm_s", name)(context) * _sessions_filled(name, n / own["layers"])
        for name, n in regions.items()
    )
    in_cache = sum(3 * t + 10 * max(t, SHORTEST_ITERATION_NS / 1e9) for t in region.values())
    oracle = CHECKED_ITERATIONS * 3 * ORACLE_S * context * shape["q_heads"]
    timed = sum((rules["iterations"] * calls + regions[name]) * t for name, t in region.items())
    return fills + timed + in_cache + oracle + 2 * speed.probe_s


def _sessions_filled(name: str, sessions: float) -> float:
    """Sessions of a rotation whose rows are appended; the others are copies, page by page."""
    copies = Capability.SPILL in candidates.get(name).capabilities
    return min(sessions, 1.0) if copies else sessions


def stage_seconds(
    speed: Speed,
    protocol: Protocol,
    profile: str,
    cells: list[Cell],
    per_block: dict[str, dict[str, float]],
    trained: int,
    jobs: int,
) -> dict[str, float]:
    """Stage → seconds; without ``workload``. Nothing is taken to be void or extended.

    ``trained`` is the model's trained length.
    """
    m1_own = next(iter(per_block["m1"]), "").rpartition("-")[2]

    def m1_blocks(cell: str) -> int:
        own = cell.endswith(f"-{m1_own}")
        return int(protocol["m1"]["blocks" if own else "shape_blocks"])

    cold = protocol["cold"]
    each = {
        "m1": sum(m1_blocks(cell) * s for cell, s in per_block["m1"].items()),
        "m2": sum(
            SamplingPlan.of_cell(protocol, cell).first * per_block["m2"][cell_name(cell)]
            for cell in cells
        ),
        "parity": _parity_s(speed, protocol, profile, cells, trained),
        "aa": protocol["known_answers"]["blocks"] * sum(per_block["aa"].values()),
        "control": sum(per_block["control"].values()),
        "direct_write": protocol["direct_write"]["blocks"]
        * sum(per_block["direct_write"].values()),
        "cold_tier": cold["blocks"] * COLD_BLOCK_S + len(KINDS) * cold["crash_rounds"] * CRASH_S,
        "conformance": CONFORMANCE_S
        * len(protocol["conformance"]["page_tokens"])
        * len(entrants(protocol))
        / jobs,
    }
    return {stage: STAGE_S + s for stage, s in each.items()} | {"verdict": VERDICT_S}


def _parity_s(
    speed: Speed, protocol: Protocol, profile: str, cells: list[Cell], trained: int
) -> float:
    """Seconds of the parity stage, but for its own start."""
    rules = protocol["parity"]
    names = [name for name in protocol["candidates"] if name in speed.names]
    held = contexts({**protocol, "cells": cells})
    total = (1 + len(held)) * (speed.start_s + speed.load_s)
    total += len(names) * speed.prompts_s
    for context in held:
        arms = [(name, parity.chunks(protocol, profile, name, context, trained)) for name in names]
        # The comparison is fed as much as whoever is compared over most.
        most = max((count for _, count in arms), default=0)
        arms = [(n, most if n == rules["comparison"] else c) for n, c in arms]
        for name, count in arms:
            positions = count * protocol["quality"]["chunk_tokens"]
            attention = 1.0 if name in rules["slow"] else BLOCK_FORM
            total += speed.of("arm_s", name)(context) + positions * (
                attention * speed.of("attention_s", name)(context) + speed.position_s
            )
    return total


def chunk(plan: workload.Plan) -> int:
    """Positions of a prefill's chunk."""
    return min(CHUNK, max(plan.needed))


def workload_seconds(speed: Speed, plan: workload.Plan, missing: list[int]) -> float:
    """Seconds of prefilling the sessions that have no snapshots yet, chunk by chunk."""
    # A chunk's time grows with what lies before it, so that the middle one's is the mean.
    return sum(
        positions / chunk(plan) * speed.of("prefill_s")((positions - chunk(plan)) / 2)
        for positions in (max(plan.folders(session)) for session in missing)
    )


def calibrate(
    stage: Stage, plan: workload.Plan, missing: list[int], prompts: list[list[int]]
) -> Speed:
    """Measure every candidate that runs, at the contexts that it is going to have; one that does not
    run is left out."""
    cells = plan.held(stage.cells())
    contexts = dict.fromkeys(stage.protocol["candidates"], sorted({c["context"] for c in cells}))
    if "control" in stage.protocol:
        contexts[stage.protocol["control"]["candidate"]] = [stage.protocol["control"]["context"]]
    filling = Filling(store=workload.STORE, activations=workload.ACTIVATIONS, chunk=chunk(plan))
    spec = CalibrateSpec(
        candidates=[name for name in contexts if candidates.get(name).not_built is None],
        gguf=str(stage.gguf),
        contexts=contexts,
        page_tokens=stage.protocol["page_tokens"],
        probes=stage.protocol["probes"],
        baseline=stage.protocol["parity"]["baseline"],
        prompts=prompts,
        prefill=filling if missing else None,
    )

    def left_out(name: str, what: str) -> None:
        print(f"estimate: {name} is left out: {what}", file=sys.stderr, flush=True)

    return Speed(
        child.run_survivors(
            "kvtrial.measure.calibrate", spec, machine.usable_cpus(), left_out=left_out
        )
    )


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--jobs", type=int, default=1)
    args, rest = parser.parse_known_args(argv)
    stage = Stage.from_command_line("estimate", __doc__, rest)
    prompts = parity.prompts(stage)
    plan = workload.Plan.of(stage)
    with exclusive(f"estimate of {stage.run_dir.name}"):
        start = time.monotonic()
        missing = plan.incomplete(stage.run_dir.parent)
        look_s = time.monotonic() - start
        speed = calibrate(stage, plan, missing, prompts)
    cells = plan.held(stage.cells())
    trained = ModelConfig.from_gguf(read_gguf(stage.gguf)).context_length
    per_block = block_seconds(
        speed, stage.protocol, stage.profile, cells, m1.shapes(stage.protocol, plan.shape)
    )
    seconds = {
        "workload": STAGE_S + look_s + workload_seconds(speed, plan, missing),
        **stage_seconds(speed, stage.protocol, stage.profile, cells, per_block, trained, args.jobs),
    }
    said = ", ".join(f"{name} {duration(s)}" for name, s in seconds.items())
    print(
        f"the trial is going to take about {duration(sum(seconds.values()))} ({said})",
        file=sys.stderr,
        flush=True,
    )
    document = {"stages": seconds, "blocks": per_block}
    write_text(stage.run_dir / "estimate.json", json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
