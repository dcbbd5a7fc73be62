"""What reduced precision costs, judged from events alone: divergence and top-1 agreement, with bounds.

The reference is ``parity.comparison``, an FP32 arm that has to be in parity itself. A profile's quality is
shown where, at every filled context that lies within the model's trained length, the upper bound of the
mean divergence and the lower bound of the agreement pass the registered gates. A context beyond that
length is reported and decides nothing: what the model says there is noise to begin with.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from kvtrial.decision import facts, parity
from kvtrial.decision.contrasts import digits
from kvtrial.registration import Protocol


def chunks(protocol: Protocol, context: int, trained: int) -> int:
    """Chunks that are registered for a profile's arm at a context."""
    gated = parity.within(protocol, context, trained)
    return int(protocol["quality"]["chunks" if gated else "reported_chunks"])


def judge(
    events: pd.DataFrame, protocol: Protocol, in_parity: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Profile's arm → ``shown``, ``reasons`` why not, ``contexts`` and ``decode`` with the figures.

    ``in_parity`` is what `kvtrial.decision.parity.judge` gave.
    """
    trained = facts.context_length(events)
    tables, skipped = parity.read(events), parity.skipped(events, protocol)
    reference = protocol["parity"]["comparison"]
    in_doubt = in_parity["candidates"].get(reference, {}).get("reasons")
    result = {}
    for name in protocol["decision"]["profiles"]:
        reasons = []
        if in_doubt:
            reasons.append(f"quality: {reference}, which it is compared with, is not in parity")
        if trained is None:
            reasons.append("quality: the model's trained length is not known")
        found = [
            _context(tables, name, context, trained, protocol, skipped)
            for context in parity.contexts(protocol)
        ]
        gated = [one for one in found if one["gated"]]
        if trained is not None and not gated:
            reasons.append(f"quality: no context lies within the trained length of {trained}")
        reasons += [reason for one in gated for reason in one.pop("reasons")]
        for one in found:
            one.pop("reasons", None)
        decode, doubt = _decode(tables, name, trained, protocol)
        reasons += doubt
        result[name] = {
            "shown": not reasons,
            "reasons": reasons,
            "contexts": found,
            "decode": decode,
        }
    return result


def _context(
    tables: parity.Tables,
    name: str,
    context: int,
    trained: int | None,
    protocol: Protocol,
    skipped: dict[int, str],
) -> dict[str, Any]:
    rules = protocol["quality"]
    gated = trained is not None and parity.within(protocol, context, trained)
    found: dict[str, Any] = {"context": context, "gated": gated}
    own = tables.get((name, context), {})
    kld, agrees, sizes = (
        own.get(metric, {}) for metric in ("quality/kld", "quality/top1_agrees", "parity/positions")
    )
    wanted = chunks(protocol, context, trained or 0)
    have = sum(chunk in kld and chunk in agrees and chunk in sizes for chunk in range(wanted))
    if have < wanted:
        why = skipped.get(context) or f"{have} of {wanted} chunks were measured"
        return found | {"chunks": have, "reasons": [f"quality: context {context}: {why}"]}
    values = np.array([kld[chunk] for chunk in range(wanted)])
    right, positions = (sum(table[chunk] for chunk in range(wanted)) for table in (agrees, sizes))
    upper = mean_upper(values, rules["confidence"], rules["resamples"], rules["seed"])
    lower = share_lower(right, positions, rules["confidence"])
    worst = own.get("quality/worst_kld", {}).values()
    reasons = []
    # `not <=` rather than `>`: a NaN passes nothing.
    if not upper <= rules["kld_upper"]:
        reasons.append(
            f"quality: context {context}: the mean KLD may be {upper:.3g}; at most "
            f"{rules['kld_upper']:g} is allowed"
        )
    if not lower >= rules["top1_lower"]:
        reasons.append(
            f"quality: context {context}: top-1 agreement may be {lower:.2%}; at least "
            f"{rules['top1_lower']:.0%} is needed"
        )
    return found | {
        "chunks": wanted,
        "positions": int(positions) if math.isfinite(positions) else None,
        "mean_kld": digits(float(values.mean())),
        "kld_upper": digits(upper),
        "worst_chunk_kld": digits(float(values.max())),
        "worst_position_kld": digits(float(np.max(list(worst) or [np.nan]))),
        "top1_agreement": digits(right / positions) if positions else None,
        "top1_lower": digits(lower),
        "reasons": reasons,
    }


def _decode(
    tables: parity.Tables, name: str, trained: int | None, protocol: Protocol
) -> tuple[dict[str, Any], list[str]]:
    """The cross-check by the decode, which is what runs, and why it fails."""
    rules = protocol["quality"]
    context, steps = rules["decode"]["context"], rules["decode"]["steps"]
    own = tables.get((name, context), {})
    kld, agrees = (own.get(f"quality/decode_{m}", {}) for m in ("kld", "top1_agrees"))
    gated = trained is not None and parity.within(protocol, context, trained)
    found: dict[str, Any] = {"context": context, "steps": len(kld), "gated": gated}
    if not all(step in kld and step in agrees for step in range(steps)):
        reasons = [f"quality: {len(kld)} of {steps} decoded steps were compared at {context}"]
        return found, reasons if gated else []
    mean = float(np.mean([kld[step] for step in range(steps)]))
    found["mean_kld"] = digits(mean)
    found["top1_agreement"] = digits(float(np.mean([agrees[step] for step in range(steps)])))
    if gated and not mean <= rules["kld_upper"]:
        said = f"quality: the decode's mean KLD at {context} is {mean:.3g}; at most {rules['kld_upper']:g}"
        return found, [said]
    return found, []


# --------------------------------------------------------------------------------------------------
# Bounds


def mean_upper(
    values: npt.NDArray[np.float64], confidence: float, resamples: int, seed: int
) -> float:
    """Upper end of the two-sided bootstrap-t interval of a mean (Efron and Tibshirani, An Introduction
    to the Bootstrap, section 12.5): divergence is skewed, and a t interval would end too low.

    Parameters
    ----------
    values : float64 (n,)
        By chunk. Equal values are their own bound. Not finite, or fewer than 3: NaN.
    confidence : float
        0.95 leaves 2.5% above the bound.

    Returns
    -------
    float
        Infinite where resamples without any spread, which know no bound, are as frequent as the tail.
    """
    if values.size < 3 or not np.isfinite(values).all():
        return math.nan
    scale = float(np.abs(values).max())
    if np.ptp(values) <= 1e-12 * scale:
        return float(values.max())
    x = values / scale  # squares of what is very large or small stay in range
    drawn = x[np.random.default_rng(seed).integers(0, x.size, (resamples, x.size))]
    shift, spread = drawn.mean(axis=1) - x.mean(), drawn.std(axis=1, ddof=1)
    t = np.divide(shift, spread, out=np.copysign(np.inf, shift), where=spread > 1e-12)
    # The order statistic itself: between an infinite t and its neighbour nothing interpolates.
    low = float(np.quantile(t, 0.5 - confidence / 2, method="inverted_cdf"))
    return scale * float(x.mean() - low * x.std(ddof=1))


def share_lower(right: float, of: float, confidence: float) -> float:
    """Lower end of the two-sided Clopper-Pearson interval of a share; NaN where the counts are none."""
    if not (of > 0 and 0 <= right <= of and right == int(right) and of == int(of)):
        return math.nan
    if right == 0:
        return 0.0
    return float(stats.beta.ppf(0.5 - confidence / 2, right, of - right + 1))
