"""Parity: greedy decodes of some prompts, every candidate beside the baseline, activations in FP32.

``python -m kvtrial.measure.greedy SPEC.json OUT.json`` with SPEC:

============  ======================================================================================
gguf          path of the model
baseline      the candidate that the others are compared with
candidates    the others
prompts       number of the prompt, as text, to its tokens; the number is the column ``block``
steps         greedy tokens; the first comes from the prefill
page_tokens   P
threads       of decoder and stores
============  ======================================================================================

Logits are compared as long as a candidate has given the baseline's tokens: past the first other
token the two decode different texts. Nothing here is timed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.special import log_softmax

from kvtrial import models
from kvtrial.contract import F32
from kvtrial.measure.child import Row, Spec, failed_row, main
from kvtrial.measure.stores import opened, shape_of


def measure(spec: Spec, note: Callable[[str], None]) -> list[Row]:
    """Rows of the baseline and of every candidate on each prompt."""
    model = models.load_model(spec["gguf"])
    rows: list[Row] = []
    for number, ids in spec["prompts"].items():
        own = _prompt(model, spec, ids, note)
        rows += [{**row, "block": int(number)} for row in own]
    return rows


def _prompt(model: Any, spec: Spec, ids: list[int], note: Callable[[str], None]) -> list[Row]:
    baseline, others = spec["baseline"], [n for n in spec["candidates"] if n != spec["baseline"]]
    note(baseline)
    reference = [logits.copy() for logits in greedy_logits(model, baseline, spec, ids)]
    rows = _rows(baseline, reference, None)
    for name in others:
        note(name)
        try:
            rows += _rows(name, greedy_logits(model, name, spec, ids), reference)
        except Exception as error:
            rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
    return rows


def greedy_logits(model: Any, name: str, spec: Spec, ids: list[int]) -> Iterator[F32]:
    """Logits (V,) before each greedy token; an array is good until the next one."""
    with opened(
        name,
        shape_of(model),
        tokens=len(ids) + spec["steps"],
        page_tokens=spec["page_tokens"],
        threads=spec["threads"],
    ) as (_, sessions):
        decoder = model.decoder(threads=spec["threads"], activations="fp32", batch=1)
        logits = model.prefill(sessions[0], ids)
        yield logits
        for _ in range(spec["steps"] - 1):
            logits = decoder.step(sessions, np.array([logits.argmax()], np.int64))[0]
            yield logits


def compare(logits: F32, reference: F32) -> dict[str, float]:
    """How far logits (V,) are from the reference's, in float64: FP32 sums over V would round."""
    ours, theirs = logits.astype(np.float64), reference.astype(np.float64)
    log_p, log_q = log_softmax(theirs), log_softmax(ours)
    return {
        "parity/max_abs_logit_difference": float(np.abs(ours - theirs).max()),
        "parity/kld": float((np.exp(log_p) * (log_p - log_q)).sum()),
        "parity/top1_agrees": float(ours.argmax() == theirs.argmax()),
    }


def _rows(name: str, decode: Any, reference: list[F32] | None) -> list[Row]:
    """Token and margin of each step; against ``reference`` while the prefix is shared."""
    rows: list[Row] = []
    tokens: list[int] = []
    shared = True
    for step, logits in enumerate(decode):
        second, first = np.partition(logits, -2)[-2:]
        tokens.append(int(logits.argmax()))
        found = {
            "parity/token": float(tokens[-1]),
            "parity/margin": float(np.float64(first) - np.float64(second)),
        }
        if reference is not None and shared:
            found |= compare(logits, reference[step])
            shared = tokens[-1] == int(reference[step].argmax())
        rows += [
            {"candidate": name, "metric": metric, "index": step, "value": value}
            for metric, value in found.items()
        ]
    digest = hashlib.sha256(np.array(tokens, "<i8").tobytes()).hexdigest()
    return [*rows, {"candidate": name, "metric": "output_sha256", "text": digest}]


if __name__ == "__main__":
    main(measure, sys.argv)
