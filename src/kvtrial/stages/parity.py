"""Stage ``parity``: every arm's logits beside the baseline's, and what reduced precision costs. Untimed.

``python -m kvtrial.stages.parity --run-dir DIR --gguf FILE``

Reads ``manifest.json``, ``protocol.json`` and ``workload.json`` of the run; writes
``events/parity.parquet``. All texts are teacher-forced with FP32 activations, so that rounding of
activations amplifies nothing. ``context`` 0 is the prompt set, where ``index`` is the prompt; at the
filled contexts it is the chunk. The rows are facts; who is in parity and whose quality is shown is
`kvtrial.decision.parity`'s and `kvtrial.decision.quality`'s to say.
"""

from __future__ import annotations

from typing import Any

import yaml

from kvtrial.decision import quality
from kvtrial.decision.parity import contexts
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.tokenizer import Tokenizer
from kvtrial.host import machine, paths
from kvtrial.measure.specs import ParitySpec
from kvtrial.registration import Protocol
from kvtrial.run import corpus, protocol
from kvtrial.stages.common import Stage, StageError, exit_tracked, run_arms
from kvtrial.stages.progress import Progress

MODULE = "kvtrial.measure.parity"
#: Decoded steps that take as long as a text at most: as many as a scalar arm's chunk has positions, or more.
TEXT_STEPS = 16
#: Its share of the time is about that of so many filled positions.
_PROMPTS_WEIGHT = 4096.0


def prompts(stage: Stage) -> list[list[int]]:
    """Token ids of config/prompts.yaml; `StageError` if they are not the registered ones."""
    path = paths.config_file("prompts.yaml")
    texts = yaml.safe_load(path.read_text(encoding="utf-8"))["prompts"]
    found, wanted = protocol.sha256(texts), stage.protocol["parity"]["prompts_sha256"]
    if found != wanted:
        raise StageError(
            f"the prompts of {path} have sha256 {found}; registered: {wanted}; put the file back, or "
            "write the new hash into the protocol's parity.prompts_sha256: that makes another run"
        )
    tokenizer = Tokenizer(read_gguf(stage.gguf))
    return [tokenizer.encode(text) for text in texts]


def judged(registered: Protocol, profile: str, name: str) -> bool:
    """Whether it is an arm of reduced precision that is timed: its quality decides whether it may be run."""
    reduced = name in registered["decision"]["profiles"]
    return reduced and name not in protocol.untimed(registered, profile)


def chunks(registered: Protocol, profile: str, name: str, context: int, trained: int) -> int:
    """Chunks over which a candidate is compared with `parity.comparison` at a context."""
    if judged(registered, profile, name):
        return quality.chunks(registered, context, trained)
    rules = registered["parity"]
    return int(rules["slow_chunks" if name in rules["slow"] else "chunks"])


def decode_steps(registered: Protocol, profile: str, name: str, context: int) -> int:
    """Decoded steps over which a candidate is compared at a context."""
    decode = registered["quality"]["decode"]
    if judged(registered, profile, name) and context == decode["context"]:
        return int(decode["steps"])
    return int(registered["parity"]["decode_steps"])


def positions(registered: Protocol, count: int) -> list[int]:
    """Positions of each place that so many chunks have, which lie in the places by turns."""
    places, tokens = registered["quality"]["places"], registered["quality"]["chunk_tokens"]
    return [tokens * len(range(place, count, places)) for place in range(places)]


def prompts_spec(stage: Stage, arms: list[str]) -> ParitySpec:
    """The prompt set, against the baseline."""
    texts = prompts(stage)
    return _spec(
        stage,
        arms,
        snapshot=None,
        texts=texts,
        reference=stage.protocol["parity"]["baseline"],
        positions={name: [len(ids) for ids in texts] for name in arms},
        chunk=None,
        decode={},
    )


def context_spec(
    stage: Stage, tokenizer: Tokenizer, arms: list[str], context: int, trained: int
) -> ParitySpec:
    """A filled context, against the comparison, the baseline among the others."""
    registered = stage.protocol
    rules = registered["quality"]
    lengths = {
        name: positions(registered, chunks(registered, stage.profile, name, context, trained))
        for name in arms
    }
    longest = max(max(of_places) for of_places in lengths.values())
    return _spec(
        stage,
        arms,
        snapshot=stage.snapshots(context, 1)[0],
        texts=corpus.places(tokenizer, context, rules["places"], longest),
        reference=registered["parity"]["comparison"],
        positions=lengths,
        chunk=rules["chunk_tokens"],
        decode={name: decode_steps(registered, stage.profile, name, context) for name in arms},
    )


def _spec(stage: Stage, arms: list[str], **own: Any) -> ParitySpec:
    return ParitySpec(
        candidates=arms,
        gguf=str(stage.gguf),
        page_tokens=stage.protocol["page_tokens"],
        threads=machine.usable_cpus(),
        # A text takes about as long as so many steps.
        step_limit_s=stage.protocol["rotation"]["step_limit_s"] * TEXT_STEPS,
        **own,
    )


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("parity", __doc__, argv)
    rules = stage.protocol["parity"]
    file = read_gguf(stage.gguf)
    trained, tokenizer = ModelConfig.from_gguf(file).context_length, Tokenizer(file)
    with stage.attempt() as attempt:
        arms = stage.runnable(attempt, timed=False)
        for key in ("baseline", "comparison"):
            if rules[key] not in arms:
                raise StageError(
                    f"parity needs its {key} {rules[key]}, which can't run here; see "
                    "`kvtrial candidates`"
                )
        held = contexts({**stage.protocol, "cells": stage.measured_cells(attempt)})
        weights = {f"context{context}": _PROMPTS_WEIGHT + context for context in held}
        weights = {"prompts": _PROMPTS_WEIGHT, **weights}
        with Progress("parity", weights) as progress:
            for unit, context in zip(weights, [0, *held]):
                if not attempt.has(unit):
                    if context:
                        spec = context_spec(stage, tokenizer, arms, context, trained)
                    else:
                        spec = prompts_spec(stage, arms)
                    columns = {"context": context, "sessions": 1, "threads": spec.threads}
                    rows = run_arms(stage, attempt, MODULE, spec, columns)
                    attempt.put(unit, stage.events(rows, **columns))
                progress.done(unit)
    return 0


if __name__ == "__main__":
    exit_tracked("parity", main)
