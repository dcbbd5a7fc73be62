"""Parity: greedy decodes of some prompts, every candidate beside the baseline, activations in FP32.

``python -m kvtrial.measure.parity SPEC.json OUT.json`` with SPEC:

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy.special import log_softmax

from kvtrial import engine
from kvtrial.contract import F32
from kvtrial.measure.child import Row, Spec, failed_row, main
from kvtrial.measure.stores import opened, shape_of


def measure(spec: Spec, note: Callable[[str], None]) -> list[Row]:
    """Rows of the baseline and of every candidate on each prompt."""
    model = engine.load(spec["gguf"])
    baseline, others = spec["baseline"], [n for n in spec["candidates"] if n != spec["baseline"]]
    prompts = {int(number): ids for number, ids in spec["prompts"].items()}
    note(baseline)
    reference = [
        logits.copy() for logits in greedy_logits(model, baseline, spec, list(prompts.values()))
    ]
    rows = _rows(baseline, list(prompts), reference, None)
    for name in others:
        note(name)
        try:
            decode = greedy_logits(model, name, spec, list(prompts.values()))
            rows += _rows(name, list(prompts), decode, reference)
        except Exception as error:
            rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
    return rows


def greedy_logits(model: Any, name: str, spec: Spec, prompts: Sequence[list[int]]) -> Iterator[F32]:
    """Logits (n, V) of n prompts before each of their greedy tokens; an array is good until the next
    one. The prompts go in lockstep, which saves time and changes no bit of their logits."""
    with opened(
        name,
        shape_of(model),
        tokens=max(map(len, prompts)) + spec["steps"],
        sessions=len(prompts),
        page_tokens=spec["page_tokens"],
        threads=spec["threads"],
    ) as (_, sessions):
        decoder = model.decoder(threads=spec["threads"], activations="fp32", batch=len(prompts))
        logits: F32 = np.stack(
            [
                model.prefill(session, ids, activations="fp32").copy()
                for session, ids in zip(sessions, prompts)
            ]
        )
        yield logits
        for _ in range(spec["steps"] - 1):
            logits = decoder.step(sessions, logits.argmax(axis=1))
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


def _rows(
    name: str, numbers: list[int], decode: Iterable[F32], reference: list[F32] | None
) -> list[Row]:
    """Token and margin of each prompt and step; against ``reference`` while the prefix is shared."""
    rows: list[Row] = []
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    shared = dict.fromkeys(numbers, reference is not None)
    for step, batch in enumerate(decode):
        for place, (number, logits) in enumerate(zip(numbers, batch)):
            second, first = np.partition(logits, -2)[-2:]
            tokens[number].append(int(logits.argmax()))
            found = {
                "parity/token": float(tokens[number][-1]),
                "parity/margin": float(np.float64(first) - np.float64(second)),
            }
            if reference is not None and shared[number]:
                theirs = reference[step][place]
                found |= compare(logits, theirs)
                shared[number] = tokens[number][-1] == int(theirs.argmax())
            rows += [
                {
                    "candidate": name,
                    "metric": metric,
                    "block": number,
                    "index": step,
                    "value": value,
                }
                for metric, value in found.items()
            ]
    for number, own in tokens.items():
        digest = hashlib.sha256(np.array(own, "<i8").tobytes()).hexdigest()
        rows.append({"candidate": name, "metric": "output_sha256", "block": number, "text": digest})
    return rows


if __name__ == "__main__":
    main(measure, sys.argv)
