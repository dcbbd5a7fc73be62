"""Parity and quality: every candidate's logits beside a reference's, teacher-forced, activations in FP32.

``python -m kvtrial.measure.parity SPEC.json OUT.json`` with a `ParitySpec`.

The causal block form says what was stored, and the decode that the kernel which is timed reads it: stores of
other kernels may share the block form's.

Chunk ``j`` of text ``t`` has the number ``t + j * texts``, the column ``index``, so that the first
chunks lie in all texts. A chunk is part of its text: what a candidate stored of the text before it is
what it attends to. Nothing here is timed.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtrial import engine
from kvtrial.contract import F32
from kvtrial.measure.child import Row, failed_row, main
from kvtrial.measure.specs import ParitySpec
from kvtrial.measure.stores import Snapshot, fill, opened, shape_of

#: What `compare` finds at each position: largest difference of a logit, divergence, agreement.
_Compared = npt.NDArray[np.float64]
#: Text, or `DECODE`; number of the first position; logits (m, V).
_Take = Callable[[int, int, F32], object]
DECODE = -1
#: What `compare` finds, of a decoded step.
DECODED = (
    "parity/decode_max_abs_logit_difference",
    "quality/decode_kld",
    "quality/decode_top1_agrees",
)


def measure(spec: ParitySpec, note: Callable[[str], None]) -> list[Row]:
    """Rows of every candidate, chunk by chunk."""
    model = engine.load(spec.gguf)
    names = [name for name in spec.candidates if name != spec.reference]
    if not names or spec.reference not in spec.candidates:  # it took the process down before
        return []
    # As many positions as anybody is compared over.
    most = [max(column) for column in zip(*(spec.positions[name] for name in names))]
    steps = max((spec.decode.get(name, 0) for name in names), default=0)
    lengths = dict(enumerate(most)) | {DECODE: steps}
    reference = {text: np.empty((n, model.config.vocab), np.float32) for text, n in lengths.items()}

    def keep(text: int, first: int, logits: F32) -> None:
        reference[text][first : first + len(logits)] = logits

    feed(model, spec.reference, spec, most, steps, keep, note)
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
    spec: ParitySpec,
    lengths: list[int],
    steps: int,
    take: _Take,
    note: Callable[[str], None],
) -> None:
    """Feed the first ``lengths`` positions of each text to a candidate, each after the filled context,
    then ``steps`` of the first text by the decode; ``take`` gets the logits of all of them."""
    note(name)
    snapshot = None if spec.snapshot is None else Snapshot.open(spec.snapshot)
    filled = 0 if snapshot is None else snapshot.tokens
    threads = spec.threads
    texts = [ids[:n] for ids, n in zip(spec.texts, lengths)]
    # Texts that stand alone go side by side; those after a context are rolled back one after the other.
    with opened(
        name,
        shape_of(model),
        tokens=filled + max(*lengths, steps),
        sessions=len(texts) if snapshot is None else 1,
        page_tokens=spec.page_tokens,
        threads=threads,
    ) as (_, sessions):
        fed = functools.partial(model.prefill_texts, threads=threads, activations="fp32")
        if snapshot is None:
            fed(sessions, texts, take)
            return
        (session,) = sessions
        fill(session, snapshot)
        for text, ids in enumerate(texts):
            if ids:
                note(name)
                fed([session], [ids], lambda _, first, logits, text=text: take(text, first, logits))
                session.rollback_tail(len(ids))
        if steps:
            decoder = model.decoder(threads=threads, activations="fp32")
            for step, token in enumerate(spec.texts[0][:steps]):
                note(name)
                take(DECODE, step, decoder.step([session], [token]))


def _arm(
    model: Any,
    name: str,
    spec: ParitySpec,
    reference: dict[int, F32],
    note: Callable[[str], None],
) -> list[Row]:
    lengths = spec.positions[name]
    steps = spec.decode.get(name, 0)
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
                {"candidate": name, "metric": metric, "index": step, "value": value}
                for metric, column in zip(DECODED, at.T)
                for step, value in enumerate(column.tolist())
            ]
            continue
        chunk = spec.chunk or len(at)
        for j, start in enumerate(range(0, len(at), chunk)):
            part = at[start : start + chunk]
            values = {
                "parity/positions": len(part),
                "parity/max_abs_logit_difference": part[:, 0].max(),
                "quality/kld": part[:, 1].mean(),
                "quality/worst_kld": part[:, 1].max(),
                "quality/top1_agrees": part[:, 2].sum(),
            }
            index = text + j * len(spec.texts)
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
    # Made once: arrays of this size would come from the kernel, page by page, for every row.
    p, q, apart = np.empty((3, logits.shape[1]))
    for row, ours, theirs in zip(found, logits, reference):
        if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
            row[:] = np.nan
            continue
        np.subtract(theirs, ours, out=apart, dtype=np.float64)
        top_p, top_q = float(theirs.max()), float(ours.max())
        np.exp(np.subtract(theirs, top_p, out=p, dtype=np.float64), out=p)
        np.exp(np.subtract(ours, top_q, out=q, dtype=np.float64), out=q)
        row[0] = max(apart.max(), -apart.min())
        # log p - log q is apart but for the two normalisers. No dot product: the workers of a BLAS would
        # wait busily for the next row.
        mean = np.multiply(p, apart, out=apart).sum() / p.sum()
        row[1] = mean + math.log(q.sum()) + top_q - math.log(p.sum()) - top_p
        row[2] = ours.argmax() == theirs.argmax()
    return found


if __name__ == "__main__":
    main(ParitySpec, measure, sys.argv)
