"""Parity and quality: every candidate's logits beside a reference's, teacher-forced, activations in FP32.

``python -m kvtrial.measure.parity SPEC.json OUT.json`` with SPEC:

============  ======================================================================================
gguf          path of the model
snapshot      folder of the filled context; null: the texts stand alone
texts         token ids of each text, fed in the causal block form after the context
reference     the candidate that the others are compared with
positions     candidate → how many positions of each text it is compared over
candidates    those of them to run
chunk         positions that one row tells of, as their mean; null: a text is one chunk
decode_steps  steps of the decode that is compared too, fed with the first text; 0: none
decode        candidates that take part in it
page_tokens   P
threads       of prefill, decoder and stores
============  ======================================================================================

Chunk ``j`` of text ``t`` has the number ``t + j * texts``, the column ``index``, so that the first
chunks lie in all texts. A chunk is part of its text: what a candidate stored of the text before it is
what it attends to. Nothing here is timed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial import engine
from kvtrial.contract import F32, KVSession
from kvtrial.measure.child import Row, Spec, failed_row, main
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of

#: What `compare` finds at each position: largest difference of a logit, divergence, agreement.
_Compared = npt.NDArray[np.float64]
#: Text, or `DECODE`; number of the first position; logits (m, V).
_Take = Callable[[int, int, F32], object]
DECODE = -1


def measure(spec: Spec, note: Callable[[str], None]) -> list[Row]:
    """Rows of every candidate, chunk by chunk."""
    model = engine.load(spec["gguf"])
    names = [name for name in spec["candidates"] if name != spec["reference"]]
    if not names or spec["reference"] not in spec["candidates"]:  # it took the process down before
        return []
    # As many positions as anybody is compared over.
    most = [max(column) for column in zip(*(spec["positions"][name] for name in names))]
    steps = spec["decode_steps"] if set(names) & set(spec["decode"]) else 0
    lengths = dict(enumerate(most)) | {DECODE: steps}
    reference = {text: np.empty((n, model.config.vocab), np.float32) for text, n in lengths.items()}

    def keep(text: int, first: int, logits: F32) -> None:
        reference[text][first : first + len(logits)] = logits

    feed(model, spec["reference"], spec, most, steps, keep, note)
    rows: list[Row] = []
    for name in names:
        try:
            rows += _arm(model, name, spec, reference, note)
        except Exception as error:
            rows.append({"candidate": name, "metric": "failed", "text": failed_row(error)})
    return rows


def feed(
    model: Any,
    name: str,
    spec: Spec,
    lengths: list[int],
    steps: int,
    take: _Take,
    note: Callable[[str], None],
) -> None:
    """Feed the first ``lengths`` positions of each text to a candidate, each after the filled context,
    then ``steps`` of the first text by the decode; ``take`` gets the logits of all of them."""
    note(name)
    snapshot = None if spec["snapshot"] is None else Snapshot.open(spec["snapshot"])
    filled = 0 if snapshot is None else snapshot.tokens
    with opened(
        name,
        shape_of(model),
        tokens=filled + max(*lengths, steps),
        page_tokens=spec["page_tokens"],
        threads=spec["threads"],
    ) as (_, (session,)):
        if snapshot is not None:
            fill(session, snapshot)
        for text, (ids, n) in enumerate(zip(spec["texts"], lengths)):
            if n:
                note(name)
                _prefill(model, session, ids[:n], spec["threads"], functools.partial(take, text))
                session.rollback_tail(n)
        if steps:
            decoder = model.decoder(threads=spec["threads"], activations="fp32")
            for step, token in enumerate(spec["texts"][0][:steps]):
                note(name)
                take(DECODE, step, decoder.step([session], [token]))


def _prefill(
    model: Any, session: KVSession, ids: list[int], threads: int, take: Callable[[int, F32], object]
) -> None:
    done = 0

    def each(logits: F32) -> None:
        nonlocal done
        take(done, logits)
        done += len(logits)

    model.prefill(session, ids, threads=threads, activations="fp32", each=each)


def _arm(
    model: Any,
    name: str,
    spec: Spec,
    reference: dict[int, F32],
    note: Callable[[str], None],
) -> list[Row]:
    lengths = spec["positions"][name]
    steps = spec["decode_steps"] if name in spec["decode"] else 0
    found: dict[int, list[_Compared]] = {}

    def take(text: int, first: int, logits: F32) -> None:
        theirs = reference[text][first : first + len(logits)]
        found.setdefault(text, []).append(compare(logits, theirs))

    feed(model, name, spec, lengths, steps, take, note)
    rows: list[Row] = []
    for text, parts in found.items():
        at = np.concatenate(parts)  # (positions, 3)
        if text == DECODE:
            rows += [
                {"candidate": name, "metric": f"quality/decode_{metric}", "index": step, "value": v}
                for metric, column in (("kld", 1), ("top1_agrees", 2))
                for step, v in enumerate(at[:, column].tolist())
            ]
            continue
        chunk = spec["chunk"] or len(at)
        for j, start in enumerate(range(0, len(at), chunk)):
            part = at[start : start + chunk]
            values = {
                "parity/positions": len(part),
                "parity/max_abs_logit_difference": part[:, 0].max(),
                "quality/kld": part[:, 1].mean(),
                "quality/worst_kld": part[:, 1].max(),
                "quality/top1_agrees": part[:, 2].sum(),
            }
            index = text + j * len(spec["texts"])
            rows += [
                {"candidate": name, "metric": metric, "index": index, "value": float(value)}
                for metric, value in values.items()
            ]
    return rows


def compare(logits: F32, reference: F32) -> _Compared:
    """How far logits (m, V) are from the reference's at each of m positions.

    Returns
    -------
    float64 (m, 3)
        Largest absolute difference of a logit; Kullback-Leibler divergence from the reference, nats; 1
        where the likeliest token is the reference's. In float64: FP32 sums over V would round. NaN
        where a logit is not finite.
    """
    found = np.empty((len(logits), 3))
    for row, ours, theirs in zip(found, logits.astype(np.float64), reference.astype(np.float64)):
        if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
            row[:] = np.nan
            continue
        apart = theirs - ours
        p, q = np.exp(theirs - theirs.max()), np.exp(ours - ours.max())
        # log p - log q is apart but for the two normalisers.
        normalisers = np.log(q.sum()) + ours.max() - np.log(p.sum()) - theirs.max()
        row[0] = np.abs(apart).max()
        row[1] = p @ apart / p.sum() + normalisers
        row[2] = ours.argmax() == theirs.argmax()
    return found


if __name__ == "__main__":
    main(measure, sys.argv)
