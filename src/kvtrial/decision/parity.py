"""Parity with the frozen baseline, judged from events alone.

All texts are teacher-forced, and every logit has to stay within the tolerance that the candidate's profile
declares: of the baseline's (``parity.baseline``) on the prompt set, and at each filled context of the
comparison's (``parity.comparison``). The baseline is compared with that one there too: those rows say
whether the comparison is in parity. No token is judged: where two logits are nearly equal, the last bit of
a sum picks one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kvtrial.decision.contrasts import digits

#: The column ``context`` of the prompt set's rows.
PROMPTS = 0
#: (candidate, context) → metric → index → value
Tables = dict[tuple[str, int], dict[str, dict[int, float]]]


def judge(events: pd.DataFrame, protocol: dict[str, Any]) -> dict[str, Any]:
    """What verdict.json says under ``parity``."""
    rules = protocol["parity"]
    baseline, comparison = rules["baseline"], rules["comparison"]
    tables = read(events)
    profiles = events[(events["stage"] == "run") & (events["metric"] == "candidate/profile")]
    profile_of = dict(zip(profiles["candidate"], profiles["text"]))
    left_out = skipped(events, protocol)
    held = [context for context in contexts(protocol) if context not in left_out]
    found = {
        name: _of(tables, name, profile_of[name], held, rules)
        for name in protocol["candidates"]
        if name != baseline and name in profile_of
    }
    doubts = found.get(comparison, {"reasons": ["not run"]})["reasons"]
    for name, one in found.items():
        if name != comparison and held and doubts:
            one["reasons"].append(
                f"parity: not shown at the filled contexts: {comparison} is not in parity"
            )
    return {
        "baseline": baseline,
        "comparison": comparison,
        "contexts": held,
        "skipped": {str(context): reason for context, reason in sorted(left_out.items())},
        "candidates": found,
    }


def contexts(protocol: dict[str, Any]) -> list[int]:
    """The filled contexts of the deciding cells, ascending."""
    return sorted({cell["context"] for cell in protocol["cells"] if cell["role"] != "extra"})


def read(events: pd.DataFrame) -> Tables:
    """The stage's numbers."""
    rows = events[events["stage"] == "parity"]
    columns = [rows[name].tolist() for name in ("candidate", "context", "metric", "index", "value")]
    tables: Tables = {}
    for candidate, context, metric, index, value in zip(*columns):
        tables.setdefault((candidate, context), {}).setdefault(metric, {})[index] = value
    return tables


def skipped(events: pd.DataFrame, protocol: dict[str, Any]) -> dict[int, str]:
    """Context → why the machine could not hold its deciding cell."""
    own = events[(events["stage"] == "parity") & (events["metric"] == "cell/skipped")]
    reasons = dict(zip(zip(own["context"], own["sessions"], own["threads"]), own["text"]))
    deciding = [cell for cell in protocol["cells"] if cell["role"] != "extra"]
    return {
        cell["context"]: reasons[key]
        for cell in deciding
        if (key := (cell["context"], cell["sessions"], cell["threads"])) in reasons
    }


def _of(
    tables: Tables, name: str, profile: str, contexts: list[int], rules: dict[str, Any]
) -> dict[str, Any]:
    tolerance = rules["logits_tolerance"][profile]
    few = name == rules["comparison"] or name in rules["slow"]
    wanted = {PROMPTS: rules["prompts"]}
    wanted |= dict.fromkeys(contexts, rules["slow_chunks" if few else "chunks"])
    reasons, by_context, overall = [], [], 0.0
    for context, needed in wanted.items():
        where = "the prompt set" if context == PROMPTS else f"context {context}"
        # A difference has no sign: the baseline's rows say what the comparison's would.
        pair = rules["baseline"] if name == rules["comparison"] and context != PROMPTS else name
        at = tables.get((pair, context), {})
        differences = at.get("parity/max_abs_logit_difference", {})
        have = len(differences.keys() & set(range(needed)))
        # np.max rather than max: a NaN among them stays.
        largest = float(np.max([*differences.values()] or [np.nan]))
        overall = float(np.maximum(overall, largest))  # a NaN stays
        if have < needed:
            reasons.append(f"parity: not shown at {where}: {have} of {needed} texts were compared")
        elif not largest <= tolerance:
            reasons.append(
                f"parity: at {where} a logit differs by {largest:.4g}; declared tolerance {tolerance:g}"
            )
        by_context.append(
            {
                "context": context,
                "texts": have,
                "positions": int(sum(at.get("parity/positions", {}).values())),
                "max_abs_logit_difference": digits(largest),
            }
        )
    return {
        "tolerance": tolerance,
        "max_abs_logit_difference": digits(overall),
        "by_context": by_context,
        "reasons": reasons,
    }
