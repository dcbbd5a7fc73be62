"""The verdict at a terminal: one table, then the box with the three answers. The rest with ``--full``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.text import Text

from kvtrial.decision import labels
from kvtrial.decision.document import Document
from kvtrial.host import printed
from kvtrial.show import answers

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.table import Table

_STYLES = {True: "bold green", False: "bold yellow"}


def render(verdict: Document, *, full: bool = False, provisional: Sequence[str] = ()) -> Group:
    """What a verdict says, in 80 columns; the box comes last, so that it is what stays in sight.

    Parameters
    ----------
    verdict : dict
        What verdict.json holds.
    full : bool
        Everything else as well, before the table.
    provisional : sequence of str
        What is still missing of a run that goes on; where there is something, everything is marked so.
    """
    parts: list[Any] = list(_everything(verdict)) if full else []
    parts += [*_arms(verdict, bool(provisional)), _box(verdict, provisional)]
    return Group(*parts)


def _table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    table = printed.table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


# --------------------------------------------------------------------------------------------------
# The first screen


def _arms(verdict: Document, provisional: bool) -> list[Any]:
    """The table of arms with the notes that it needs."""
    arms = answers.arms(verdict)
    measured = [arm for arm in arms if arm.rates]
    shown = answers.context_heads(verdict)
    primary = answers.primary_context(verdict)
    fp32 = verdict["run"]["fp32_store"]
    ratio = f"x {fp32}" + (f" at {primary:,}" if primary else "")
    numbers = (*shown, "B/token", "KLD <")
    table = _table(
        f"{'PROVISIONAL: ' if provisional else ''}tokens/s by filled positions, one session, one thread",
        "arm", *shown, ratio, *numbers[len(shown) :], "why not",
        right=numbers,
    )  # fmt: skip
    table.columns[1 + len(shown)].no_wrap = True
    for arm in measured:
        rates = [
            answers.significant((arm.rates.get(context) or {}).get("tokens_per_s"))
            for context in answers.contexts(verdict)
        ]
        table.add_row(
            arm.name,
            *rates,
            answers.interval(arm.ratio),
            "-" if arm.bytes_per_token is None else f"{arm.bytes_per_token:,.0f}",
            "-" if arm.kld is None else f"{arm.kld:.2g}",
            arm.state,
            style="bold" if arm.chosen else None,
        )
    notes = [f"{past}."] if (past := answers.past_trained(verdict)) else []
    if away := [f"{arm.name} ({arm.state})" for arm in arms if not arm.rates and arm.state]:
        notes.append(f"Not in the table: {', '.join(away)}.")
    profiles = [row for row in verdict["run"]["profiles"] if row["against_fp32"]]
    if profiles:
        names = ", ".join(row["candidate"] for row in profiles)
        notes.append(
            f"Intervals: 95%; of {names} {verdict['run']['confidence']:.1%}, as there are several profiles."
        )
    notes += [f"Tail: {answers.tail(row)}." for row in _with_tails(verdict, primary)]
    return [table, *(Text(note, "dim") for note in notes)]


def _with_tails(verdict: Document, context: int | None) -> list[dict[str, Any]]:
    """Deciding contrasts of a context whose total and median differ, one an arm that has the tail."""
    fp32 = verdict["run"]["fp32_store"]
    own = [
        row
        for row in verdict["contrasts"]
        if row["context"] == context
        and row.get("tail")
        and (answers.decides(verdict, row) or (row["incumbent"], row["role"]) == (fp32, "primary"))
    ]
    return list({row["tail"]: row for row in own}.values())


def _box(verdict: Document, provisional: Sequence[str]) -> Panel:
    said = Text()
    for number, (question, answer, reason, decided) in enumerate(answers.of_verdict(verdict)):
        said.append("\n" if number else "")
        said.append(f"{question}: ", "bold")
        said.append(answer, _STYLES[decided and not provisional])
        said.append(f"\n  {reason}.".rstrip())
    if provisional:
        said.append("\nPROVISIONAL: ", "bold yellow")
        said.append(
            f"this is not a verdict, and may still change. Missing: {'; '.join(provisional)}."
        )
    title = answers.where(verdict)
    if provisional:
        title = f"PROVISIONAL: {title}"
    return printed.panel(said, title=title, border_style="yellow" if provisional else "none")


# --------------------------------------------------------------------------------------------------
# With --full


def _everything(verdict: Document) -> Iterable[Any]:
    yield _decode(verdict)
    if verdict["control"] is not None:
        yield Text(_control(verdict["control"]))
    if verdict["contrasts"]:
        yield _contrasts(verdict["contrasts"])
    yield from _known_answers(verdict["known_answers"])
    yield from _error_rates(verdict["error_rates"])
    if verdict["hypotheses"]:
        yield _attribution(verdict["hypotheses"])
    yield from _quality(verdict["run"]["profiles"])
    for row in verdict["skipped"]:
        yield Text(f"Left out of {row['stage']}: cell {row['cell']}: {row['reason']}")
    out = [(arm.name, arm.reasons) for arm in answers.arms(verdict) if arm.reasons]
    if out:
        table = _table("Why not", "arm", "why")
        for name, reasons in out:
            table.add_row(name, "\n".join(reasons))
        yield table


def _decode(verdict: Document) -> Table:
    numbers = ("context", "sessions", "threads", "tokens/s", "p50 ms", "p95 ms", "blocks")
    table = _table("Decode, by arm and cell", "arm", *numbers, right=numbers)
    for row in verdict["arms"]:
        table.add_row(
            row["candidate"],
            f"{row['context']:,}",
            str(row["sessions"]),
            str(row["threads"]),
            answers.significant(row["tokens_per_s"], 4),
            answers.significant(row["step_ms_p50"]),
            answers.significant(row["step_ms_p95"]),
            str(row["n_blocks"]),
        )
    return table


def _control(control: dict[str, Any]) -> str:
    rate = control["tokens_per_s"]
    figure = "not measured" if rate is None else f"{rate:.2f} tokens/s, measured once"
    return f"Control {control['candidate']} at {control['context']:,}: {figure}"


def _cell(row: dict[str, Any]) -> str:
    return f"{row['context']:,} {row['sessions']}s {row['threads']}t"


def _contrasts(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "Contrasts: tokens/s over tokens/s [95% interval over blocks]",
        "pair", "cell", "ratio", "median of rounds", "tail", "blocks",
        right=("cell", "blocks"),
    )  # fmt: skip
    for row in rows:
        ratio = answers.interval(row, 3)
        table.add_row(
            f"{row['challenger']} / {row['incumbent']}{labels.of_contrast(row)}",
            _cell(row),
            ratio if row["ratio"] is not None else row.get("problem", "-"),
            answers.significant(row.get("median_ratio"), 4),
            row.get("tail") or "",
            str(row["n_blocks"]),
        )
    return table


def _known_answers(known: dict[str, Any]) -> Iterable[Any]:
    """Ratios that are known, and what was measured of them."""
    table = _table(
        f"Known answers: {known['candidate']}, registered several times",
        "pair", "truth", "measured [95% interval]", "blocks", "holds the truth",
        right=("truth", "blocks"),
    )  # fmt: skip
    for test in known["tests"]:
        measured = answers.interval(test, 4) if test["ratio"] is not None else test["problem"]
        table.add_row(
            f"{test['top']} / {test['bottom']}",
            f"{test['truth']:.2f}",
            measured,
            str(test["n_blocks"]),
            answers.covers(test),
        )
    yield table
    if known["fault"]:
        yield Text(f"The method is in doubt: {known['fault']}.", "bold yellow")


def _error_rates(rates: dict[str, Any]) -> Iterable[Any]:
    """What the rule does under this run's noise, in both arrangements, or why that is not known."""
    if rates["arrangements"] is None:
        yield Text(f"Error rates were not simulated: {rates['reason']}")
        return
    ways = answers.ARRANGEMENTS
    table = _table(
        f"Chance of adopting {rates['challenger']} (claim: at most {rates['claim']:.1%} at a true "
        f"{rates['adopt_at']:.0%})",
        "true improvement", *ways.values(),
        right=("true improvement", *ways.values()),
    )  # fmt: skip
    for place, improvement in enumerate(rates["true_improvement"]):
        own = [rates["arrangements"][way] for way in ways]
        chances = [
            f"{one['adopt_probability'][place]:.2%} ± {one['standard_error'][place]:.2%}"
            for one in own
        ]
        table.add_row(f"{improvement:.1%}", *chances)
    yield table
    yield Text(f"The claim {'holds' if rates['claim_holds'] else 'DOES NOT hold'} in both.")


def _quality(profiles: list[dict[str, Any]]) -> Iterable[Any]:
    """What reduced precision costs, by context."""
    rows = [(row, one) for row in profiles for one in row["quality"]]
    if not rows:
        return
    numbers = ("context", "mean KLD", "up to", "top-1 from", "chunks")
    table = _table("Quality of reduced precision", "arm", *numbers, "decides", right=numbers)
    for row, one in rows:
        lower = one.get("top1_lower")
        table.add_row(
            row["candidate"],
            f"{one['context']:,}",
            _small(one.get("mean_kld")),
            _small(one.get("kld_upper")),
            "-" if lower is None else f"{lower:.2%}",
            str(one.get("chunks", "-")),
            "yes" if one.get("gated", True) else "no: beyond the trained length",
        )
    yield table


def _small(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _attribution(rows: list[dict[str, Any]]) -> Table:
    """The hypotheses, decode with the model and attention alone at each head shape."""
    contexts = sorted({row["context"] for row in rows})
    shown = [f"{context:,}" for context in contexts]
    table = _table(
        "Where it comes from: ratio [95% interval]",
        "", "from → to", "what", "heads", *shown,
        right=shown,
    )  # fmt: skip
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        if row["sessions"] > 1 or row["from_threads"] != 1:
            continue
        what = "decode" if row["metric"] == "m2/tokens_per_s" else "attention"
        pair = f"{row['from']} → {row['to']}{labels.of_contrast(row)}"
        key: tuple[str, ...] = (row["id"], pair, what, row["shape"])
        lines.setdefault(key, {})[row["context"]] = answers.interval(row)
    for line, ratios in sorted(lines.items(), key=lambda one: (one[0][0], one[0][2] != "decode")):
        table.add_row(*line, *(ratios.get(context, "") for context in contexts))
    return table
