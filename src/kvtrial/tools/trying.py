"""``kvtrial try NAME``: a first look at a candidate that somebody is working on.

Conformance, one attention region and the decode at the primary context, or at others, in rotation with the
adopted store by the stages' own functions, with the trial's own intervals. Against a git ref the other side is a
build of that ref, in a process of its own (`kvtrial.tools.ref_build`), and attention is timed within the decode.
It decides nothing: a few cells against one store are no trial. Nothing is left behind but the snapshot of the
filled context, which runs share, and the builds of refs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvtrial import candidates
from kvtrial.conformance import isolated
from kvtrial.contract import PAGE_TOKENS, CandidateNotBuilt
from kvtrial.decision import output, validity
from kvtrial.decision.contrasts import Contrast, Measured, contrast, contrast_of, digits
from kvtrial.host import build, machine, paths, printed, selection, shapes
from kvtrial.host.files import write_text
from kvtrial.host.records import plain
from kvtrial.measure import figures
from kvtrial.measure.exclusive import exclusive
from kvtrial.measure.plan import SamplingPlan
from kvtrial.measure.specs import BlockSpec
from kvtrial.measure.stores import shape_of
from kvtrial.registration import Cell, Protocol
from kvtrial.run import corpus, events, models, protocol
from kvtrial.run.layout import ConfigError
from kvtrial.stages import conformance as suite
from kvtrial.stages import m1, m2
from kvtrial.stages import workload as snapshots
from kvtrial.stages.common import (
    Block,
    CellRun,
    Stage,
    TrialModel,
    Work,
    Workload,
    planned,
    run_cells,
)
from kvtrial.stages.progress import Progress
from kvtrial.tools.ref_build import RefBuild, at_ref
from kvtrial.tools.tried import Figures, Suite, Tried

#: Blocks of the decode: first, and at most, by their spread; and what they are to reach, of the log ratio.
FIRST_BLOCKS, MOST_BLOCKS, HALF_WIDTH = 6, 16, 0.02
FEWEST_BLOCKS = 2
#: Rounds of a block against a ref: two processes are opened for it, so it is to be worth their while.
REF_ROUNDS = 192
#: What a block is taken to need before one was seen.
BLOCK_S, ATTENTION_S = 5.0, 5.0
ATTENTION_BLOCKS = 3
CONFORMANCE_TIMEOUT_S = 600.0
NOTE = f"nothing is adopted from this: `{paths.how_to()}` measures every context and decides"


class NothingToCompare(ConfigError):
    """A candidate was to be tried against itself."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """The two arms of a try.

    Attributes
    ----------
    name : str
        The candidate that is tried.
    against : str
        The arm beside it: a candidate, or one of another build, such as ``K1@3f2a1bc``.
    built : RefBuild or None
        That other build.
    """

    name: str
    against: str
    built: RefBuild | None = None

    @property
    def arms(self) -> list[str]:
        """The one that it is tried against first."""
        return [self.against, self.name]

    @property
    def layouts_differ(self) -> bool:
        """Whether they lay out their rows differently."""
        other = self.built.layout if self.built else candidates.get(self.against).layout
        return candidates.get(self.name).layout != other


def measure(
    name: str,
    *,
    model: str,
    against: str | None = None,
    against_ref: str | None = None,
    contexts: Sequence[int] = (),
    threads: int = 1,
    count: int | None = None,
) -> Tried:
    """Try a candidate; about a minute and a half at the registered context.

    Parameters
    ----------
    name : str
        A registered candidate.
    model : str
        A name of config/models.yaml, or the path of a GGUF file.
    against : str, optional
        Another candidate; by default the adopted store, or with a ref the candidate itself.
    against_ref : str, optional
        A git ref of the other one's package: that build of it is measured.
    contexts : ints, optional
        Filled positions, one after the other; by default those of the primary cell.
    threads : int
        Threads of a decode.
    count : int, optional
        Blocks of a decode; by default as many as make the interval as narrow as `HALF_WIDTH`.

    Returns
    -------
    Tried
        JSON-safe: ``conformance``, what it is of, and ``cells``: for each context ``decode``, ``attention``,
        ``failed`` and ``void_blocks``. With a ref ``ref`` and ``commit`` name it, and ``attention`` is that within
        the decode; else both are None, and it was timed alone.

    Raises
    ------
    UnknownCandidate, CandidateNotBuilt, NothingToCompare, StaleBuild, UnknownModel, ModelNotFetched
    NotACheckout, NoSuchRef, RefTooOld, RefBuildFailed
    WorkloadError
        The registered text is shorter than a context.
    ConfigError
        A context does not fit in memory, or too few blocks were asked for.
    """
    _check(name, against, against_ref)
    gguf = models.path_of(model)
    pair = _pair(name, against, against_ref, gguf)
    registered = protocol.load(paths.config_file("protocol.yaml"))
    primary = next(cell for cell in registered["cells"] if cell["role"] == "primary")
    rounds = REF_ROUNDS if pair.built else registered["rotation"]["rounds"]
    cells: list[Cell] = [
        {**primary, "rounds": rounds, "sessions": 1, "threads": threads, "context": context}
        for context in contexts or [primary["context"]]
    ]
    if count is not None and count < FEWEST_BLOCKS:
        raise ConfigError(
            f"{printed.count(count, 'block')} can't have an interval; give {FEWEST_BLOCKS} or more"
        )
    loaded = models.load_model(gguf)
    texts = [corpus.session_tokens(loaded.tokenizer, cell["context"], 0) for cell in cells]
    for cell in cells:
        if why := snapshots.too_large(registered, shape_of(loaded), gguf.stat().st_size, cell):
            raise ConfigError(f"{why}: free some, or give a smaller --context")
    with tempfile.TemporaryDirectory(prefix="kvtrial-try-") as folder:
        stage = Stage(
            name="m1",
            run_dir=Path(folder) / "run",
            gguf=gguf,
            model=TrialModel(gguf.stem, models.sha256(gguf)),
            profile="default",
            usable_cpus=machine.usable_cpus(),
            protocol={
                **registered,
                "candidates": pair.arms,
                "cells": cells,
                "decision": {**registered["decision"], "reference": pair.against},
                "m1": {**registered["m1"], "blocks": ATTENTION_BLOCKS, "shapes": []},
            },
        )
        conformance = _conformance(stage, name, 2 if pair.built else 3)
        if conformance["crash"]:  # it would take the timing down too, or never end it
            found = [_untimed(conformance["crash"], pair) for _ in cells]
        else:
            _fill(stage, cells, loaded, texts)
            if pair.built is None:
                _attention(stage, cells)
            plan = sampling(registered, pair, count)
            _decode(dataclasses.replace(stage, name="m2"), cells, plan, pair)
            found = [_results(stage, cell, pair, plan) for cell in cells]
    return {
        "candidate": name,
        "against": pair.against,
        "ref": pair.built.ref if pair.built else None,
        "commit": pair.built.commit if pair.built else None,
        "layouts_differ": pair.layouts_differ,
        "model": gguf.stem,
        "synthetic": bool(loaded.synthetic),
        "context_length": loaded.config.context_length,
        "threads": threads,
        "conformance": conformance,
        "cells": [{"context": cell["context"], **one} for cell, one in zip(cells, found)],
        "note": NOTE,
    }


def _pair(name: str, against: str | None, ref: str | None, gguf: Path) -> Pair:
    """Who is measured; a ref is built here, which takes minutes, so it comes last."""
    if against is None:
        against = name if ref else selection.load(snapshots.shape_of_file(gguf)).default
        _check(name, against, ref)
    build.refuse_stale()
    if ref is None:
        return Pair(name, against)
    built = at_ref(ref, against, _say)
    return Pair(name, built.arm, built)


def _check(name: str, against: str | None, ref: str | None) -> None:
    """Refuse a candidate that can't be measured; of a ref's, its own build says so."""
    for wanted in (name,) if ref or against is None else (name, against):
        why = candidates.get(wanted).not_built
        if why is not None:
            raise CandidateNotBuilt(f"{wanted} is not built: {why}")
    if ref is None and name == against:
        raise NothingToCompare(
            f"{name} is the store that others are tried against; name another, give --against one of "
            f"{', '.join(sorted(set(candidates.candidates()) - {name}))}, or --against-ref a git ref"
        )


# --------------------------------------------------------------------------------------------------
# The parts, in their order


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _conformance(stage: Stage, name: str, parts: int) -> Suite:
    """What the suite says, with the words of each failure."""
    _say(f"1 of {parts}: conformance of {name}")
    out = stage.run_dir / "conformance" / f"{name}.json"
    with (
        exclusive("kvtrial try"),
        Progress("conformance", suite.units([name], PAGE_TOKENS)) as progress,
        suite.followed(progress, name, PAGE_TOKENS) as on_outcome,
    ):
        found = isolated.run_isolated(
            name, out, timeout_s=CONFORMANCE_TIMEOUT_S, on_outcome=on_outcome
        )
    by_status: dict[str, dict[str, str]] = {"passed": {}, "failed": {}, "gap": {}}
    for test, sizes in found["outcomes"].items():
        for page_tokens, outcome in sizes.items():
            by_status[outcome["status"]][f"{test}@P{page_tokens}"] = outcome["detail"]
    return {
        "passed": found["passed"],
        "passed_tests": len(by_status["passed"]),
        "failed": by_status["failed"],
        "gaps": found["gaps"],
        "crash": found["crash"],
    }


def _fill(stage: Stage, cells: list[Cell], model: Any, texts: list[list[int]]) -> None:
    """Name the snapshots of the filled contexts in ``workload.json``, made now where no run has them."""
    facts = snapshots.facts(stage.model, stage.protocol["page_tokens"])
    base = paths.results_dir() / "workloads" / stage.model.name
    found = {}
    for cell, ids in zip(cells, texts):
        context = cell["context"]
        wanted = {**facts, **snapshots.tokens_of(ids, context)}
        whole = (f for f in sorted(base.glob(f"*/{context}-0")) if snapshots.is_whole(f, wanted))
        folder = next(whole, None)
        if folder is None:
            folder = base / snapshots.identity(facts, [ids]) / f"{context}-0"
            with exclusive("kvtrial try"), Progress("prefill", {"the context": 1.0}) as progress:
                report = functools.partial(progress.within, "the context")
                page_tokens = stage.protocol["page_tokens"]
                snapshots.prefill(model, ids, {context: folder}, facts, page_tokens, report)
                progress.done("the context")
        found[str(context)] = [str(folder.resolve())]
    filled = Workload(shape=shape_of(model), snapshots=found, skipped={})
    write_text(stage.run_dir / "workload.json", json.dumps(plain(filled)))


def _attention(stage: Stage, cells: list[Cell]) -> None:
    """One attention region, interleaved, as in stage m1."""
    _say("2 of 3: attention alone")
    with stage.attempt() as attempt:
        runs = m1.cell_runs(stage, attempt, cells, stage.protocol["candidates"])
        _run(runs, "attention", ATTENTION_S)


def _decode(stage: Stage, cells: list[Cell], plan: SamplingPlan, pair: Pair) -> None:
    """Whole decodes in rotation, as in stage m2; the spread of the first blocks says how many there are."""
    _say(
        "3 of 3: decoding"
        if pair.built is None
        else f"2 of 2: decoding, with {pair.against} by turns"
    )
    with stage.attempt() as attempt:
        work = m2.work(stage, pair.arms)
        if pair.built is not None:
            work = Work(m2.MODULE, lambda block, *_: _two_builds(stage, block, pair), pair.arms)
        _run([CellRun(stage, attempt, work, cell, plan) for cell in cells], "decode", BLOCK_S)


def _two_builds(stage: Stage, block: Block, pair: Pair) -> BlockSpec:
    """What the two processes of a block are told: that of ``m2``, each with an interpreter of its own.

    Both keep to one CPU where a decode has one thread: two CPUs of one machine are not equally fast while others
    work on it. The CPUs take turns by block.
    """
    assert pair.built is not None
    cpus = machine.affinity()
    alone = block.cell["threads"] == 1 and hasattr(os, "sched_setaffinity")
    return dataclasses.replace(
        m2.block_spec(stage, block, pair.arms, slow=[]),
        stands_for={pair.against: pair.built.candidate},
        pythons={pair.against: pair.built.python, pair.name: sys.executable},
        cpu=cpus[block.number % len(cpus)] if alone else None,
        compare=False,  # logits are in two processes: their hashes are compared
        alone_steps=0,
    )


def _run(runs: list[CellRun], title: str, seconds: float) -> None:
    """Run cells to their ends; a cell that is given up leaves too few blocks, which is then said."""
    expected = {block.name: seconds for block in planned(runs)}
    with Progress(title, expected, in_seconds=True) as progress:
        if (ended := run_cells(runs, progress)) is not None:
            progress.say(ended[1].reason)


def sampling(registered: Protocol, pair: Pair, count: int | None) -> SamplingPlan:
    """Blocks of a try: ``count``, or as many as make the interval as narrow as `HALF_WIDTH`."""
    return SamplingPlan(
        first=count or FIRST_BLOCKS,
        most=count or MOST_BLOCKS,
        half_width=HALF_WIDTH,
        pairs=((pair.name, pair.against),),
        confidence=registered["decision"]["confidence"],
        most_void=registered["void"]["most"],
    )


# --------------------------------------------------------------------------------------------------
# What came out


#: What is said of each arm's decode, and of its attention alone.
_RATES = ("tokens_per_s", "step_ms_p50", "step_ms_p95")
_FRACTIONS = ("unique_gb_per_s", "ceiling_fraction")
_AGREEMENT = ("kld", "top1", "shift")


def _results(stage: Stage, cell: Cell, pair: Pair, plan: SamplingPlan) -> Figures:
    table, registered = events.read_run(stage.run_dir), stage.protocol
    judged = validity.judge(table, registered)
    rows = judged.valid_rows
    measured = Measured(rows, registered, stage.profile, stage.usable_cpus)
    logs = figures.log_speeds(measured.blocks(cell).values(), pair.name, pair.against)
    described = {arm: measured.arm(cell, arm) or {} for arm in pair.arms}
    failed = table[table["metric"] == "failed"].drop_duplicates(["candidate", "text"])
    wrong = output.reasons(table)
    own = rows[rows["context"] == cell["context"]]
    attention = _within(own, pair, plan) if pair.built else _alone(stage, cell, pair, measured)
    return {
        "decode": {
            **contrast_of(logs, plan).as_json(),
            "arms": {arm: {key: row.get(key) for key in _RATES} for arm, row in described.items()},
            "agreement": {
                **{key: described[pair.name].get(f"logits_{key}") for key in _AGREEMENT},
                "bitwise": _bitwise(own, pair),
            },
        },
        "attention": {
            **attention.as_json(),
            "arms": {
                arm: {key: _over_blocks(own, arm, f"m1/{key}") for key in _FRACTIONS}
                for arm in pair.arms
            },
        },
        "failed": [f"{row.candidate}: {row.text}" for row in failed.itertuples()]
        + [f"{arm}: {text}" for arm, texts in wrong.items() for text in texts],
        "void_blocks": sum(c["void"] for cells in judged.summary.values() for c in cells.values()),
    }


def _alone(stage: Stage, cell: Cell, pair: Pair, measured: Measured) -> Contrast:
    """The contrast of one attention region, as in ``m1``."""
    shape = shapes.name_of(stage.workload.shape)
    times = {
        arm: measured.attention_ms(cell, arm, shape) if shape in measured.shapes else {}
        for arm in pair.arms
    }
    plan = SamplingPlan.fixed(stage.protocol, stage.protocol["m1"]["blocks"])
    return contrast(times[pair.against], times[pair.name], plan)


def _within(rows: pd.DataFrame, pair: Pair, plan: SamplingPlan) -> Contrast:
    """The contrast of the attention regions of the decode's own steps."""
    blocks = figures.blocks(rows, metric="m2/attention_ms")
    return contrast_of(figures.log_speeds(blocks.values(), pair.name, pair.against), plan)


def _bitwise(rows: pd.DataFrame, pair: Pair) -> bool | None:
    """Whether the logits are the same to the last bit; None where an arm has none."""
    own = rows[rows["metric"] == "output_xxh3"].groupby("candidate")["text"].agg(set)
    found = [own.get(arm) for arm in pair.arms]
    return None if None in found else found[0] == found[1]


def _untimed(why: str, pair: Pair) -> Figures:
    """The same without any measurement."""
    nothing = Contrast(None, None, 0, f"it was not timed: {why}").as_json()
    return {
        "decode": {
            **nothing,
            "arms": {arm: dict.fromkeys(_RATES) for arm in pair.arms},
            "agreement": dict.fromkeys((*_AGREEMENT, "bitwise")),
        },
        "attention": {**nothing, "arms": {arm: dict.fromkeys(_FRACTIONS) for arm in pair.arms}},
        "failed": [],
        "void_blocks": 0,
    }


def _over_blocks(rows: pd.DataFrame, name: str, metric: str) -> float | None:
    """Median over blocks of each block's median."""
    own = rows[(rows["candidate"] == name) & (rows["metric"] == metric)]
    return digits(float(own.groupby("block")["value"].median().median())) if len(own) else None
