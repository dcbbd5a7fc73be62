"""Where the difference comes from: the registered hypotheses, profiles, direct write; and the control."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from kvtrial.decision.contrasts import (
    Layouts,
    Measured,
    cell_key,
    contrast,
    digits,
    unpaired_contrast,
)


def hypotheses(
    measured: Measured, shape: str, layouts: Layouts, protocol: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each registered contrast wherever it was measured.

    ``m2/tokens_per_s`` is decode with the model, whose head shape is ``shape``;
    ``m1/attention_speed`` is attention alone, at every head shape measured.
    """
    found = []
    for hypothesis in protocol["hypotheses"]:
        for cell in measured.cells:
            start_cell = cell
            if "threads" in hypothesis:
                if cell["threads"] != hypothesis["threads"]:
                    continue
                start_cell = {**cell, "threads": 1}
            sides = [
                (
                    "m2/tokens_per_s",
                    shape,
                    measured.tokens_per_s(cell, hypothesis["to"]),
                    measured.tokens_per_s(start_cell, hypothesis["from"]),
                )
            ]
            # Speed is time the other way up.
            sides += [
                (
                    "m1/attention_speed",
                    own,
                    measured.attention_ms(start_cell, hypothesis["from"], own),
                    measured.attention_ms(cell, hypothesis["to"], own),
                )
                for own in measured.shapes
            ]
            for metric, own, top, bottom in sides:
                if not top or not bottom:
                    continue
                if start_cell is cell:
                    ratio = contrast(top, bottom, protocol, cell["blocks"])
                else:
                    ratio = unpaired_contrast(top, bottom, protocol)
                named = {key: hypothesis[key] for key in ("id", "claim", "from", "to")}
                named["from_threads"] = start_cell["threads"]
                named["layouts_differ"] = layouts.differ(hypothesis["from"], hypothesis["to"])
                found.append({**named, **cell_key(cell), "shape": own, "metric": metric, **ratio})
    return found


def profiles(
    measured: Measured,
    reasons: dict[str, list[str]],
    parity_result: dict[str, Any],
    layouts: Layouts,
    protocol: dict[str, Any],
) -> dict[str, Any]:
    """Reduced-precision profiles: default only with parity evidence; FP32 stays available."""
    primary = next(c for c in protocol["cells"] if c["role"] == "primary")
    found = {}
    for name in protocol["decision"]["profiles"]:
        why_not = list(reasons[name])
        if name not in parity_result["candidates"]:
            why_not.append("parity: no evidence")
        gain = contrast(
            measured.tokens_per_s(primary, name),
            measured.tokens_per_s(primary, "K1"),
            protocol,
            primary["blocks"],
        )
        found[name] = {
            "default_allowed": not why_not,
            "reasons": why_not,
            "layouts_differ": layouts.differ(name, "K1"),
            "against_K1": gain,
        }
    return found


def control(valid_rows: pd.DataFrame, protocol: dict[str, Any]) -> dict[str, Any] | None:
    """The control's figures, measured once: n is 1, there is no interval, and nothing rests on them."""
    if "control" not in protocol:
        return None
    rows = valid_rows[valid_rows["stage"] == "control"]
    step_ms = rows.loc[rows["metric"] == "m2/step_ms", "value"]
    attention_ms = rows.loc[rows["metric"] == "m1/attention_ms", "value"]
    return {
        **protocol["control"],
        "tokens_per_s": digits(1e3 / float(step_ms.mean())) if len(step_ms) else None,
        "attention_ms": digits(float(attention_ms.median())) if len(attention_ms) else None,
    }


def direct_write(
    events: pd.DataFrame, valid_rows: pd.DataFrame, protocol: dict[str, Any]
) -> dict[str, Any] | None:
    """Reserved slots against scratch and append: identical bytes, and step time not inferior.

    Times are those of ``valid_rows``; the bytes are the same in every trial or not at all.
    """
    rows = events[events["stage"] == "direct_write"]
    if rows.empty:
        return None
    timed = valid_rows[valid_rows["metric"] == "direct/step_ms"]
    margin = protocol["direct_write"]["non_inferiority"]
    found: dict[str, Any] = {}
    for name in sorted(set(rows.loc[rows["metric"] == "direct/step_ms", "candidate"])):
        own = timed[timed["candidate"] == name]
        sides = {
            text: {int(b): float(v.mean()) for b, v in half.groupby("block")["value"]}
            for text, half in own.groupby("text")
        }
        speed = contrast(sides.get("append", {}), sides.get("direct", {}), protocol)
        identical = rows[(rows["candidate"] == name) & (rows["metric"] == "direct/identical")]
        saved = rows[(rows["candidate"] == name) & (rows["metric"] == "direct/bytes_not_copied")]
        found[str(name)] = {
            "identical": bool(len(identical) and (identical["value"] == 1).all()),
            "speed": speed,
            "non_inferior": bool(
                speed["ratio"] is not None
                and speed["ci95"][0] is not None
                and math.log(speed["ci95"][0])
                >= math.log1p(-margin) - protocol["decision"]["relative_slack"]
            ),
            "bytes_not_copied_per_token": digits(float(saved["value"].mean()))
            if len(saved)
            else None,
        }
    return found
