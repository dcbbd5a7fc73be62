"""A trial in the forms that MLflow shows: Markdown, tables and named numbers. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvtrial.decision import labels
from kvtrial.run import events


def markdown(verdict: dict[str, Any], links: Mapping[str, str]) -> str:
    """The description of a trial's run, the verdict in its first line.

    Parameters
    ----------
    verdict : dict
        What verdict.json holds.
    links : mapping of str to str
        Stage → where its run is shown.
    """
    hot, cold = verdict["hot"], verdict["cold"]
    lines = [
        f"**{hot['outcome']}: {hot['adopted'] or 'undecided'}** on `{verdict['machine']}` with "
        f"`{verdict['model']}`" + (" (synthetic weights)" if verdict["synthetic"] else ""),
        "",
        f"{hot['reason']}.",
        "",
        f"Cold: **{cold['adopted'] or 'undecided'}**. {cold['reason']}.",
        "",
        "### Decode, by arm",
        "",
        "| arm | context | sessions | threads | tokens/s | p50 ms | p95 ms | blocks |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm in hot["arms"]:
        lines.append(
            f"| {arm['candidate']} | {arm['context']:,} | {arm['sessions']} | {arm['threads']} | "
            f"{_shown(arm['tokens_per_s'])} | {_shown(arm['step_ms_p50'])} | "
            f"{_shown(arm['step_ms_p95'])} | {arm['n_blocks']} |"
        )
    primary = [c for c in hot["contrasts"] if c["role"] == "primary" and c["ratio"] is not None]
    if primary:
        lines += [
            "",
            "### The primary cell",
            "",
            "| challenger | incumbent | ratio of tokens/s | 95% t interval | blocks |",
            "| --- | --- | ---: | ---: | ---: |",
        ]
    for contrast in primary:
        low, high = contrast["ci95"]
        lines.append(
            f"| {contrast['challenger']} | {contrast['incumbent']}"
            f"{labels.of_contrast(contrast)} | {contrast['ratio']:.3f} | "
            f"{low:.3f} to {high:.3f} | {contrast['n_blocks']} |"
        )
    lines += ["", "### Error rates", "", *_error_rates(verdict["characteristics"])]
    out = {name: reasons for name, reasons in verdict["eligibility"].items() if reasons}
    if out:
        lines += ["", "### Not eligible to win", ""]
        lines += [f"- {name}: {'; '.join(reasons)}" for name, reasons in out.items()]
    if links:
        shown = " · ".join(f"[{stage}]({link})" for stage, link in sorted(links.items()))
        lines += ["", f"Stages: {shown}"]
    lines += [
        "",
        "The page with all figures is the artifact `report.html`; tables are in `tables/`.",
    ]
    return "\n".join(lines)


def _error_rates(found: dict[str, Any]) -> list[str]:
    """What was simulated and what A/A measured, a line each."""
    if found["adopt_probability"] is None:
        simulated = f"- Not simulated: {found['reason']}."
    else:
        at = found["true_improvement"].index(found["adopt_at"])
        simulated = (
            f"- {found['challenger']} under this run's noise: adopted in "
            f"{found['adopt_probability'][at]:.2%} of simulated runs at a true improvement of exactly "
            f"{found['adopt_at']:.0%}; the claim is at most {found['claim_familywise']:.1%}."
        )
    aa = found["aa"]
    measured = f"- A/A, {aa['candidate']} registered twice: "
    if aa["ratio"] is None:
        return [simulated, f"{measured}{aa['problem']}."]
    low, high = aa["ci95"]
    measured += (
        f"ratio {aa['ratio']:.4f} [{low:.4f}, {high:.4f}] over {aa['n_blocks']} blocks, which "
    )
    measured += "covers 1" if aa["covers_1"] else "does not cover 1, as one run in twenty by chance"
    implied = aa["false_adoption"]
    if implied["adopt_probability"] is not None:
        measured += (
            f"; under its noise {implied['adopt_probability'][0]:.2%} of simulated runs adopt at no "
            f"improvement, {implied['adopt_probability'][-1]:.2%} at exactly "
            f"{implied['true_improvement'][-1]:.0%}"
        )
    return [simulated, f"{measured}."]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def tables(verdict: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """Name → table: arms, contrasts, hypotheses, eligibility; a column a key, units in the names."""
    hot = verdict["hot"]
    eligibility = [
        {"candidate": name, "eligible": not reasons, "reasons": "; ".join(reasons)}
        for name, reasons in verdict["eligibility"].items()
    ]
    found = {
        "arms": hot["arms"],
        "contrasts": hot["contrasts"],
        "hypotheses": verdict["hypotheses"],
        "eligibility": eligibility,
    }
    return {name: pd.DataFrame(list(map(_bounds_apart, rows))) for name, rows in found.items()}


def _bounds_apart(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose intervals are two columns each."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list) and len(value) == 2:
            flat |= {f"{key}_low": value[0], f"{key}_high": value[1]}
        else:
            flat[key] = value
    return flat


def verdict_metrics(verdict: dict[str, Any]) -> dict[str, float]:
    """Metric name → number: contrasts with their bounds, each arm's tokens/s, the error rates."""
    found: dict[str, float | None] = {}
    for contrast in verdict["hot"]["contrasts"]:
        name = f"contrast/{contrast['challenger']}_over_{contrast['incumbent']}.{_cell(contrast)}"
        low, high = contrast["ci95"] or (None, None)
        found |= {name: contrast["ratio"], f"{name}.low": low, f"{name}.high": high}
    for arm in verdict["hot"]["arms"]:
        found[f"m2/tokens_per_s.{arm['candidate']}.{_cell(arm)}"] = arm["tokens_per_s"]
    rates = verdict["characteristics"]
    for improvement, chance in zip(
        rates.get("true_improvement", []), rates["adopt_probability"] or []
    ):
        found[f"characteristics/adopt_probability_at_{improvement:.3f}"] = chance
    found |= _same_twice(rates["aa"])
    return {name: value for name, value in found.items() if value is not None}


def _same_twice(aa: dict[str, Any]) -> dict[str, float | None]:
    """A/A's metrics, beside those of the simulated error rates."""
    if aa["ratio"] is None:
        return {}
    name = "characteristics/aa"
    found: dict[str, float | None] = {
        f"{name}_ratio": aa["ratio"],
        f"{name}_ratio.low": aa["ci95"][0],
        f"{name}_ratio.high": aa["ci95"][1],
        f"{name}_blocks": float(aa["n_blocks"]),
        f"{name}_covers_1": float(aa["covers_1"]),
        f"{name}_adopts": float(aa["adopts"]),
    }
    implied = aa["false_adoption"]
    for improvement, chance in zip(
        implied.get("true_improvement", []), implied["adopt_probability"] or []
    ):
        found[f"{name}_adopt_probability_at_{improvement:.3f}"] = chance
    return found


def _cell(row: dict[str, Any]) -> str:
    return f"{row['context']}_{row['sessions']}s_{row['threads']}t"


#: Logged value by value, in the order in which they were taken; the rest as one number an arm.
SERIES = ("m2/step_ms", "m2/attention_ms", "m1/attention_ms", "direct/step_ms")
#: How a metric of many values becomes one number, where that is not their median.
_AS_ONE: dict[str, Callable[[Any], Any]] = {
    "parity/positions": np.sum,
    "parity/max_abs_logit_difference": np.max,
    "quality/kld": np.mean,
    "quality/worst_kld": np.max,
    "quality/top1_agrees": np.sum,
    "quality/decode_kld": np.mean,
    "quality/decode_top1_agrees": np.mean,
}
_MEANINGLESS_AS_ONE = ("conformance/outcome", "attempt/complete")


def arm_metrics(rows: pd.DataFrame, sessions: int) -> list[tuple[str, float, int]]:
    """(metric, value, step) of one arm; a block that was void and run again counts by its last run.

    Parameters
    ----------
    rows : DataFrame
        Events of one candidate in one cell, of one attempt.
    sessions : int
        Concurrent sessions of the cell: each step makes a token for each.
    """
    outcomes = rows.loc[rows["metric"] == "conformance/outcome", "value"]
    found: list[tuple[str, float, int]] = []
    if len(outcomes):
        counts = {"passed": outcomes == 1, "failed": outcomes == 0, "gaps": outcomes.isna()}
        found += [(f"conformance/{word}", float(which.sum()), 0) for word, which in counts.items()]
    last = rows["trial"] == rows.groupby("block")["trial"].transform("max")
    numbers = rows[last & rows["value"].notna() & ~rows["metric"].isin(_MEANINGLESS_AS_ONE)]
    # The text of a number says which of two ways was measured.
    for (metric, way), own in numbers.sort_values(["block", "index"]).groupby(["metric", "text"]):
        name = events.METRIC_CHARACTERS.sub("_", f"{metric}.{way}" if way else str(metric))
        values = own["value"].to_numpy(np.float64)
        if metric in SERIES:
            found += [(name, value, step) for step, value in enumerate(values.tolist())]
            found += [(f"{name}.p{q}", float(np.percentile(values, q)), 0) for q in (50, 95)]
        else:
            found.append((name, float(_AS_ONE.get(str(metric), np.median)(values)), 0))
    steps = numbers.loc[numbers["metric"] == "m2/step_ms", "value"]
    if steps.sum() > 0:
        found.append(("m2/tokens_per_s", len(steps) * sessions / (steps.sum() / 1000.0), 0))
    return found
