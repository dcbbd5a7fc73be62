"""Stage ``workload``: real text, prefilled once per model, context and session.

``python -m kvtrial.stages.workload --run-dir DIR --gguf FILE``

Snapshots are shared between runs, below ``workloads/<model>/<workload_id>/<context>-<session>/``:
``k.npy`` and ``v.npy`` (L, N, H_kv, D) float32, and ``tokens.json``, written last.
``workload.json`` in the run's folder says which of them the run loads, relative to the results
folder, and the shape of the stores::

    {"workload_id": …, "shape": {"layers": …}, "snapshots": {"4096": ["workloads/…/4096-0", …]},
     "skipped": {"16384x4x1": "4 sessions of 16384 positions need …"}}

The smaller contexts of a session are prefixes of its larger ones, so one prefill passes through
all. With each snapshot comes its forced stream, the text's own next tokens (``forced`` in
``tokens.json``). What the snapshots rest on is in their name: the model's bytes, the text's tokens
and the way of making (`way`). So one that was made another way is never loaded, and every candidate
loads the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from kvtrial.contract import F32, KVSession
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.tokenizer import Tokenizer
from kvtrial.host import build, machine
from kvtrial.host.files import write_text
from kvtrial.host.records import plain
from kvtrial.measure.exclusive import exclusive
from kvtrial.measure.plan import cell_name
from kvtrial.measure.stores import HEADROOM_BYTES, largest_bytes, opened, shape_of
from kvtrial.registration import Protocol
from kvtrial.run import corpus, models
from kvtrial.stages import m2
from kvtrial.stages.common import Cell, Stage, TrialModel, Workload, exit_tracked
from kvtrial.stages.progress import Progress

#: The store that the prefill runs on.
STORE = "K1"
#: Of the prefill: rows are as exact as they get, so that no arm is measured on another one's rounding.
ACTIVATIONS = "fp32"


def shape_of_file(gguf: Path) -> dict[str, int]:
    """The store's shape for the model in a file, without loading its weights."""
    return ModelConfig.from_gguf(read_gguf(gguf)).store_shape


def fewest_together(protocol: Protocol) -> int:
    """Arms that a group of the rotation holds at least: the reference, the tested challenger and one more."""
    return min(3, len(protocol["candidates"]))


def memory_needed(protocol: Protocol, shape: dict[str, int], weight_bytes: int, cell: Cell) -> int:
    """Bytes without which a cell can't be measured: its smallest group, each arm as large as the largest."""
    tokens = cell["context"] + m2.steps_of(protocol, cell, len(protocol["candidates"]))
    pool = largest_bytes(
        protocol["candidates"],
        shape,
        tokens=tokens,
        sessions=cell["sessions"],
        page_tokens=protocol["page_tokens"],
    )
    return fewest_together(protocol) * pool + weight_bytes + HEADROOM_BYTES


def too_large(
    protocol: Protocol, shape: dict[str, int], weight_bytes: int, cell: Cell
) -> str | None:
    """Why this machine can't hold a cell, or None: to swap would measure the disk."""
    needed = memory_needed(protocol, shape, weight_bytes, cell)
    available = machine.available_memory_bytes()
    if needed <= available:
        return None
    return (
        f"{fewest_together(protocol)} arms with {cell['sessions']} sessions of {cell['context']} positions need "
        f"{needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available"
    )


def contexts(protocol: Protocol, cells: list[Cell]) -> dict[int, int]:
    """Context → sessions, for every stage that loads snapshots; ascending."""
    needed: dict[int, int] = {}
    wanted = [(cell["context"], cell["sessions"]) for cell in cells]
    wanted.append((protocol["direct_write"]["context"], 1))
    if "control" in protocol:
        wanted.append((protocol["control"]["context"], 1))
    wanted.append((protocol["cold"]["prefix_tokens"], 1))
    for context, sessions in sorted(wanted):
        needed[context] = max(needed.get(context, 0), sessions)
    return needed


class Way(TypedDict):
    """How snapshots are made."""

    activations: str
    store: str
    page_tokens: int
    rows_sha256: str


class Facts(TypedDict):
    """What ``tokens.json`` says of a snapshot beside its tokens."""

    model: str
    model_sha256: str
    made: Way


def way(page_tokens: int) -> Way:
    """How snapshots are made here: whatever changes a bit of their rows, but for model and text."""
    return {
        "activations": ACTIVATIONS,
        "store": STORE,
        "page_tokens": page_tokens,
        "rows_sha256": build.facts()["rows_sha256"],
    }


def facts(model: TrialModel, page_tokens: int) -> Facts:
    """Those of a snapshot that is made here."""
    return {"model": model.name, "model_sha256": model.sha256, "made": way(page_tokens)}


def tokens_of(ids: list[int], context: int) -> dict[str, list[int]]:
    """``ids`` that fill a context, and the ``forced`` stream behind them, of a session's tokens."""
    return {"ids": ids[:context], "forced": ids[context : context + corpus.FORCED_TOKENS]}


def is_whole(folder: Path, facts: Mapping[str, object]) -> bool:
    """Whether a snapshot of which these facts are true lies there and its files are what it says."""
    try:
        found = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not facts.items() <= found.items():
        return False
    return all(
        (folder / name).is_file() and _sha256(folder / name) == found["sha256"][name]
        for name in ("k.npy", "v.npy")
    )


def save(folder: Path, session: KVSession, facts: Mapping[str, object]) -> None:
    """Write a session's rows and what is to be said of them as a snapshot, beside and renamed."""
    rows = session.length(0)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        spec = session.store.spec
        shape = (spec.layers, rows, spec.kv_heads, spec.head_dim)
        files = {
            name: np.lib.format.open_memmap(
                beside / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape
            )
            for name in ("k", "v")
        }
        positions = np.arange(rows, dtype=np.int64)
        for layer in range(spec.layers):
            files["k"][layer], files["v"][layer] = session.read(layer, positions)
        for file in files.values():
            file.flush()
        sums = {name: _sha256(beside / name) for name in ("k.npy", "v.npy")}
        write_text(beside / "tokens.json", json.dumps({**facts, "sha256": sums}))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


#: Positions at which attention costs as much as all else, roughly: a prefill's work grows with the square.
_EVEN_POSITIONS = 2048


def work(positions: int) -> float:
    """The work of a prefill of so many positions, in units of the first one's."""
    return positions * (1 + positions / (2 * _EVEN_POSITIONS))


def share_done(done: int, of: int) -> float:
    """Share of a prefill's work after ``done`` of its positions."""
    return work(done) / work(of)


def prefill(
    model: Any,
    ids: list[int],
    folders: dict[int, Path],
    facts: Facts,
    page_tokens: int,
    report: Callable[[float], None],
) -> None:
    """One session's snapshots: ``folders`` maps each context, ascending, to its folder.

    ``ids`` fill the largest one and go on with its forced stream; ``report`` is told the share of the
    work that is done.
    """
    threads = machine.usable_cpus()
    with opened(
        STORE, shape_of(model), tokens=max(folders), page_tokens=page_tokens, threads=threads
    ) as (_, (session,)):
        done = 0
        for context, folder in folders.items():
            logits: F32 = model.prefill(
                session,
                ids[done:context],
                threads=threads,
                activations=ACTIVATIONS,
                progress=lambda n, _, before=done: report(share_done(before + n, max(folders))),
            )
            done = context
            beyond = context > model.config.context_length
            own = {"next_id": int(logits.argmax()), "beyond_training_context": beyond}
            save(folder, session, {**facts, **tokens_of(ids, context), **own})


def identity(facts: Facts, texts: list[list[int]]) -> str:
    """12 hex digits of what snapshots rest on: the model's bytes, the way of making and the tokens."""
    parts = [facts["model_sha256"], facts["made"], texts]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Plan:
    """The snapshots that a run loads.

    Attributes
    ----------
    shape : dict
        Of the stores: layers, q_heads, kv_heads, head_dim.
    skipped : dict of str to str
        Cell → why this machine can't hold it.
    needed : dict of int to int
        Context → sessions, ascending.
    texts : list of list of int
        Token ids of each session: those of the largest context and of its forced stream.
    facts : Facts
        What every snapshot's ``tokens.json`` says of model and way of making.
    workload_id : str
        Names the model's bytes, those tokens and the way of making.
    base : Path
        Where the snapshots lie, relative to the results.
    """

    shape: dict[str, int]
    skipped: dict[str, str]
    needed: dict[int, int]
    texts: list[list[int]]
    facts: Facts
    workload_id: str
    base: Path

    @classmethod
    def of(cls, stage: Stage) -> Plan:
        """The plan of a run on this machine, as much memory as it has now."""
        shape, weight_bytes = shape_of_file(stage.gguf), stage.gguf.stat().st_size
        skipped = {
            cell_name(cell): reason
            for cell in stage.cells()
            if (reason := too_large(stage.protocol, shape, weight_bytes, cell)) is not None
        }
        held = [cell for cell in stage.cells() if cell_name(cell) not in skipped]
        needed = contexts(stage.protocol, held)
        tokenizer = Tokenizer(read_gguf(stage.gguf))
        texts = [
            corpus.session_tokens(tokenizer, max(needed), session)
            for session in range(max(needed.values()))
        ]
        own = facts(stage.model, stage.protocol["page_tokens"])
        workload_id = identity(own, texts)
        base = Path("workloads") / stage.model.name / workload_id
        return cls(shape, skipped, needed, texts, own, workload_id, base)

    def held(self, cells: list[Cell]) -> list[Cell]:
        """Those of the cells that this machine can hold."""
        return [cell for cell in cells if cell_name(cell) not in self.skipped]

    def folders(self, session: int) -> dict[int, Path]:
        """Context → folder of a session's snapshots, relative to the results; ascending."""
        return {
            context: self.base / f"{context}-{session}"
            for context, count in self.needed.items()
            if session < count
        }

    def incomplete(self, results: Path) -> list[int]:
        """Sessions that have yet to be prefilled."""
        return [
            session
            for session, ids in enumerate(self.texts)
            if not all(
                is_whole(results / folder, {**self.facts, **tokens_of(ids, context)})
                for context, folder in self.folders(session).items()
            )
        ]


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("workload", __doc__, argv)
    plan = Plan.of(stage)
    for name, reason in plan.skipped.items():
        print(f"workload: cell {name} is left out: {reason}", file=sys.stderr, flush=True)
    results = stage.run_dir.parent
    units = {session: f"session {session}" for session in range(len(plan.texts))}
    with (
        exclusive(f"workload of {stage.run_dir.name}"),
        Progress("workload", dict.fromkeys(units.values(), 1.0)) as progress,
    ):
        missing = plan.incomplete(results)
        for session in sorted(units.keys() - set(missing)):
            progress.done(units[session], "it was there")
        model = models.load_model(stage.gguf) if missing else None
        for session in missing:
            folders = {c: results / folder for c, folder in plan.folders(session).items()}
            report = functools.partial(progress.within, units[session])
            page_tokens = stage.protocol["page_tokens"]
            prefill(model, plan.texts[session], folders, plan.facts, page_tokens, report)
            progress.done(units[session])
    made = Workload(
        workload_id=plan.workload_id,
        shape=plan.shape,
        skipped=plan.skipped,
        snapshots={
            str(context): [plan.folders(session)[context].as_posix() for session in range(count)]
            for context, count in plan.needed.items()
        },
    )
    write_text(stage.run_dir / "workload.json", json.dumps(plain(made), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    exit_tracked("workload", main)
