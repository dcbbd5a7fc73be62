"""Stage ``fp16_parity``: every arm's greedy tokens and logits beside the baseline's, untimed.

``python -m kvtrial.stages.parity --run-dir DIR --gguf FILE``

Reads ``manifest.json`` and ``protocol.json`` of the run; writes ``events/fp16_parity.parquet``, in
which ``block`` is the prompt. Activations are FP32, so that their rounding amplifies nothing. The
rows are facts; which steps count and who is in parity is `kvtrial.decision.parity`'s to say.
"""

from __future__ import annotations

import itertools

import yaml

from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.tokenizer import Tokenizer
from kvtrial.host import paths
from kvtrial.run import protocol
from kvtrial.stages.common import Stage, StageError, exit_tracked, run_arms
from kvtrial.stages.progress import Progress

#: They decode in lockstep, and are a unit of the journal.
PROMPTS_A_PROCESS = 4
COLUMNS = {"context": 0, "sessions": 1, "threads": 1}


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


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("fp16_parity", __doc__, argv)
    rules = stage.protocol["parity"]
    numbered = {str(i): ids for i, ids in enumerate(prompts(stage))}
    groups = [
        dict(itertools.islice(numbered.items(), start, start + PROMPTS_A_PROCESS))
        for start in range(0, len(numbered), PROMPTS_A_PROCESS)
    ]
    names = [f"prompts{int(min(group, key=int)):02d}" for group in groups]
    with (
        stage.attempt() as attempt,
        Progress("fp16_parity", dict.fromkeys(names, 1.0)) as progress,
    ):
        arms = stage.runnable(attempt, timed=False)
        if rules["baseline"] not in arms:
            raise StageError(
                f"parity needs its baseline {rules['baseline']}, which can't run here; see "
                f"`kvtrial candidates`"
            )
        for unit, group in zip(names, groups):
            if not attempt.has(unit):
                spec = {
                    "gguf": str(stage.gguf),
                    "baseline": rules["baseline"],
                    "prompts": group,
                    "steps": rules["steps_per_prompt"],
                    "page_tokens": stage.protocol["page_tokens"],
                    "threads": COLUMNS["threads"],
                }
                rows = run_arms(stage, attempt, "kvtrial.measure.parity", arms, spec, COLUMNS)
                attempt.put(unit, stage.events(rows, **COLUMNS))
            progress.done(unit)
    return 0


if __name__ == "__main__":
    exit_tracked("fp16_parity", main)
