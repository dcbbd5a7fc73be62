"""A trial in the forms that MLflow shows: Markdown, tables and named numbers. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvtrial.decision import labels
from kvtrial.decision.document import Document
from kvtrial.run import events
from kvtrial.show import answers


def run_name(verdict: Document) -> str:
    """A trial in a line: ``K2T, KEEP K1 · smollm2-135m · x86_64-avx2-2c · 2026-12-01``."""
    _, language, _ = answers.of_verdict(verdict)
    said = language.answer.replace(f" ({verdict['language']['kind']})", "").replace(":", "")
    parts = (
        f"{verdict['run']['store'] or 'undecided'}, {said}",
        verdict["model"],
        verdict["machine"],
        verdict["measured"]["begun"][:10],
    )
    return " · ".join(part for part in parts if part)


def markdown(verdict: Document, links: Mapping[str, str]) -> str:
    """The description of a trial's run: the three answers, then one row an arm.

    Parameters
    ----------
    verdict : dict
        What verdict.json holds.
    links : mapping of str to str
        Stage → where its run is shown.
    """
    run, language = verdict["run"], verdict["language"]
    fp32 = run["fp32_store"]
    what, which, cold = answers.of_verdict(verdict)
    synthetic = " (synthetic weights)" if verdict["synthetic"] else ""
    lines = [
        f"**Run {what.answer}** on `{verdict['machine']}` with `{verdict['model']}`{synthetic}",
        "",
        f"{what.reason}.",
        "",
        f"Language: **{which.answer}**. {which.reason}.",
        "",
        f"Cold store: **{cold.answer}**. {cold.reason}.",
        "",
        "### Arms: tokens/s by filled positions",
        "",
    ]
    contexts = answers.contexts(verdict)
    primary = answers.primary_context(verdict)
    over = f"over {fp32}" + (f" at {primary:,}" if primary else "")
    heads = ["arm", *answers.context_heads(verdict), over, "bytes a token", "KLD under", "why not"]
    lines += [_line(heads), _line(["---"] + ["---:"] * (len(heads) - 2) + ["---"])]
    for arm in answers.arms(verdict):
        if arm.rates:
            rates = [(arm.rates.get(c) or {}).get("tokens_per_s") for c in contexts]
            size, kld = arm.bytes_per_token, arm.kld
            lines.append(
                _line(
                    [
                        f"**{arm.name}**" if arm.chosen else arm.name,
                        *map(answers.significant, rates),
                        answers.interval(arm.ratio, 3),
                        "-" if size is None else f"{size:,.0f}",
                        "-" if kld is None else f"{kld:.2g}",
                        arm.state,
                    ]
                )
            )
    if past := answers.past_trained(verdict):
        lines += ["", f"{past.replace('*', chr(92) + '*')}."]
    if language["against"]:
        lines += [
            "",
            f"### {language['challenger']} over the incumbents"
            + (f" at {primary:,}" if primary else ""),
            "",
            "| incumbent | ratio of tokens/s, 95% interval | blocks |",
            "| --- | ---: | ---: |",
        ]
        lines += [
            f"| {row['incumbent']}{labels.of_contrast(row)} | {answers.interval(row, 3)} | "
            f"{row['n_blocks']} |"
            for row in language["against"]
        ]
    lines += ["", "### Known answers and error rates", ""]
    lines += [*_known_answers(verdict["known_answers"]), *_error_rates(verdict["error_rates"])]
    out = [(arm.name, arm.reasons) for arm in answers.arms(verdict) if arm.reasons]
    if out:
        lines += ["", "### Why not", ""]
        lines += [f"- {name}: {'; '.join(reasons)}" for name, reasons in out]
    if links:
        shown = " · ".join(f"[{stage}]({link})" for stage, link in sorted(links.items()))
        lines += ["", f"Stages: {shown}"]
    lines += [
        "",
        "The page with all figures is the artifact `report.html`; tables are in `tables/`.",
    ]
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _known_answers(known: dict[str, Any]) -> list[str]:
    """What is known and what was measured of it, a line each."""
    lines = []
    for test in known["tests"]:
        pair = f"{known['candidate']} as {test['top']} over {test['bottom']}"
        measured = (
            test["problem"]
            if test["ratio"] is None
            else f"measured {answers.interval(test, 4)} over {test['n_blocks']} blocks"
        )
        lines.append(f"- {pair} is {test['truth']:.2f}: {measured}.")
    return lines


def _error_rates(rates: dict[str, Any]) -> list[str]:
    """What was simulated, a line an arrangement."""
    if rates["arrangements"] is None:
        return [f"- Error rates were not simulated: {rates['reason']}."]
    lines = []
    for way, said in answers.ARRANGEMENTS.items():
        chances = rates["arrangements"][way]["adopt_probability"]
        pairs = zip(rates["true_improvement"], chances)
        shown = ", ".join(f"{chance:.2%} at {true:.1%}" for true, chance in pairs)
        lines.append(
            f"- {rates['challenger']} is adopted by its true improvement, {said}: {shown}."
        )
    lines.append(
        f"- The claim is at most {rates['claim']:.1%} at exactly {rates['adopt_at']:.0%}, and "
        f"{'holds' if rates['claim_holds'] else 'does not hold'}."
    )
    return lines


def tables(verdict: Document) -> dict[str, pd.DataFrame]:
    """Name → table: profiles, arms, contrasts, hypotheses, eligibility; a column a key, units in the names."""
    eligibility = [
        {
            "candidate": name,
            "eligible": not reasons,
            "reasons": "; ".join(answers.sentences(reasons)),
        }
        for name, reasons in verdict["eligibility"].items()
    ]
    rows_of = {
        "profiles": [_profile(row) for row in verdict["run"]["profiles"]],
        "arms": verdict["arms"],
        "contrasts": verdict["contrasts"],
        "hypotheses": verdict["hypotheses"],
        "eligibility": eligibility,
    }
    return {name: pd.DataFrame(list(map(_bounds_apart, rows))) for name, rows in rows_of.items()}


def _profile(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the profiles, flat: one column a context."""
    flat = {
        key: row[key]
        for key in ("candidate", "profile", "bytes_per_token", "tokens_per_gib", "chosen")
    }
    flat |= {f"tokens_per_s_{context}": rate for context, rate in row["tokens_per_s"].items()}
    for context, ratio in (row["against_fp32"] or {}).items():
        flat |= {f"ratio_{context}": ratio["ratio"], f"ratio_{context}_ci": ratio["ci95"]}
    flat["kld_upper"] = answers.divergence(row["quality"])
    return {**flat, "why_not": "; ".join(row["why_not"])}


def _bounds_apart(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose intervals are two columns each."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list) and len(value) == 2:
            flat |= {f"{key}_low": value[0], f"{key}_high": value[1]}
        else:
            flat[key] = value
    return flat


def verdict_metrics(verdict: Document) -> list[tuple[str, float, int]]:
    """(metric, value, step) of a verdict; the step of what is measured by context is the context.

    A chart of one metric is then its scaling. What could not be measured is left out.
    """
    run = verdict["run"]
    metrics: list[tuple[str, float | None, int]] = []
    for arm in verdict["arms"]:
        name = f"tokens_per_s/{arm['candidate']}{_cell(arm)}"
        metrics.append((name, arm["tokens_per_s"], arm["context"]))
    for row in verdict["contrasts"]:
        if answers.decides(verdict, row):
            name = f"ratio/{row['challenger']}_over_{row['incumbent']}{_cell(row)}"
            metrics += _with_bounds(name, row, row["context"])
    for row in run["profiles"]:
        for context, ratio in (row["against_fp32"] or {}).items():
            name = f"ratio/{row['candidate']}_over_{run['fp32_store']}"
            metrics += _with_bounds(name, ratio, int(context))
        metrics += [
            (f"quality/{key}.{row['candidate']}", one.get(key), one["context"])
            for one in row["quality"]
            for key in ("mean_kld", "kld_upper", "top1_lower")
        ]
        if row["chosen"]:
            metrics += [
                ("chosen/bytes_per_token", row["bytes_per_token"], 0),
                ("chosen/tokens_per_gib", row["tokens_per_gib"], 0),
            ]
            metrics += [
                ("chosen/tokens_per_s", rate, int(context))
                for context, rate in row["tokens_per_s"].items()
            ]
            for context, ratio in (row["against_fp32"] or {}).items():
                metrics += _with_bounds("chosen/ratio_to_fp32", ratio, int(context))
    for test in verdict["known_answers"]["tests"]:
        name = f"known_answers/{test['top']}_over_{test['bottom']}"
        metrics += [*_with_bounds(name, test, 0), (f"{name}.truth", test["truth"], 0)]
    rates = verdict["error_rates"]
    for way, own in (rates["arrangements"] or {}).items():
        for improvement, chance in zip(rates["true_improvement"], own["adopt_probability"]):
            metrics.append((f"error_rates/{way}.adopted_at_{improvement:.3f}", chance, 0))
    return [(name, value, step) for name, value, step in metrics if value is not None]


def _with_bounds(name: str, row: dict[str, Any], step: int) -> list[tuple[str, float | None, int]]:
    """A ratio and the ends of its interval."""
    low, high = row["ci95"] or (None, None)
    return [(name, row["ratio"], step), (f"{name}.low", low, step), (f"{name}.high", high, step)]


def _cell(row: dict[str, Any]) -> str:
    """Sessions and threads behind a metric's name where either is not 1."""
    if row["sessions"] == row["threads"] == 1:
        return ""
    return f".{row['sessions']}s_{row['threads']}t"


def machine_metrics(rows: pd.DataFrame) -> list[tuple[str, float, int]]:
    """(metric, value, step) of the probes of one attempt, which stand around its blocks; the step counts them.

    Named ``system/…``, so that MLflow shows them among the system metrics.
    """
    own = rows[rows["metric"].str.startswith("probe/") & rows["value"].notna()]
    return [
        (f"system/{str(metric).removeprefix('probe/')}", float(value), step)
        for metric, values in own.groupby("metric")["value"]
        for step, value in enumerate(values)
    ]


#: Logged value by value, in the order in which they were taken; the rest as one number an arm.
SERIES = ("m2/step_ms", "m2/attention_ms", "m1/attention_ms")
#: How a metric of many values becomes one number, where that is not their median.
_AS_ONE: dict[str, Callable[[Any], Any]] = {
    "parity/positions": np.sum,
    "parity/max_abs_logit_difference": np.max,
    "parity/decode_max_abs_logit_difference": np.max,
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
    metrics: list[tuple[str, float, int]] = []
    if len(outcomes):
        counts = {"passed": outcomes == 1, "failed": outcomes == 0, "gaps": outcomes.isna()}
        metrics += [
            (f"conformance/{word}", float(which.sum()), 0) for word, which in counts.items()
        ]
    last = rows["trial"] == rows.groupby("block")["trial"].transform("max")
    numbers = rows[last & rows["value"].notna() & ~rows["metric"].isin(_MEANINGLESS_AS_ONE)]
    for metric, own in numbers.sort_values(["block", "index"]).groupby("metric"):
        name = events.METRIC_CHARACTERS.sub("_", str(metric))
        values = own["value"].to_numpy(np.float64)
        if metric in SERIES:
            metrics += [(name, value, step) for step, value in enumerate(values.tolist())]
            metrics += [(f"{name}.p{q}", float(np.percentile(values, q)), 0) for q in (50, 95)]
        else:
            metrics.append((name, float(_AS_ONE.get(str(metric), np.median)(values)), 0))
    steps = numbers.loc[numbers["metric"] == "m2/step_ms", "value"]
    if steps.sum() > 0:
        metrics.append(("m2/tokens_per_s", len(steps) * sessions / (steps.sum() / 1000.0), 0))
    return metrics
