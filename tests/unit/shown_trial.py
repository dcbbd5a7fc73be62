"""Verdicts for the tests of what reads one: real decisions on step times known by hand.

Parity and quality are evidence of their own and are given as they are to come out; everything else is decided
by `kvtrial.decision.verdict` from events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvtrial.decision import verdict as decision
from kvtrial.run import events, protocol

ROOT = Path(__file__).resolve().parents[2]
REGISTERED = protocol.load(ROOT / "config" / "protocol.yaml")
#: Without a simulation, which takes seconds: fewer blocks than it draws from.
FEW = {
    **REGISTERED,
    "sampling": {**REGISTERED["sampling"], "blocks": 4, "most": 4},
    "known_answers": {**REGISTERED["known_answers"], "blocks": 4},
}
CONTEXTS = (4096, 512, 16384)
PROFILES = {"K2": "fp16", "K5": "q8_0", "K2T": "fp16"}
ROW_BYTES = {"fp32": 46080.0, "fp16": 23040.0, "q8_0": 12240.0}
STEPS = 4

Steps = dict[str, dict[int, list[float]]]

#: Milliseconds a step: an FP16 arm is fastest, K0 ten times off, and Rust equals Cython.
ARMS = {"K0": 200.0, "A1": 80.0, "A2": 70.0, "K1": 20.0, "K3": 20.0, "K1T": 21.0, "K2T": 14.0}
ARMS |= {"K5": 18.0}


def steady(blocks: int = 4, scatter: float = 0.001, cycle: int = 4, **step_ms: float) -> Steps:
    """Candidate → context → one step time a block, which differ by little between blocks. Two arms that stand
    ``cycle`` apart have a ratio without any scatter."""
    return {
        name: {
            context: [
                value * (1 + scatter * ((3 * block + place) % cycle)) for block in range(blocks)
            ]
            for context in CONTEXTS
        }
        for place, (name, value) in enumerate(step_ms.items())
    }


def trial(
    step_ms: Steps,
    *,
    registration: dict[str, Any] = FEW,
    facts: dict[str, str] | None = None,
    missing: dict[str, str] | None = None,
    planted: float | None = None,
    without: tuple[str, ...] = (),
) -> pd.DataFrame:
    """Events of a trial. ``planted``: ratio of the planted arm where it is not the registered one.
    ``without``: stages that have no complete attempt."""
    common = {"protocol_sha256": protocol.sha256(registration), "build_id": "b" * 12}
    rows: list[dict[str, Any]] = []

    def add(stage: str, metric: str, **columns: Any) -> None:
        rows.append(events.event(metric, stage=stage, **common, **columns))

    said = {"run_id": "r1", "model": "m", "machine": "here", "synthetic": "false"}
    said |= {"shape": "9q3kv", "context_length": "8192"}
    for key, text in (said | (facts or {})).items():
        add("run", f"run/{key}", text=text)
    for name in registration["candidates"]:
        add("run", "candidate/profile", candidate=name, text=PROFILES.get(name, "fp32"))
        layout = "paged, K transposed" if name.endswith("T") else "paged"
        add("run", "candidate/layout", candidate=name, text=layout)
        add("run", "candidate/missing", candidate=name, text=(missing or {}).get(name, ""))
        absent = "" if name in step_ms else "no compiler"
        add("run", "candidate/not_built", candidate=name, text=absent)
        if name in step_ms:
            add("conformance", "conformance/outcome", candidate=name, value=1.0, text="Fine@P16")
    for name, contexts in step_ms.items():
        for context, values in contexts.items():
            at = {"candidate": name, "context": context}
            add("m2", "m2/row_bytes", value=ROW_BYTES[PROFILES.get(name, "fp32")], block=0, **at)
            for block, value in enumerate(values):
                for step in range(STEPS):
                    add("m2", "m2/step_ms", block=block, index=step, value=value, **at)
                for metric in ("m2/output_error", "m2/row_error"):
                    add("m2", metric, block=block, value=0.0, **at)
                for metric in ("output_xxh3", "rows_xxh3"):
                    add("m2", metric, block=block, text="the same", **at)
    slowed = planted or 1 + registration["known_answers"]["planted"]
    for block in range(registration["known_answers"]["blocks"]):
        for arm, ms in (("first", 20.0), ("second", 20.0), ("planted", 20.0 * slowed)):
            value = ms * (1 + 0.001 * ((block + len(arm)) % 3))
            at = {"candidate": arm, "context": 4096, "block": block}
            for step in range(STEPS):
                add("aa", "m2/step_ms", index=step, value=value, **at)
    for stage in ("conformance", "parity", "m1", "aa", "m2"):
        if stage not in without:
            add(stage, "attempt/complete", value=1.0)
    return events.to_frame(rows)


def quality(shown: tuple[str, ...] = ("K2T",)) -> dict[str, Any]:
    """Evidence: shown for these arms, and an upper bound that is too large for the others."""

    def one(name: str) -> dict[str, Any]:
        upper = 4e-05 if name in shown else 0.0213
        contexts = [
            {"context": c, "gated": c < 8192, "chunks": 64, "mean_kld": upper / 2, "kld_upper": upper}
            | {"worst_chunk_kld": 3 * upper, "top1_agreement": 0.999, "top1_lower": 0.991}
            for c in sorted(CONTEXTS)
        ]  # fmt: skip
        why = "quality: context 512: the mean KLD may be 0.0213; at most 0.001 is allowed"
        return {"shown": name in shown, "reasons": [] if name in shown else [why]} | {
            "contexts": contexts
        }

    return {name: one(name) for name in PROFILES}


@contextmanager
def evidence(
    shown: tuple[str, ...] = ("K2T",), parity: dict[str, list[str]] | None = None
) -> Iterator[None]:
    """Parity and quality come out so while the body runs."""
    found = {
        "baseline": "K0",
        "candidates": {
            name: {"reasons": (parity or {}).get(name, []), "max_abs_logit_difference": 1e-4}
            for name in REGISTERED["candidates"]
            if name != "K0"
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decision.parity, "judge", lambda *_: found)
        patch.setattr(decision.quality, "judge", lambda *_: quality(shown))
        yield


def decided(
    step_ms: Steps | None = None,
    *,
    shown: tuple[str, ...] = ("K2T",),
    parity: dict[str, list[str]] | None = None,
    registration: dict[str, Any] = FEW,
    **more: Any,
) -> dict[str, Any]:
    """A verdict: by default K2T is what to run, the language is ruled out, and no cold store is decided."""
    table = trial(step_ms or steady(**ARMS), registration=registration, **more)
    with evidence(shown, parity):
        return decision.decide(table, registration).data
