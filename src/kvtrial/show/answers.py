"""The three answers of a verdict and its table of arms: what every view begins with. Pure functions.

Terminal, report, MLflow, `adopt` and the figures ask here, so that they say the same in the same order: what to
run, which language, which cold store.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtrial.decision import labels
from kvtrial.decision.language import INCONCLUSIVE

Verdict = Mapping[str, Any]
Row = dict[str, Any]


class Answer(NamedTuple):
    """One of the three: what was asked, what came out, and why."""

    question: str
    answer: str
    reason: str
    decided: bool


def of_verdict(verdict: Verdict) -> list[Answer]:
    """The answers in their order."""
    run, language, cold = verdict["run"], verdict["language"], verdict["cold"]
    stays = f": {language['adopted']}" if language["adopted"] else ""
    return [
        Answer("What to run", store(verdict), run["reason"], run["store"] is not None),
        Answer(
            "Which language",
            f"{outcome(verdict)}{stays}",
            language["reason"],
            language["outcome"] != INCONCLUSIVE,
        ),
        Answer(
            "Which cold store",
            cold["adopted"] or "undecided",
            cold["reason"],
            cold["adopted"] is not None,
        ),
    ]


def store(verdict: Verdict) -> str:
    """The store to run with its profile, as people read it."""
    run = verdict["run"]
    return "undecided" if run["store"] is None else f"{run['store']} ({run['profile'].upper()})"


def outcome(verdict: Verdict) -> str:
    """The language's outcome, with the kind of a KEEP."""
    language = verdict["language"]
    kind = f" ({language['kind']})" if language["kind"] else ""
    return f"{language['outcome']}{kind}"


def where(verdict: Verdict) -> str:
    """Model, machine and day of a verdict, and that the weights are random where they are."""
    synthetic = " (synthetic weights)" if verdict["synthetic"] else ""
    day = verdict["measured"]["begun"][:10]
    return f"{verdict['model']}{synthetic} on {verdict['machine']}" + (f", {day}" if day else "")


def measured(verdict: Verdict) -> str:
    """When and where it was measured, as far as the run says."""
    said = verdict["measured"]
    parts = (
        f"begun {said['begun'][:16].replace('T', ' ')} UTC" if said["begun"] else "",
        f"commit {said['commit'][:12]}" if said["commit"] else "",
        f"host {said['host']}" if said["host"] else "",
        said["kernel"],
    )
    return ", ".join(part for part in parts if part)


# --------------------------------------------------------------------------------------------------
# The table of arms


@dataclass(frozen=True)
class Arm:
    """A row of the table.

    Attributes
    ----------
    name : str
    profile : str
        How it stores numbers; empty where it was not measured.
    rates : dict of int to dict
        Context → the arm's row of that deciding cell: ``tokens_per_s`` and ``tokens_per_s_ci95``.
    ratio : dict or None
        ``ratio`` and ``ci95`` of tokens/s over the FP32 arm in the primary cell; ``ci95`` is None where the
        pair has no interval.
    bytes_per_token, tokens_per_gib : float or None
        What the cache takes for a token, and how many tokens a GiB holds.
    kld : float or None
        Of a reduced profile: the largest upper bound of the mean divergence over its contexts.
    state : str
        In a word or two: chosen, or why not.
    reasons : list of str
        The same in sentences.
    """

    name: str
    profile: str
    rates: dict[int, Row]
    ratio: Row | None
    bytes_per_token: float | None
    tokens_per_gib: int | None
    kld: float | None
    state: str
    reasons: list[str]

    @property
    def chosen(self) -> bool:
        """Whether it is what to run."""
        return self.state == RUN_THIS


RUN_THIS = "run this"
MEASURED_ONLY = (
    "measured only: the registration has it among candidates, but not among decision's challengers, incumbents or "
    "profiles, so it could not win (kvtrial protocol --add puts a candidate there)"
)
_GIB = 2**30


def primary_context(verdict: Verdict) -> int | None:
    """Filled positions of the primary cell; None where nothing was measured."""
    return next((a["context"] for a in verdict["arms"] if a["role"] == "primary"), None)


def contexts(verdict: Verdict) -> list[int]:
    """Filled positions of the deciding cells in which an arm was measured, ascending."""
    return sorted({a["context"] for a in verdict["arms"] if a["role"] != "extra"})


def context_heads(verdict: Verdict) -> list[str]:
    """`contexts` as heads of columns, those past the model's trained length with a star."""
    trained = verdict.get("context_length")
    return [labels.of_context(context, trained) for context in contexts(verdict)]


def past_trained(verdict: Verdict) -> str:
    """What the star of `context_heads` says, where there is one."""
    return labels.past_trained(contexts(verdict), verdict.get("context_length"))


def arms(verdict: Verdict) -> list[Arm]:
    """Every arm, the fastest in the primary cell first; who was not measured comes last."""
    deciding: dict[str, dict[int, Row]] = {name: {} for name in verdict["eligibility"]}
    for row in verdict["arms"]:
        if row["role"] != "extra":
            deciding.setdefault(row["candidate"], {})[row["context"]] = row
    primary = primary_context(verdict)

    def speed(arm: Arm) -> float:
        return (arm.rates.get(primary or 0, {}).get("tokens_per_s")) or 0.0

    arms = [_arm(verdict, name, rates, primary) for name, rates in deciding.items()]
    return sorted(arms, key=lambda arm: (not arm.rates, -speed(arm)))


def _arm(verdict: Verdict, name: str, rates: dict[int, Row], primary: int | None) -> Arm:
    profiles = {row["candidate"]: row for row in verdict["run"]["profiles"]}
    row = profiles.get(name, {})
    sizes = [own["row_bytes"] for own in rates.values() if own.get("row_bytes")]
    bytes_per_token = row.get("bytes_per_token") or (sizes[0] if sizes else None)
    state, reasons = _why_not(verdict, name, row)
    return Arm(
        name=name,
        profile=next((own["profile"] for own in rates.values()), row.get("profile", "")),
        rates=rates,
        ratio=over_fp32(verdict, name, primary),
        bytes_per_token=bytes_per_token,
        tokens_per_gib=int(_GIB // bytes_per_token) if bytes_per_token else None,
        kld=divergence(row.get("quality", [])),
        state=state,
        reasons=reasons,
    )


def over_fp32(verdict: Verdict, name: str, context: int | None) -> Row | None:
    """tokens/s of an arm over those of the FP32 arm at a context, with the interval that the rule looks at.

    A profile's interval is at ``run.confidence``, another's at 95%. A pair that the verdict does not compare has
    its quotient alone.
    """
    run = verdict["run"]
    fp32 = run["fp32_store"]
    if name == fp32 or context is None:
        return None
    for row in run["profiles"]:
        if row["candidate"] == name and row["against_fp32"]:
            ratio: Row | None = row["against_fp32"].get(str(context))
            return ratio
    compared = [
        *((c["challenger"], c["incumbent"], c) for c in verdict["contrasts"]),
        *(
            (h["to"], h["from"], h)
            for h in verdict["hypotheses"]
            if h["metric"] == "m2/tokens_per_s" and h["from_threads"] == h["threads"]
        ),
    ]
    for top, bottom, row in compared:
        if row["context"] != context or row["sessions"] != 1 or row["threads"] != 1:
            continue
        if row["ratio"] is None:
            continue
        if (top, bottom) == (name, fp32):
            return row
        if (top, bottom) == (fp32, name):
            low, high = row["ci95"]
            return {**row, "ratio": 1 / row["ratio"], "ci95": [1 / high, 1 / low]}
    own, theirs = (_rate(verdict, arm, context) for arm in (name, fp32))
    return {"ratio": own / theirs, "ci95": None} if own and theirs else None


def _rate(verdict: Verdict, name: str, context: int) -> float | None:
    for row in verdict["arms"]:
        if row["candidate"] == name and row["context"] == context and row["role"] != "extra":
            rate: float | None = row["tokens_per_s"]
            return rate
    return None


def decides(verdict: Verdict, contrast: Row) -> bool:
    """Whether a row of ``contrasts`` is one that the language's answer rests on."""
    language = verdict["language"]
    pairs = {(language["challenger"], row["incumbent"]) for row in language["against"]}
    pair = (contrast["challenger"], contrast["incumbent"])
    return contrast["role"] != "extra" and pair in pairs


def divergence(quality: list[Row]) -> float | None:
    """The largest bound of the mean divergence over contexts that decide; of all where none does."""
    gated = [one for one in quality if one.get("gated", True)] or quality
    bounds = [one.get("kld_upper", one.get("mean_kld")) for one in gated]
    known = [bound for bound in bounds if bound is not None]
    return max(known) if known else None


def _why_not(verdict: Verdict, name: str, row: Row) -> tuple[str, list[str]]:
    """A word or two, and sentences, about why an arm is not what to run."""
    run, language = verdict["run"], verdict["language"]
    out = verdict["eligibility"].get(name, [])
    if row.get("chosen"):
        return RUN_THIS, []
    if name == run["fp32_store"]:
        return "FP32 arm", sentences(out)
    if row.get("why_not"):
        return _kinds(text.partition(":")[0] for text in row["why_not"]), list(row["why_not"])
    if out:
        return _kinds(reason["why"] for reason in out), sentences(out)
    if row:
        return "not chosen", [f"not chosen: {run['reason']}"] if run["store"] else []
    if name == language["challenger"]:
        return language["kind"] or language["outcome"].lower(), []
    if name in language["retired"]:
        return "not tested", []
    if name not in {row["incumbent"] for row in verdict["contrasts"]}:
        return "measured only", [MEASURED_ONLY]
    return "", []


def sentences(reasons: Iterable[Mapping[str, str]]) -> list[str]:
    """A candidate's reasons, of ``eligibility``, each with its kind."""
    return [f"{reason['why']}: {reason['text']}" for reason in reasons]


#: Kinds of reason after which no other one matters.
_ALONE = ("not built", "a control")


def _kinds(words: Iterable[str]) -> str:
    """Each kind once; one of `_ALONE` says it all."""
    kinds = list(dict.fromkeys(words))
    return next((kind for kind in kinds if kind in _ALONE), ", ".join(kinds))


# --------------------------------------------------------------------------------------------------
# How far the method can be relied on

#: Of ``error_rates``: key → how the simulated incumbents stand, in words.
ARRANGEMENTS = {"as_measured": "incumbents as measured", "all_equal": "all incumbents equal"}


def covers(test: Mapping[str, Any]) -> str:
    """Whether a known answer's interval holds the truth, in words."""
    if test["covers"] is None:
        return "not measured"
    if test["covers"]:
        return "yes"
    return (
        "NO, and at 99.9% neither"
        if test["covers_certainly"] is False
        else "no, as one in twenty by chance"
    )


# --------------------------------------------------------------------------------------------------
# Numbers as people read them


def significant(value: float | None, digits: int = 3) -> str:
    """To so many significant digits, never in powers of ten: ``12,300``, ``45.5``, ``0.0412``."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def interval(row: Mapping[str, Any] | None, digits: int = 2) -> str:
    """``1.52 [1.50, 1.55]``; the number alone where there is no interval; a dash where there is none."""
    if row is None or row.get("ratio") is None:
        return "-"
    if row["ci95"] is None:
        return f"{row['ratio']:.{digits}f}"
    low, high = row["ci95"]
    return f"{row['ratio']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def tail(row: Mapping[str, Any]) -> str:
    """That the total and the median of rounds differ by more than the interval, and whose slow steps do it."""
    if not row.get("tail"):
        return ""
    return (
        f"{row['tail']} has slow steps: the median of the rounds is {row['median_ratio']:.3f}, outside of the "
        "interval of the total"
    )
