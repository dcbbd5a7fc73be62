"""Parity with the frozen baseline, judged from events alone.

All texts are teacher-forced, and every logit has to stay within the tolerance that the candidate's profile
declares: of the baseline's (``parity.baseline``) on the prompt set, and at each filled context of the
comparison's (``parity.comparison``). The baseline is compared with that one there too: those rows say
whether the comparison is in parity. Texts go through the causal block form, whose kernel several stores
share, and a few steps through the decode, whose kernel is an arm's own. No token is judged: where two logits
are nearly equal, the last bit of a sum picks one.

Beyond its trained length a model amplifies that last bit. There the tolerances are wider, for FP32 arms
(``parity.tolerance_beyond``), and an arm of a profile without one is reported only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from kvtrial.decision import facts
from kvtrial.decision.contrasts import digits
from kvtrial.registration import Protocol

#: The column ``context`` of the prompt set's rows.
PROMPTS = 0
#: (candidate, context) → metric → index → value
Tables = dict[tuple[str, int], dict[str, dict[int, float]]]


def judge(events: pd.DataFrame, protocol: Protocol) -> dict[str, Any]:
    """What verdict.json says under ``parity``."""
    rules = protocol["parity"]
    baseline, comparison = rules["baseline"], rules["comparison"]
    tables = read(events)
    profile_of = facts.by_candidate(events, "candidate/profile")
    trained = facts.context_length(events)
    left_out = skipped(events, protocol)
    held = [context for context in contexts(protocol) if context not in left_out]
    found = {
        name: _of(tables, name, profile_of[name], held, protocol, trained)
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


def contexts(protocol: Protocol) -> list[int]:
    """The filled contexts of the deciding cells, ascending."""
    return sorted({cell["context"] for cell in protocol["cells"] if cell["role"] != "extra"})


def within(protocol: Protocol, context: int, trained: int) -> bool:
    """Whether all that is fed after a context lies within the model's trained length."""
    rules = protocol["quality"]
    longest = math.ceil(rules["chunks"] / rules["places"]) * rules["chunk_tokens"]
    return bool(context + longest <= trained)


def read(events: pd.DataFrame) -> Tables:
    """The stage's numbers."""
    rows = events[events["stage"] == "parity"]
    columns = [rows[name].tolist() for name in ("candidate", "context", "metric", "index", "value")]
    tables: Tables = {}
    for candidate, context, metric, index, value in zip(*columns):
        tables.setdefault((candidate, context), {}).setdefault(metric, {})[index] = value
    return tables


def skipped(events: pd.DataFrame, protocol: Protocol) -> dict[int, str]:
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
    tables: Tables,
    name: str,
    profile: str,
    held: list[int],
    protocol: Protocol,
    trained: int | None,
) -> dict[str, Any]:
    rules = protocol["parity"]
    few = name == rules["comparison"] or name in rules["slow"]
    chunks = rules["slow_chunks" if few else "chunks"]
    reasons, by_context, overall = [], [], 0.0
    if profile not in rules["logits_tolerance"]:
        reasons.append(
            f"parity: the protocol declares no tolerance for profile {profile}; add it to "
            "parity.logits_tolerance"
        )
    for context in [PROMPTS, *held]:
        texts, steps = (chunks, rules["decode_steps"]) if context else (rules["prompts"], 0)
        where = f"context {context}" if context else "the prompt set"
        beyond = trained is not None and not within(protocol, context, trained)
        # None: nothing is declared for a profile there.
        tolerance = rules["tolerance_beyond" if beyond else "logits_tolerance"].get(profile)
        # A difference has no sign: the baseline's rows say what the comparison's would.
        pair = rules["baseline"] if name == rules["comparison"] and context else name
        at = tables.get((pair, context), {})
        fed, decoded = (
            at.get(f"parity/{kind}max_abs_logit_difference", {}) for kind in ("", "decode_")
        )
        have = len(fed.keys() & set(range(texts))), len(decoded.keys() & set(range(steps)))
        # np.max rather than max: a NaN among them stays.
        largest = float(np.max([*fed.values(), *decoded.values()] or [np.nan]))
        if tolerance is not None:
            overall = float(np.maximum(overall, largest))  # a NaN stays
            if have[0] < texts or have[1] < steps:
                reasons.append(
                    f"parity: not shown at {where}: {have[0]} of {texts} texts and {have[1]} of {steps} "
                    "decoded steps were compared"
                )
            elif not largest <= tolerance:
                reasons.append(
                    f"parity: at {where} a logit differs by {largest:.4g}; declared tolerance {tolerance:g}"
                )
        by_context.append(
            {
                "context": context,
                "texts": have[0],
                "positions": int(sum(at.get("parity/positions", {}).values())),
                "decoded_steps": len(decoded),
                "max_abs_logit_difference": digits(largest),
                "tolerance": tolerance,
            }
        )
    return {
        "tolerance": rules["logits_tolerance"].get(profile),
        "max_abs_logit_difference": digits(overall),
        "by_context": by_context,
        "reasons": reasons,
    }
