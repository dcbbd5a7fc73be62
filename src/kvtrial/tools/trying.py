"""``kvtrial try NAME``: a first look at a candidate that somebody is working on.

Conformance, one attention region and the decode at the primary context, or at others, in rotation with the
adopted store by the stages' own functions, with the trial's own intervals. It decides
nothing: a few cells against one store are no trial. Nothing is left behind but the snapshot of the
filled context, which runs share.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvtrial import candidates
from kvtrial.conformance import isolated
from kvtrial.contract import PAGE_TOKENS, CandidateNotBuilt
from kvtrial.decision import labels, output, validity
from kvtrial.decision.contrasts import Measured, contrast, contrast_of, digits
from kvtrial.host import build, machine, paths, printed, selection
from kvtrial.host.files import write_text
from kvtrial.measure import figures, shapes
from kvtrial.measure.exclusive import exclusive
from kvtrial.measure.plan import SamplingPlan
from kvtrial.measure.stores import shape_of
from kvtrial.registration import Cell, Protocol
from kvtrial.run import corpus, events, models, protocol
from kvtrial.run.layout import ConfigError
from kvtrial.show import answers
from kvtrial.stages import conformance as suite
from kvtrial.stages import m1, m2
from kvtrial.stages import workload as snapshots
from kvtrial.stages.common import CellRun, Stage, planned, run_cells
from kvtrial.stages.progress import Progress

#: Blocks of the decode: first, and at most, by their spread; and what they are to reach, of the log ratio.
FIRST_BLOCKS, MOST_BLOCKS, HALF_WIDTH = 6, 16, 0.02
FEWEST_BLOCKS = 2
#: What a block is taken to need before one was seen.
BLOCK_S, ATTENTION_S = 5.0, 5.0
ATTENTION_BLOCKS = 3
CONFORMANCE_TIMEOUT_S = 600.0
NOTE = "nothing is adopted from this: `make verdict` measures every context and decides"


class NothingToCompare(ConfigError):
    """A candidate was to be tried against itself."""


def measure(
    name: str,
    *,
    model: str,
    against: str | None = None,
    contexts: Sequence[int] = (),
    threads: int = 1,
    count: int | None = None,
) -> dict[str, Any]:
    """Try a candidate; about a minute and a half at the registered context.

    Parameters
    ----------
    name : str
        A registered candidate.
    model : str
        A name of config/models.yaml, or the path of a GGUF file.
    against : str, optional
        Another candidate; by default the adopted store.
    contexts : ints, optional
        Filled positions, one after the other; by default those of the primary cell.
    threads : int
        Threads of a decode.
    count : int, optional
        Blocks of a decode; by default as many as make the interval as narrow as `HALF_WIDTH`.

    Returns
    -------
    dict
        JSON-safe: ``conformance``, what it is of, and ``cells``: for each context ``decode``, ``attention``,
        ``failed`` and ``void_blocks``.

    Raises
    ------
    UnknownCandidate, CandidateNotBuilt, NothingToCompare, StaleBuild, UnknownModel, ModelNotFetched
    WorkloadError
        The registered text is shorter than a context.
    ConfigError
        A context does not fit in memory, or too few blocks were asked for.
    """
    registered = protocol.load(paths.config_file("protocol.yaml"))
    against = against or selection.load().default
    _check(name, against)
    primary = next(cell for cell in registered["cells"] if cell["role"] == "primary")
    cells: list[Cell] = [
        {**primary, "sessions": 1, "threads": threads, "context": context}
        for context in contexts or [primary["context"]]
    ]
    gguf = models.path_of(model)
    if count is not None and count < FEWEST_BLOCKS:
        raise ConfigError(f"{count} blocks give no interval; give {FEWEST_BLOCKS} or more")
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
            model={"name": gguf.stem, "sha256": models.sha256(gguf)},
            profile="default",
            usable_cpus=machine.usable_cpus(),
            protocol={
                **registered,
                "candidates": [against, name],
                "cells": cells,
                "decision": {**registered["decision"], "reference": against},
                "m1": {**registered["m1"], "blocks": ATTENTION_BLOCKS, "shapes": []},
            },
        )
        conformance = _conformance(stage, name)
        if conformance["crash"]:  # it would take the timing down too, or never end it
            found = [_untimed(conformance["crash"], (name, against)) for _ in cells]
        else:
            _fill(stage, cells, loaded, texts)
            _attention(stage, cells)
            plan = sampling(registered, name, against, count)
            _decode(dataclasses.replace(stage, name="m2"), cells, plan)
            found = [_results(stage, cell, name, against, plan) for cell in cells]
    return {
        "candidate": name,
        "against": against,
        "layouts_differ": candidates.get(name).layout != candidates.get(against).layout,
        "model": gguf.stem,
        "synthetic": bool(loaded.synthetic),
        "threads": threads,
        "conformance": conformance,
        "cells": [{"context": cell["context"], **one} for cell, one in zip(cells, found)],
        "note": NOTE,
    }


def sound(document: dict[str, Any]) -> bool:
    """Whether the candidate passed the suite and could be measured at every context."""
    timed = all(cell["decode"]["ratio"] is not None for cell in document["cells"])
    return bool(document["conformance"]["passed"]) and timed


def slower(document: dict[str, Any], limit: float) -> list[int]:
    """Contexts at which the whole interval of the decode lies below ``limit``."""
    return [
        cell["context"]
        for cell in document["cells"]
        if cell["decode"]["ratio"] is not None and cell["decode"]["ci95"][1] < limit
    ]


def _check(name: str, against: str) -> None:
    for wanted in (name, against):
        why = candidates.get(wanted).not_built
        if why is not None:
            raise CandidateNotBuilt(f"{wanted} is not built: {why}")
    if name == against:
        raise NothingToCompare(
            f"{name} is the store that others are tried against; name another, or give --against "
            f"one of {', '.join(sorted(set(candidates.candidates()) - {name}))}"
        )
    build.refuse_stale()


# --------------------------------------------------------------------------------------------------
# The parts, in their order


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _conformance(stage: Stage, name: str) -> dict[str, Any]:
    """What the suite says, with the words of each failure."""
    _say(f"1 of 3: conformance of {name}")
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
    base = paths.results_dir() / "workloads" / stage.model["name"]
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
    document = {"shape": shape_of(model), "snapshots": found, "skipped": {}}
    write_text(stage.run_dir / "workload.json", json.dumps(document))


def _attention(stage: Stage, cells: list[Cell]) -> None:
    """One attention region, interleaved, as in stage m1."""
    _say("2 of 3: attention alone")
    with stage.attempt() as attempt:
        runs = m1.cell_runs(stage, attempt, cells, stage.protocol["candidates"])
        _run(runs, "attention", ATTENTION_S)


def _decode(stage: Stage, cells: list[Cell], plan: SamplingPlan) -> None:
    """Whole decodes in rotation, as in stage m2; the spread of the first blocks says how many there are."""
    _say("3 of 3: decoding")
    with stage.attempt() as attempt:
        work = m2.work(stage, stage.protocol["candidates"])
        _run([CellRun(stage, attempt, work, cell, plan) for cell in cells], "decode", BLOCK_S)


def _run(runs: list[CellRun], title: str, seconds: float) -> None:
    """Run cells to their ends; a cell that is given up leaves too few blocks, which is then said."""
    expected = {block.name: seconds for block in planned(runs)}
    with Progress(title, expected, in_seconds=True) as progress:
        if (ended := run_cells(runs, progress)) is not None:
            progress.say(ended[1].reason)


def sampling(registered: Protocol, name: str, against: str, count: int | None) -> SamplingPlan:
    """Blocks of a try: ``count``, or as many as make the interval as narrow as `HALF_WIDTH`."""
    return SamplingPlan(
        first=count or FIRST_BLOCKS,
        most=count or MOST_BLOCKS,
        half_width=HALF_WIDTH,
        pairs=((name, against),),
        confidence=registered["decision"]["confidence"],
        most_void=registered["void"]["most"],
    )


# --------------------------------------------------------------------------------------------------
# What came out


#: What is said of each arm's decode, and of its attention alone.
_RATES = ("tokens_per_s", "step_ms_p50", "step_ms_p95")
_FRACTIONS = ("unique_gb_per_s", "ceiling_fraction")


def _results(
    stage: Stage, cell: Cell, name: str, against: str, plan: SamplingPlan
) -> dict[str, Any]:
    table, registered = events.read_run(stage.run_dir), stage.protocol
    judged = validity.judge(table, registered)
    rows = judged.valid_rows
    measured = Measured(rows, registered, stage.profile, stage.usable_cpus)
    logs = figures.log_speeds(measured.blocks(cell).values(), name, against)
    decode = contrast_of(logs, plan)
    shape = shapes.name_of(stage.workload["shape"])
    times = {
        arm: measured.attention_ms(cell, arm, shape) if shape in measured.shapes else {}
        for arm in (name, against)
    }
    alone = SamplingPlan.fixed(registered, registered["m1"]["blocks"])
    attention = contrast(times[against], times[name], alone)
    described = {arm: measured.arm(cell, arm) or {} for arm in (name, against)}
    failed = table[table["metric"] == "failed"].drop_duplicates(["candidate", "text"])
    wrong = output.reasons(table)
    return {
        "decode": {
            **decode,
            "arms": {arm: {key: row.get(key) for key in _RATES} for arm, row in described.items()},
            "agreement": {
                key: described[name].get(f"logits_{key}") for key in ("kld", "top1", "shift")
            },
        },
        "attention": {
            **attention,
            "arms": {
                arm: {key: _over_blocks(rows, arm, f"m1/{key}") for key in _FRACTIONS}
                for arm in (name, against)
            },
        },
        "failed": [f"{row.candidate}: {row.text}" for row in failed.itertuples()]
        + [f"{arm}: {text}" for arm, texts in wrong.items() for text in texts],
        "void_blocks": sum(c["void"] for cells in judged.summary.values() for c in cells.values()),
    }


def _untimed(why: str, arms: tuple[str, str]) -> dict[str, Any]:
    """The same without any measurement."""
    nothing = {"ratio": None, "ci95": None, "n_blocks": 0, "problem": f"it was not timed: {why}"}
    return {
        "decode": {
            **nothing,
            "arms": {arm: dict.fromkeys(_RATES) for arm in arms},
            "agreement": dict.fromkeys(("kld", "top1", "shift")),
        },
        "attention": {**nothing, "arms": {arm: dict.fromkeys(_FRACTIONS) for arm in arms}},
        "failed": [],
        "void_blocks": 0,
    }


def _over_blocks(rows: pd.DataFrame, name: str, metric: str) -> float | None:
    """Median over blocks of each block's median."""
    own = rows[(rows["candidate"] == name) & (rows["metric"] == metric)]
    return digits(float(own.groupby("block")["value"].median().median())) if len(own) else None


def sentence(document: dict[str, Any], cell: dict[str, Any]) -> str:
    """The result at a context: ``MINE is 1.08x K1 at 4,096 [1.06, 1.10]: faster``."""
    name, against, decode = document["candidate"], document["against"], cell["decode"]
    if decode["ratio"] is None:
        return f"{name} at {cell['context']:,}: no interval, {decode['problem']}"
    low, high = decode["ci95"]
    reading = "no difference is shown"
    if low > 1 or high < 1:
        reading = "faster" if low > 1 else "slower"
    return (
        f"{name} is {decode['ratio']:.3f}x {against} at {cell['context']:,} [{low:.3f}, {high:.3f}]: "
        f"{reading}"
    )


#: Column of the table → the figure of an arm at a context: of its decode, then of its attention alone.
_COLUMNS = {
    "tokens/s": ("decode", "tokens_per_s"),
    "p50 ms": ("decode", "step_ms_p50"),
    "p95 ms": ("decode", "step_ms_p95"),
    "attention GB/s": ("attention", "unique_gb_per_s"),
    "of ceiling": ("attention", "ceiling_fraction"),
}


def _rows(document: dict[str, Any]) -> list[list[str]]:
    """Context, store and the figures of `_COLUMNS`, as text."""
    return [
        [
            f"{cell['context']:,}",
            arm,
            *(_number(cell[part]["arms"][arm][key]) for part, key in _COLUMNS.values()),
        ]
        for cell in document["cells"]
        for arm in (document["candidate"], document["against"])
    ]


def _title(document: dict[str, Any]) -> str:
    model = document["model"] + (" (synthetic weights)" if document["synthetic"] else "")
    pair = f"{document['candidate']} against {document['against']}{labels.of_contrast(document)}"
    threads = f", {document['threads']} threads" if document["threads"] > 1 else ""
    return f"{pair}, {model}{threads}"


def _suite(document: dict[str, Any]) -> str:
    suite = document["conformance"]
    word = f"conformance: {suite['passed_tests']} passed, {len(suite['failed'])} failed"
    return word + (f"; {suite['crash']}" if suite["crash"] else "")


def _troubles(document: dict[str, Any]) -> list[str]:
    """What failed: checks of the suite, then arms."""
    suite = document["conformance"]
    found = [f"{test}: {why}" for test, why in suite["failed"].items()]
    return found + [f"failed: {text}" for cell in document["cells"] for text in cell["failed"]]


def render(document: dict[str, Any]) -> Any:
    """The document as rich text, worst news first and the result last."""
    from rich.console import Group
    from rich.text import Text

    passed = document["conformance"]["passed"]
    parts: list[Any] = [Text(_title(document), "bold")]
    parts.append(Text(_suite(document), "green" if passed else "bold red"))
    parts += [Text(f"  {text}", "red") for text in _troubles(document)]
    parts += [Text(f"  gap: {gap}") for gap in document["conformance"]["gaps"]]
    table = printed.table(box=None, padding=(0, 2, 0, 0))
    for column in ("context", "store", *_COLUMNS):
        table.add_column(column, justify="left" if column == "store" else "right")
    for row in _rows(document):
        table.add_row(*row)
    parts.append(table)
    for cell in document["cells"]:
        parts += [Text(text, "dim") for text in _details(document, cell)]
    parts.append(Text(document["note"], "dim"))
    parts += [Text(sentence(document, cell), "bold") for cell in document["cells"]]
    return Group(*parts)


def _details(document: dict[str, Any], cell: dict[str, Any]) -> list[str]:
    """What else was seen at a context."""
    attention, agreement = cell["attention"], cell["decode"]["agreement"]
    found = []
    if attention["ratio"] is not None:
        found.append(
            f"{cell['context']:,}: attention alone {answers.interval(attention)}x, {attention['n_blocks']} blocks; "
            f"decode {cell['decode']['n_blocks']} blocks"
        )
    if agreement["kld"] is not None:
        found.append(
            f"{cell['context']:,}: beside {document['against']}'s logits: KLD {agreement['kld']:.2g}, top token "
            f"equal in {agreement['top1']:.0%}"
        )
    if cell["void_blocks"]:
        found.append(
            f"{cell['context']:,}: {cell['void_blocks']} runs of blocks were void and repeated"
        )
    return found


def markdown(document: dict[str, Any]) -> str:
    """The same for a pull request: the sentences, then the table."""
    lines = [f"**{sentence(document, cell)}**" for cell in document["cells"]]
    lines += ["", _title(document), "", _suite(document)]
    lines += [f"- {text}" for text in _troubles(document)]
    header = ["context", "store", *_COLUMNS]
    rule = ["---" if name == "store" else "---:" for name in header]
    lines += ["", *(f"| {' | '.join(row)} |" for row in (header, rule, *_rows(document)))]
    return "\n".join([*lines, ""])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
