"""Stage ``fp16_parity``: every arm's greedy tokens and logits beside the baseline's, untimed.

``python -m kvtrial.stages.fp16_parity --run-dir DIR --gguf FILE``

Reads ``manifest.json`` and ``protocol.json`` of the run; writes ``events/fp16_parity.parquet``, in
which ``block`` is the prompt. Activations are FP32, so that their rounding amplifies nothing. The
rows are facts; which steps count and who is in parity is `kvtrial.parity`'s to say.
"""

from __future__ import annotations

from typing import Any

import yaml

from kvtrial import paths
from kvtrial.engine.gguf import read_gguf
from kvtrial.engine.tokenizer import Tokenizer
from kvtrial.stages.common import Progress, Stage, run_arms

COLUMNS = {"context": 0, "sessions": 1, "threads": 1}


def prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of the registered prompts, config/prompts.yaml."""
    path = paths.config_dir() / "prompts.yaml"
    texts = yaml.safe_load(path.read_text(encoding="utf-8"))["prompts"]
    return [tokenizer.encode(text) for text in texts]


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    stage = Stage.from_command_line("fp16_parity", __doc__, argv)
    rules = stage.protocol["parity"]
    baseline = rules["baseline"]
    prompt_ids = prompts(Tokenizer(read_gguf(stage.gguf)))
    with (
        stage.attempt() as attempt,
        Progress(
            "fp16_parity", {f"prompt{i:02d}": 1.0 for i in range(len(prompt_ids))}
        ) as progress,
    ):
        names = stage.runnable(attempt, timed=False)
        order = [baseline, *(n for n in names if n != baseline)] if baseline in names else []
        for number, ids in enumerate(prompt_ids):
            unit = f"prompt{number:02d}"
            if not attempt.has(unit):
                spec = {
                    "gguf": str(stage.gguf),
                    "baseline": baseline,
                    "ids": ids,
                    "steps": rules["steps_per_prompt"],
                    "page_tokens": stage.protocol["page_tokens"],
                    "threads": COLUMNS["threads"],
                }
                rows = run_arms(stage, attempt, "kvtrial.measure.greedy", order, spec, COLUMNS)
                attempt.put(unit, stage.events(rows, block=number, **COLUMNS))
            progress.done(unit)
    return 0


if __name__ == "__main__":
    from kvtrial.cli import exit_with

    exit_with(main)
