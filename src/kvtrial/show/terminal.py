"""The verdict at a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvtrial.decision import labels

_STYLE = {"ADOPT": "bold green", "KEEP": "bold cyan", "INCONCLUSIVE": "bold yellow"}


def _ratio(row: dict[str, Any]) -> str:
    if row.get("ratio") is None:
        return str(row.get("problem", "-"))
    low, high = row["ci95"]
    return f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _control(control: dict[str, Any]) -> str:
    rate = control["tokens_per_s"]
    figure = "not measured" if rate is None else f"{rate:.2f} tokens/s, measured once"
    return f"Control {control['candidate']} at {control['context']:,}: {figure}"


def _error_rates(rates: dict[str, Any]) -> Any:
    """What the rule does under this run's noise, as a small table or the reason why there is none."""
    if rates["adopt_probability"] is None:
        return Text(f"Error rates were not simulated: {rates['reason']}")
    table = Table(
        title=f"Chance of adopting {rates['challenger']} (claim: at most "
        f"{rates['claim_familywise']:.1%} at {rates['adopt_at']:.0%})",
        title_justify="left",
    )
    table.add_column("true improvement", justify="right")
    table.add_column("chance", justify="right")
    for improvement, chance, error in zip(
        rates["true_improvement"], rates["adopt_probability"], rates["standard_error"]
    ):
        table.add_row(f"{improvement:.1%}", f"{chance:.2%} ± {error:.2%}")
    return table


def _same_twice(aa: dict[str, Any]) -> Text:
    """The A/A result in a line, the false adoptions that its noise implies in another."""
    said = f"A/A, {aa['candidate']} registered twice: {_ratio(aa)}"
    if aa["ratio"] is None:
        return Text(said)
    said += f" over {aa['n_blocks']} blocks; {_covers(aa)}"
    said += "; the rule " + ("ADOPTS an arm over itself" if aa["adopts"] else "adopts neither")
    implied = aa["false_adoption"]
    if implied["adopt_probability"] is None:
        return Text(f"{said}\nIts noise was not simulated: {implied['reason']}")
    chances = ", ".join(
        f"{chance:.2%} ± {error:.2%} at {improvement:.1%}"
        for improvement, chance, error in zip(
            implied["true_improvement"], implied["adopt_probability"], implied["standard_error"]
        )
    )
    return Text(f"{said}\nChance of adopting under its noise, by true improvement: {chances}")


def _covers(aa: dict[str, Any]) -> str:
    return "covers 1" if aa["covers_1"] else "DOES NOT cover 1, as one run in twenty by chance"


def _attribution(rows: list[dict[str, Any]]) -> Table:
    """The hypotheses, decode with the model and attention alone at each head shape."""
    table = Table(title="Where it comes from: ratio [95% interval]", title_justify="left")
    for name in ("", "from → to", "what", "heads"):
        table.add_column(name)
    contexts = sorted({row["context"] for row in rows})
    for context in contexts:
        table.add_column(f"{context:,}", justify="right")
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        if row["sessions"] > 1 or row["from_threads"] != 1:
            continue
        what = "decode" if row["metric"] == "m2/tokens_per_s" else "attention"
        pair = f"{row['from']} → {row['to']}{labels.of_contrast(row)}"
        key: tuple[str, ...] = (row["id"], pair, what, row["shape"])
        lines.setdefault(key, {})[row["context"]] = "-" if row["ratio"] is None else _ratio(row)
    for line, ratios in sorted(lines.items(), key=lambda one: (one[0][0], one[0][2] != "decode")):
        table.add_row(*line, *(ratios.get(context, "") for context in contexts))
    return table


def render(verdict: dict[str, Any]) -> Group:
    """What verdict.json holds, as rich tables: the outcome first, then what it rests on."""
    hot, cold = verdict["hot"], verdict["cold"]
    model = verdict["model"] + (" (synthetic weights)" if verdict["synthetic"] else "")
    head = Text()
    head.append(f"{hot['outcome']}  ", _STYLE[hot["outcome"]])
    head.append(f"hot store: {hot['adopted'] or 'undecided'}\n", "bold")
    head.append(f"{hot['reason']}\n")
    head.append(f"cold store: {cold['adopted'] or 'undecided'}", "bold")
    head.append(f"  {cold['reason']}")
    parts: list[Any] = [Panel(head, title=f"{model} on {verdict['machine']}", expand=False)]

    arms = Table(title="Decode, by arm", title_justify="left")
    for name, justify in (
        ("context", "right"), ("sessions", "right"), ("threads", "right"), ("arm", "left"),
        ("tokens/s", "right"), ("p50 ms", "right"), ("p95 ms", "right"), ("blocks", "right"),
    ):  # fmt: skip
        arms.add_column(name, justify=justify)  # type: ignore[arg-type]
    for row in hot["arms"]:
        arms.add_row(
            f"{row['context']:,}", str(row["sessions"]), str(row["threads"]), row["candidate"],
            _number(row["tokens_per_s"]), _number(row["step_ms_p50"]), _number(row["step_ms_p95"]),
            str(row["n_blocks"]),
        )  # fmt: skip
    parts.append(arms)
    if verdict["control"] is not None:
        parts.append(Text(_control(verdict["control"])))

    if hot["contrasts"]:
        table = Table(title="Contrasts: ratio of tokens/s [95% t interval over blocks]")
        numbers = ("context", "sessions", "threads")
        for name in ("challenger", "incumbent", *numbers, "role", "ratio"):
            table.add_column(name, justify="right" if name in numbers else "left")
        for row in hot["contrasts"]:
            table.add_row(
                row["challenger"],
                row["incumbent"] + labels.of_contrast(row),
                f"{row['context']:,}",
                str(row["sessions"]),
                str(row["threads"]),
                row["role"],
                _ratio(row),
            )
        parts.append(table)

    parts.append(_error_rates(verdict["characteristics"]))
    parts.append(_same_twice(verdict["characteristics"]["aa"]))
    if verdict["hypotheses"]:
        parts.append(_attribution(verdict["hypotheses"]))
    for row in verdict["skipped"]:
        parts.append(Text(f"Left out of {row['stage']}: cell {row['cell']}: {row['reason']}"))

    out = {name: reasons for name, reasons in verdict["eligibility"].items() if reasons}
    if out:
        table = Table(title="Not eligible to win", title_justify="left")
        table.add_column("arm")
        table.add_column("why")
        for name, reasons in out.items():
            table.add_row(name, "\n".join(reasons[:4] + (["..."] if len(reasons) > 4 else [])))
        parts.append(table)
    return Group(*parts)


def print_verdict(verdict: dict[str, Any], console: Console | None = None) -> None:
    """Print the verdict; plain text where the output is no terminal."""
    (console or Console()).print(render(verdict))
