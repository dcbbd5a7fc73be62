"""Where the difference comes from: the registered hypotheses and direct write; and the control."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from kvtrial.decision.contrasts import (
    Layouts,
    Measured,
    cell_key,
    contrast,
    contrast_of,
    digits,
    unpaired,
)
from kvtrial.decision.validity import Judged
from kvtrial.measure import figures
from kvtrial.measure.aliases import WAYS, way_of
from kvtrial.measure.plan import SamplingPlan
from kvtrial.registration import Protocol


def hypotheses(
    measured: Measured, shape: str, layouts: Layouts, protocol: Protocol
) -> list[dict[str, Any]]:
    """Each registered contrast wherever it was measured.

    ``m2/tokens_per_s`` is decode with the model, whose head shape is ``shape``;
    ``m1/attention_speed`` is attention alone, at every head shape measured.
    """
    rules, confidence = protocol["m1"], protocol["decision"]["confidence"]
    found = []
    for hypothesis in protocol["hypotheses"]:
        start, end = hypothesis["from"], hypothesis["to"]
        named = {
            "id": hypothesis["id"],
            "claim": hypothesis["claim"],
            "from": start,
            "to": end,
            "layouts_differ": layouts.differ(start, end),
        }
        for cell in measured.cells:
            start_cell = cell
            if "threads" in hypothesis:
                if cell["threads"] != hypothesis["threads"]:
                    continue
                start_cell = {**cell, "threads": 1}
            alone = start_cell is cell
            row = {**named, "from_threads": start_cell["threads"], **cell_key(cell)}
            if measured.has(cell, end) and measured.has(start_cell, start):
                ratio = (
                    measured.contrast(cell, end, start)
                    if alone
                    else measured.unpaired((cell, end), (start_cell, start))
                )
                found.append(
                    {**row, "shape": shape, "metric": "m2/tokens_per_s", **ratio.as_json()}
                )
            for own in measured.shapes:
                # Speed is time the other way up.
                top = measured.attention_ms(start_cell, start, own)
                bottom = measured.attention_ms(cell, end, own)
                if not top or not bottom:
                    continue
                blocks = rules["blocks"] if own == shape else rules["shape_blocks"]
                plan = SamplingPlan.fixed(protocol, blocks)
                ratio = contrast(top, bottom, plan) if alone else unpaired(top, bottom, confidence)
                found.append(
                    {**row, "shape": own, "metric": "m1/attention_speed", **ratio.as_json()}
                )
    return found


def control(trials: Judged, protocol: Protocol) -> dict[str, Any] | None:
    """The control's figures, measured once: n is 1, there is no interval, and nothing rests on them."""
    if "control" not in protocol:
        return None
    name = protocol["control"]["candidate"]
    rows = trials.valid_rows[trials.valid_rows["stage"] == "control"]
    attention_ms = rows.loc[
        (rows["metric"] == "m1/attention_ms") & (rows["candidate"] == name), "value"
    ]
    reference = protocol["decision"]["reference"]
    blocks = list(figures.blocks(rows).values())
    steps = [step for block in blocks for step in block.all_steps(name)]
    speed = figures.log_speeds(blocks, name, reference)
    return {
        **protocol["control"],
        "tokens_per_s": digits(len(steps) / math.fsum(steps) * 1e3) if steps else None,
        "over_reference": digits(math.exp(speed[0])) if speed else None,
        "attention_ms": digits(float(attention_ms.median())) if len(attention_ms) else None,
    }


def direct_write(events: pd.DataFrame, trials: Judged, protocol: Protocol) -> dict[str, Any] | None:
    """Reserved slots against scratch and append: identical bytes, and step time not inferior.

    Times are those of valid blocks; the bytes are the same in every run of a block or not at all.
    """
    rows = events[events["stage"] == "direct_write"]
    if rows.empty:
        return None
    rules = protocol["direct_write"]
    plan = SamplingPlan.fixed(protocol, rules["blocks"])
    valid = trials.valid_rows[trials.valid_rows["stage"] == "direct_write"]
    blocks = figures.blocks(valid).values()
    hashes = rows[rows["metric"].isin(["output_xxh3", "rows_xxh3"])]
    edge = math.log1p(-rules["non_inferiority"]) - protocol["decision"]["relative_slack"]
    found: dict[str, Any] = {}
    for name in sorted({way_of(arm)[0] for arm in hashes["candidate"]}):
        direct, append = (f"{name}.{way}" for way in WAYS)
        sides = {
            arm: set(zip(own["metric"], own["block"], own["text"]))
            for arm, own in hashes[hashes["candidate"].isin([direct, append])].groupby("candidate")
        }
        speed = contrast_of(figures.log_speeds(blocks, direct, append), plan)
        low = None if speed.ci95 is None else speed.ci95[0]
        slots = rows[(rows["candidate"] == direct) & (rows["metric"] == "m2/by_slot")]["value"]
        row_bytes = rows[(rows["candidate"] == direct) & (rows["metric"] == "m2/row_bytes")][
            "value"
        ]
        found[name] = {
            "identical": len(sides) == 2 and sides[direct] == sides[append],
            "speed": speed.as_json(),
            "non_inferior": low is not None
            and speed.n_blocks >= plan.first
            and math.log(low) >= edge,
            "reserved_share": digits(float(slots.mean())) if len(slots) else None,
            "bytes_not_copied_per_token": digits(float(slots.mean() * row_bytes.median()))
            if len(slots) and len(row_bytes)
            else None,
        }
    return found
