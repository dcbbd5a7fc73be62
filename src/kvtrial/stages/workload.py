"""Stage ``workload``: real text, prefilled once per model, context and session.

``python -m kvtrial.stages.workload --run-dir DIR --gguf FILE``

Snapshots are shared between runs, below ``workloads/<model>/<workload_id>/<context>-<session>/``:
``k.npy`` and ``v.npy`` (L, N, H_kv, D) float32, and ``tokens.json``, written last.
``workload.json`` in the run's folder says which of them the run loads, relative to the results
folder, and the shape of the stores::

    {"workload_id": …, "shape": {"layers": …}, "snapshots": {"4096": ["workloads/…/4096-0", …]}}

The smaller contexts of a session are prefixes of its larger ones, so one prefill passes through
all. What the snapshots rest on is in their name: the model's bytes and the text's tokens. A later
build loads what an earlier one made; every candidate loads the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtrial import machine, models, workload
from kvtrial.contract import F32, KVSession
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.tokenizer import Tokenizer
from kvtrial.measure.exclusive import exclusive
from kvtrial.measure.stores import opened, shape_of
from kvtrial.run import write_text
from kvtrial.stages.common import Progress, Stage, exit_tracked

#: The store that the prefill runs on.
STORE = "K1"


def contexts(stage: Stage) -> dict[int, int]:
    """Context → sessions, for every stage that loads snapshots; ascending."""
    needed: dict[int, int] = {}
    wanted = [(cell["context"], cell["sessions"]) for cell in stage.cells()]
    wanted.append((stage.protocol["direct_write"]["context"], 1))
    wanted.append((stage.protocol["cold"]["prefix_tokens"], 1))
    for context, sessions in sorted(wanted):
        needed[context] = max(needed.get(context, 0), sessions)
    return needed


def is_whole(folder: Path, ids: list[int]) -> bool:
    """Whether a snapshot of these tokens lies there and its files are what it says."""
    try:
        tokens = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if tokens.get("ids") != ids:
        return False
    return all(
        (folder / name).is_file() and _sha256(folder / name) == tokens["sha256"][name]
        for name in ("k.npy", "v.npy")
    )


def save(folder: Path, session: KVSession, ids: list[int], facts: dict[str, Any]) -> None:
    """Write a session's rows as a snapshot, beside and renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        spec = session.store.spec
        shape = (spec.layers, len(ids), spec.kv_heads, spec.head_dim)
        files = {
            name: np.lib.format.open_memmap(
                beside / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape
            )
            for name in ("k", "v")
        }
        positions = np.arange(len(ids), dtype=np.int64)
        for layer in range(spec.layers):
            files["k"][layer], files["v"][layer] = session.read(layer, positions)
        for file in files.values():
            file.flush()
        sums = {name: _sha256(beside / name) for name in ("k.npy", "v.npy")}
        write_text(beside / "tokens.json", json.dumps({**facts, "ids": ids, "sha256": sums}))
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


#: Positions at which attention costs as much as all else: a prefill's work grows with the square.
_EVEN_POSITIONS = 4096


def share_done(done: int, of: int) -> float:
    """Share of a prefill's work after ``done`` of its positions."""
    return done * (2 * _EVEN_POSITIONS + done) / (of * (2 * _EVEN_POSITIONS + of))


def prefill(
    model: Any,
    ids: list[int],
    folders: dict[int, Path],
    facts: dict[str, Any],
    page_tokens: int,
    report: Callable[[float], None],
) -> None:
    """One session's snapshots: ``folders`` maps each context, ascending, to its folder.

    ``report`` is told the share of the work that is done.
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
                progress=lambda n, _, before=done: report(share_done(before + n, max(folders))),
            )
            done = context
            beyond = context > model.config.context_length
            own = {**facts, "next_id": int(logits.argmax()), "beyond_training_context": beyond}
            save(folder, session, ids[:context], own)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("workload", __doc__, argv)
    needed = contexts(stage)
    sessions = max(needed.values())
    tokenizer = Tokenizer(read_gguf(stage.gguf))
    texts = [
        workload.session_tokens(tokenizer, max(needed), session) for session in range(sessions)
    ]
    name = stage.model["name"]
    digest = hashlib.sha256(json.dumps([stage.model["sha256"], texts]).encode())
    workload_id = digest.hexdigest()[:12]
    results = stage.run_dir.parent
    base = Path("workloads") / name / workload_id
    model = models.load_model(stage.gguf)
    facts = {"model": name, "model_sha256": stage.model["sha256"]}

    def folder(context: int, session: int) -> Path:
        return base / f"{context}-{session}"

    with (
        exclusive(f"workload of {stage.run_dir.name}"),
        Progress("workload", {f"session {s}": 1.0 for s in range(sessions)}) as progress,
    ):
        for session, ids in enumerate(texts):
            own = {
                context: results / folder(context, session)
                for context, count in needed.items()
                if session < count
            }
            if not all(is_whole(path, ids[:context]) for context, path in own.items()):
                report = functools.partial(progress.within, f"session {session}")
                prefill(model, ids, own, facts, stage.protocol["page_tokens"], report)
            progress.done(f"session {session}")
    document = {
        "workload_id": workload_id,
        "shape": shape_of(model),
        "snapshots": {
            str(context): [folder(context, session).as_posix() for session in range(count)]
            for context, count in needed.items()
        },
    }
    write_text(stage.run_dir / "workload.json", json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    exit_tracked("workload", main)
