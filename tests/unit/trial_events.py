"""Makes event tables by hand, so that a test knows what the verdict has to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvtrial.measure.aliases import FIRST, PLANTED, SECOND
from kvtrial.run import events, protocol

ROOT = Path(__file__).resolve().parents[2]
REGISTERED = protocol.load(ROOT / "config" / "protocol.yaml")
BLOCKS = REGISTERED["sampling"]["blocks"]
PROFILES = {"K2": "fp16", "K5": "q8_0", "K2T": "fp16"}
_TRANSPOSED = "paged, K transposed"
LAYOUTS = {"K0": "flat", "A1": "flat", "K1T": _TRANSPOSED, "K3T": _TRANSPOSED, "K2T": _TRANSPOSED}
#: Bytes of a position in all layers, by profile: a hidden size of 192 in 30 layers, K and V.
ROW_BYTES = {"fp32": 46080.0, "fp16": 23040.0, "q8_0": 12240.0}
CONTEXTS = (4096, 512, 16384)

Arms = Mapping[str, Mapping[int, Sequence[float]]]


def row(stage: str, metric: str, registration: dict[str, Any] = REGISTERED, **columns: Any) -> Any:
    """One event of the trial."""
    sha256 = protocol.sha256(registration)
    return events.event(metric, stage=stage, protocol_sha256=sha256, build_id="b" * 12, **columns)


def with_rows(table: pd.DataFrame, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The table and further events."""
    return pd.concat([table, events.to_frame(rows)], ignore_index=True)


def without(table: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    """The table without the events that have all of these values."""
    gone = pd.Series(True, index=table.index)
    for name, value in columns.items():
        gone &= table[name] == value
    return table[~gone]


def trial(
    step_ms: Arms,
    *,
    missing: dict[str, str] | None = None,
    not_built: dict[str, str] | None = None,
    failed_conformance: dict[str, str] | None = None,
    difference: dict[str, float] | None = None,
    known: dict[str, Sequence[float]] | None = None,
    registration: dict[str, Any] = REGISTERED,
) -> pd.DataFrame:
    """Events of a complete trial.

    Parameters
    ----------
    step_ms : mapping
        Candidate → context → one step time (ms) a block. A candidate that is not there was not built.
    missing, not_built, failed_conformance : dict
        Candidate → what it lacks, why it was not built, the conformance test that it failed.
    difference : dict
        Candidate → largest difference of a logit.
    known : dict
        Arm of the known answers → one step time a block; by default both answers are right.
    """
    not_built = {
        **{n: "not in this trial" for n in registration["candidates"] if n not in step_ms},
        **(not_built or {}),
    }
    common = row("", "", registration)
    rows = [{**common, **own} for own in _run_rows(registration, missing or {}, not_built)]
    for name in registration["candidates"]:
        if name in not_built:
            continue
        at = {**common, "stage": "conformance", "metric": "conformance/outcome", "candidate": name}
        rows.append({**at, "value": 1.0, "text": "KvFine@P16"})
        if bad := (failed_conformance or {}).get(name):
            rows.append({**at, "value": 0.0, "text": bad})
        given = (difference or {}).get(name, 1e-4)
        rows += [{**common, **own} for own in _evidence_rows(registration, name, given)]
    for name, contexts in step_ms.items():
        for context, blocks in contexts.items():
            for block, value in enumerate(blocks):
                at = {"candidate": name, "context": context, "block": block}
                rows += [{**common, **own, **at} for own in _arm_rows("m2", name, {0: value})]
    (primary,) = [c["context"] for c in registration["cells"] if c["role"] == "primary"]
    for name, values in _known(registration, known or {}).items():
        for block, value in enumerate(values):
            at = {"candidate": name, "context": primary, "block": block}
            rows += [{**common, **own, **at} for own in _arm_rows("aa", name, {0: value})]
    for stage in ("conformance", "parity", "m1", "aa", "m2"):
        rows.append({**common, "stage": stage, "metric": "attempt/complete", "value": 1.0})
    return events.to_frame(rows)


def _run_rows(
    registration: dict[str, Any], missing: dict[str, str], not_built: dict[str, str]
) -> list[dict[str, Any]]:
    """What stage ``run`` says of the run and of each candidate."""
    said = {
        "run_id": "r1",
        "model": "m",
        "machine": "here",
        "synthetic": "false",
        "shape": "9q3kv",
        "context_length": "8192",
    }
    rows = [{"stage": "run", "metric": f"run/{key}", "text": text} for key, text in said.items()]
    for name in registration["candidates"]:
        for key, text in (
            ("profile", PROFILES.get(name, "fp32")),
            ("layout", LAYOUTS.get(name, "paged")),
            ("missing", missing.get(name, "")),
            ("not_built", not_built.get(name, "")),
        ):
            at = {"stage": "run", "metric": f"candidate/{key}", "candidate": name}
            rows.append({**at, "text": text})
    return rows


def _evidence_rows(
    registration: dict[str, Any], name: str, difference: float
) -> list[dict[str, Any]]:
    """Parity and quality of one arm, right but for the largest ``difference`` of a logit.

    The only place that knows what these events look like.
    """
    found: list[dict[str, Any]] = []
    rules, parity = registration["quality"], registration["parity"]
    positions = float(rules["chunk_tokens"])
    is_profile = name in registration["decision"]["profiles"]

    def add(metric: str, context: int, values: Sequence[float]) -> None:
        at = {"stage": "parity", "candidate": name, "context": context, "metric": metric}
        found.extend({**at, "index": index, "value": v} for index, v in enumerate(values))

    add("parity/max_abs_logit_difference", 0, [difference] * parity["prompts"])
    for context in CONTEXTS:
        chunks = rules["chunks"] if is_profile else parity["chunks"]
        add("parity/max_abs_logit_difference", context, [difference] * chunks)
        add("parity/positions", context, [positions] * chunks)
        decoded = [difference] * parity["decode_steps"]
        add("parity/decode_max_abs_logit_difference", context, decoded)
        if is_profile:
            add("quality/kld", context, [1e-5] * chunks)
            add("quality/worst_kld", context, [2e-5] * chunks)
            add("quality/top1_agrees", context, [positions] * chunks)
    if is_profile:
        steps = rules["decode"]["steps"]
        add("quality/decode_kld", rules["decode"]["context"], [1e-5] * steps)
        add("quality/decode_top1_agrees", rules["decode"]["context"], [1.0] * steps)
    return found


def _known(registration: dict[str, Any], given: dict[str, Sequence[float]]) -> dict[str, Any]:
    rules = registration["known_answers"]
    right = {FIRST: 20.0, SECOND: 20.0, PLANTED: 20.0 * (1 + rules["planted"])}
    return {**{arm: [ms] * rules["blocks"] for arm, ms in right.items()}, **given}


def _arm_rows(stage: str, name: str, steps: Mapping[int, float]) -> list[dict[str, Any]]:
    """What `kvtrial.measure.block` writes of one arm, whose timed rounds took ``steps`` (ms)."""
    row_bytes = ROW_BYTES[PROFILES.get(name, "fp32")]
    said: list[dict[str, Any]] = []
    for index, value in steps.items():
        said.append({"metric": "m2/step_ms", "index": index, "value": value})
        said.append({"metric": "m2/attention_ms", "index": index, "value": value / 2})
    for metric, number in (
        ("rotation/stood_still_s", 0.0),
        ("rotation/disk_faults", 0.0),
        ("m2/tokens", float(len(steps))),
        ("m2/output_error", 0.1),
        ("m2/row_error", 0.0),
        ("m2/by_slot", 1.0),
        ("m2/row_bytes", row_bytes),
    ):
        said.append({"metric": metric, "value": number})
    for metric in ("output_xxh3", "rows_xxh3"):
        said.append({"metric": metric, "text": "a" * 32})
    return [{"stage": stage, **own} for own in said]


def arm_rows(
    name: str,
    steps: Mapping[int, float],
    *,
    stage: str = "m2",
    registration: dict[str, Any] = REGISTERED,
    **at: Any,
) -> list[dict[str, Any]]:
    """One arm of one block: round → milliseconds, and what else a block says of it."""
    common = row(stage, "", registration)
    return [{**common, **own, "candidate": name, **at} for own in _arm_rows(stage, name, steps)]


def flat(**ms: float | Mapping[int, Sequence[float]]) -> dict[str, dict[int, list[float]]]:
    """Candidate → the same step time in every block of the three contexts."""
    return {
        name: {context: list(own) for context, own in value.items()}
        if isinstance(value, Mapping)
        else {context: [value] * BLOCKS for context in CONTEXTS}
        for name, value in ms.items()
    }


def at_contexts(
    primary: float | Sequence[float], short: float | Sequence[float], long: float | Sequence[float]
) -> dict[int, list[float]]:
    """One arm's step times at 4,096, 512 and 16,384: a number is the same in every block."""
    return {
        context: [float(own)] * BLOCKS if isinstance(own, (int, float)) else list(own)
        for context, own in zip(CONTEXTS, (primary, short, long))
    }


def scattered(**ms: float) -> dict[str, dict[int, list[float]]]:
    """Candidate → step times that scatter by a few percent over the blocks of the three contexts."""
    return {
        name: {
            context: [value * (1 + 0.001 * (step * block % 5)) for block in range(BLOCKS)]
            for context in CONTEXTS
        }
        for step, (name, value) in enumerate(ms.items(), start=1)
    }


def block_rows(stage: str, metric: str, values: dict[str, list[float]], **at: Any) -> list[Any]:
    """One value a block and arm of a measuring stage; of step times, what else a block says."""
    rows: list[Any] = []
    for name, own in values.items():
        for block, value in enumerate(own):
            if metric == "m2/step_ms":
                rows += arm_rows(name, {0: value}, stage=stage, block=block, **at)
            else:
                rows.append(row(stage, metric, candidate=name, block=block, value=value, **at))
    return rows
