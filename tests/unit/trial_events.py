"""Makes event tables by hand, so that a test knows what the verdict has to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from kvtrial.run import events, protocol

ROOT = Path(__file__).resolve().parents[2]
REGISTERED = protocol.load(ROOT / "config" / "protocol.yaml")
PROFILES = {"K2": "fp16", "K5": "q8_0", "K2T": "fp16"}
_TRANSPOSED = "paged, K transposed"
LAYOUTS = {"K0": "flat", "A1": "flat", "K1T": _TRANSPOSED, "K3T": _TRANSPOSED, "K2T": _TRANSPOSED}
#: Most trials here are from before these arms; one without times would leave them open.
_LATER = ("K1T", "K3T", "K2T")


def row(stage: str, metric: str, registration: dict[str, Any] = REGISTERED, **columns: Any) -> Any:
    """One event of the trial."""
    sha256 = protocol.sha256(registration)
    return events.event(metric, stage=stage, protocol_sha256=sha256, build_id="b" * 12, **columns)


def with_rows(table: pd.DataFrame, rows: list[dict[str, Any]]) -> pd.DataFrame:
    """The table and further events."""
    return pd.concat([table, events.to_frame(rows)], ignore_index=True)


def trial(
    step_ms: dict[str, dict[int, list[float]]],
    *,
    missing: dict[str, str] | None = None,
    not_built: dict[str, str] | None = None,
    failed_conformance: dict[str, str] | None = None,
    bandwidth: dict[tuple[int, int], tuple[float, float]] | None = None,
    difference: dict[str, float] | None = None,
    registration: dict[str, Any] = REGISTERED,
) -> pd.DataFrame:
    """Events of a trial.

    ``step_ms``: candidate → context → one step time per block (ms). ``bandwidth``: (context, block) →
    probe before and after, GB/s. ``difference``: candidate → of its logits from the reference's.
    """
    rows: list[dict[str, Any]] = []
    later = {name: "not in this trial" for name in _LATER if name not in step_ms}
    not_built = {**later, **(not_built or {})}

    def add(stage: str, metric: str, **columns: Any) -> None:
        rows.append({**common[stage], "metric": metric, **columns})

    stages = ("run", "conformance", "parity", "m2")
    common = {stage: row(stage, "", registration) for stage in stages}
    for metric, text in (
        ("run_id", "r1"),
        ("model", "m"),
        ("machine", "here"),
        ("synthetic", "false"),
        ("context_length", "8192"),
        ("shape", "9q3kv"),
    ):
        add("run", f"run/{metric}", text=text)
    names = registration["candidates"]
    for name in names:
        add("run", "candidate/profile", candidate=name, text=PROFILES.get(name, "fp32"))
        add("run", "candidate/layout", candidate=name, text=LAYOUTS.get(name, "paged"))
        add("run", "candidate/missing", candidate=name, text=(missing or {}).get(name, ""))
        add("run", "candidate/not_built", candidate=name, text=(not_built or {}).get(name, ""))
        if name in (not_built or {}):
            continue
        bad = (failed_conformance or {}).get(name)
        add("conformance", "conformance/outcome", candidate=name, value=1.0, text="KvFine@P16")
        if bad:
            add("conformance", "conformance/outcome", candidate=name, value=0.0, text=bad)
        values = {
            "parity/positions": 16.0,
            "parity/max_abs_logit_difference": (difference or {}).get(name, 1e-4),
            "quality/kld": 1e-5,
            "quality/worst_kld": 2e-5,
            "quality/top1_agrees": 16.0,
        }
        for context, texts in ((0, 24), (512, 64), (4096, 64), (16384, 16)):
            for index in range(texts):
                for metric, value in values.items():
                    add("parity", metric, candidate=name, context=context, index=index, value=value)
        for step in range(64):
            at = {"candidate": name, "context": 4096, "index": step}
            add("parity", "quality/decode_kld", value=1e-5, **at)
            add("parity", "quality/decode_top1_agrees", value=1.0, **at)
    for name, contexts in step_ms.items():
        for context, blocks in contexts.items():
            at = {"candidate": name, "context": context, "block": 0}
            add("m2", "m2/agreed_steps", value=float(registration["decode_steps"]), **at)
            for block, value in enumerate(blocks):
                add("m2", "m2/step_ms", candidate=name, context=context, block=block, value=value)
    for context, block in {
        (c, b) for cs in step_ms.values() for c, bs in cs.items() for b in range(len(bs))
    }:
        before, after = (bandwidth or {}).get((context, block), (10.0, 10.0))
        for index, value in enumerate((before, after)):
            at = {"context": context, "block": block, "index": index}
            add("m2", "probe/read_gb_per_s", value=value, **at)
            add("m2", "probe/spin_ms", value=50.0, **at)
    for stage in ("conformance", "parity", "m2"):
        add(stage, "attempt/complete", value=1.0)
    return events.to_frame(rows)


def flat(**ms: float | dict[int, list[float]]) -> dict[str, dict[int, list[float]]]:
    """Candidate → the same step time in every block of the three contexts (12, 6 and 6 blocks)."""
    return {
        name: value
        if isinstance(value, dict)
        else {4096: [value] * 12, 512: [value] * 6, 16384: [value] * 6}
        for name, value in ms.items()
    }


def scattered(**ms: float) -> dict[str, dict[int, list[float]]]:
    """Candidate → step times that scatter by a few percent over the blocks of the three contexts."""
    return {
        name: {
            context: [value * (1 + 0.01 * (step * block % 5)) for block in range(blocks)]
            for context, blocks in ((4096, 12), (512, 6), (16384, 6))
        }
        for step, (name, value) in enumerate(ms.items(), start=1)
    }


def block_rows(stage: str, metric: str, values: dict[str, list[float]], **at: Any) -> list[Any]:
    """One value a block and arm of a measuring stage, on a quiet machine."""
    blocks = len(next(iter(values.values())))
    rows = [
        row(stage, metric, candidate=name, block=b, value=v, **at)
        for name, own in values.items()
        for b, v in enumerate(own)
    ]
    if stage == "m2":
        rows += [
            row(stage, "m2/agreed_steps", candidate=name, block=0, value=64.0, **at)
            for name in values
        ]
    rows += [
        row(stage, probe, block=b, index=index, value=value, **at)
        for probe, value in (("probe/read_gb_per_s", 10.0), ("probe/spin_ms", 50.0))
        for b in range(blocks)
        for index in (0, 1)
    ]
    return rows
