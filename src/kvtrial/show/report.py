"""One self-contained HTML page from a run's verdict and events; nothing is fetched to read it."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from kvtrial import candidates
from kvtrial.decision import labels
from kvtrial.decision.document import Document, Shown
from kvtrial.host import paths
from kvtrial.host.files import write_text
from kvtrial.run import protocol
from kvtrial.run.layout import DEFAULT_MODEL
from kvtrial.show import answers, plots
from kvtrial.show.plots import style


def deciding(verdict: Document, events: pd.DataFrame) -> pd.DataFrame:
    """Rows of the attempts that decided; all rows of a stage that the verdict does not know."""
    numbers = {stage: attempt["decided_by"] for stage, attempt in verdict["attempts"].items()}
    decided = events["stage"].map(numbers)
    return events[decided.isna() | (events["attempt"] == decided)]


class Drawn(NamedTuple):
    """A figure's SVG texts: its panels side by side, and one below the other for a phone."""

    wide: str
    narrow: str


def draw_figures(verdict: Shown, events: pd.DataFrame, folder: Path) -> dict[str, Drawn]:
    """Draw every figure, the wide one also as SVG and PNG below ``folder``; returns file stem → texts."""
    events = deciding(verdict, events)
    drawn: dict[str, Drawn] = {}
    for stem, module in plots.FIGURES.items():
        figure = module.draw(verdict, events)
        if figure is not None:
            wide = save_figure(figure, stem, folder)
            with style.stacked():
                drawn[stem] = Drawn(wide, _svg(module.draw(verdict, events), stem))
    return drawn


def save_figure(figure: Figure, stem: str, folder: Path) -> str:
    """Write a figure as ``stem.svg`` and ``stem.png`` below ``folder``; returns the SVG text."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _svg(figure, stem)
    figure.set_layout_engine("none")  # it is laid out: once takes long enough
    figure.savefig(folder / f"{stem}.png", dpi=144)
    (folder / f"{stem}.svg").write_text(text, encoding="utf-8")
    return text


def _svg(figure: Figure, stem: str) -> str:
    """A figure's SVG; nothing else holds on to the figure afterwards."""
    text = io.StringIO()
    # No date and a fixed salt: the same events give the same bytes.
    with plt.rc_context({"svg.hashsalt": stem, "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    return text.getvalue()


def _inline(svg: str, stem: str) -> str:
    """The svg element alone, its ids made unique so that figures on one page don't share them."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r'\bid="([^"]+)"', rf'id="{stem}-\1"', body)
    body = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{stem}-\2"', body)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{stem}-\1)", body)


def _number(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:,.{places}f}"


def _span(bounds: list[float | None] | None) -> str:
    """Bounds behind their estimate; nothing where there are too few blocks for them."""
    return "" if bounds is None else f" [{', '.join(map(answers.significant, bounds))}]"


def _conformance(events: pd.DataFrame) -> dict[str, Any]:
    """Test@P → candidate → passed, failed or gap; and how many of each every candidate has."""
    rows = events[events["metric"] == "conformance/outcome"]
    table: dict[str, dict[str, str]] = {}
    for test, name, value in zip(rows["text"], rows["candidate"], rows["value"]):
        word = "gap" if value != value else "passed" if value == 1 else "FAILED"
        table.setdefault(str(test), {})[str(name)] = word
    names = sorted(set(rows["candidate"]))
    counts = {name: Counter(row[name] for row in table.values() if name in row) for name in names}
    return {"names": names, "rows": dict(sorted(table.items())), "counts": counts}


def _crashes(events: pd.DataFrame) -> dict[str, dict[str, int]]:
    """Cold store → crash rounds, and those after which every acknowledged page was there."""
    rows = events[events["metric"] == "cold/crash_recovered"]
    return {
        str(name): {"rounds": len(own), "kept": int((own["value"] == 1).sum())}
        for name, own in rows.groupby("candidate")
    }


#: The end of a cold figure's name → its unit in words; the rest are counts.
_UNITS = {"_mb_per_s": "MB/s", "_ms": "ms", "_mb": "MB"}


def _cold_figure(metric: str) -> str:
    """``restore_warm_ms`` as people read it: ``restore warm, ms``."""
    for end, unit in _UNITS.items():
        if metric.endswith(end):
            return f"{metric.removesuffix(end).replace('_', ' ')}, {unit}"
    return metric.replace("_", " ")


def _titles() -> dict[str, str]:
    """Candidate → what it is, of those that are installed here."""
    return {name: candidate.title for name, candidate in candidates.candidates().items()}


def _key_figures(verdict: Document, arms: list[answers.Arm]) -> list[tuple[str, str]]:
    """The chosen arm in numbers: each with its words. Nothing where no arm is chosen."""
    primary = answers.primary_context(verdict)
    fp32 = verdict["run"]["fp32_store"]
    chosen = next((arm for arm in arms if arm.name == verdict["run"]["store"]), None)
    if chosen is None or primary is None:
        return []
    found = []
    if chosen.ratio:
        sure = ""
        if chosen.ratio["ci95"]:
            low, high = chosen.ratio["ci95"]
            blocks = chosen.rates[primary]["n_blocks"]
            sure = f" ({low:.2f} to {high:.2f}, {blocks} blocks)"
        found.append((f"{chosen.ratio['ratio']:.2f}x", f"{fp32}'s speed at {primary:,}{sure}"))
    rate = (chosen.rates.get(primary) or {}).get("tokens_per_s")
    if rate:
        found.append((answers.significant(rate), f"tokens/s at {primary:,} positions"))
    if chosen.bytes_per_token:
        found.append((f"{chosen.bytes_per_token:,.0f}", "bytes of cache a token"))
    return found


def _times(events: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Stage → seconds that its blocks were estimated to take when it began, and those that they took."""
    times: dict[str, dict[str, float]] = {}
    for stage, rows in events.groupby("stage"):
        seconds = rows.groupby("metric")["value"].sum()
        if {"attempt/estimated_s", "block/taken_s"} <= set(seconds.index):
            times[str(stage)] = {
                "estimated": float(seconds["attempt/estimated_s"]),
                "taken": float(seconds["block/taken_s"]),
            }
    return times


def _peers(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of ``peers.json``; none where the optional target was not run."""
    path = run_dir / "peers.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8")) if path.is_file() else []
    return rows


def _command(verdict: Document, profile: str | None) -> str:
    """What makes the whole trial again, as the page says it."""
    if verdict["protocol"] == protocol.SMOKE:
        return "make smoke"
    words = ["make", "full" if profile == "full" else "verdict"]
    if verdict["model"] != DEFAULT_MODEL:
        words.append(f"MODEL={verdict['model']}")
    default = protocol.load(paths.config_file("protocol.yaml"))
    if verdict["protocol_sha256"] != protocol.sha256(default):
        words.append("PROTOCOL=protocol.json")
    return " ".join(words)


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{name}.")
        else:
            flat[name] = _plain(inner)
    return flat


def _plain(value: Any) -> str:
    """A fact as people read it: lists by commas, yes and no, a dash for nothing."""
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else str(value)


def write(run_dir: Path, events: pd.DataFrame) -> Path:
    """Write ``report.html`` and ``figures/`` into a run's folder; returns the page's path."""
    verdict: Document = json.loads((run_dir / "verdict.json").read_text(encoding="utf-8"))
    as_run = json.loads((run_dir / "protocol.json").read_text(encoding="utf-8"))
    manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
    peers = _peers(run_dir)
    # Figures are told what the verdict does not hold: the rules' limits, and other engines.
    told: Shown = {**verdict, "peers": peers, "decision": as_run["decision"]}
    drawn = draw_figures(told, events, run_dir / "figures")
    arms = answers.arms(verdict)
    decided_by = deciding(verdict, events)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvtrial.show", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    page = environment.get_template("report.html").render(
        v=verdict,
        p=as_run,
        store=answers.store(verdict),
        answers=answers.of_verdict(verdict),
        measured=answers.measured(verdict),
        arms=arms,
        away=[arm for arm in arms if not arm.rates and arm.state],
        contexts=answers.contexts(verdict),
        positions=lambda context: labels.of_context(context, verdict.get("context_length")),
        past_trained=answers.past_trained(verdict),
        primary=answers.primary_context(verdict),
        figures=[
            {
                "stem": stem,
                "section": getattr(plots.FIGURES[stem], "SECTION", plots.RESULTS),
                "title": plots.FIGURES[stem].TITLE,
                "caption": plots.FIGURES[stem].CAPTION,
                "wide": _inline(svgs.wide, stem),
                "narrow": _inline(svgs.narrow, f"{stem}-narrow"),
            }
            for stem, svgs in drawn.items()
        ],
        peers=peers,
        conformance=_conformance(events),
        times=_times(decided_by),
        crashes=_crashes(decided_by),
        # What a crash left behind is counted above: a median of flags says nothing.
        cold_metrics=sorted(
            {
                metric
                for row in verdict["cold"]["figures"].values()
                for metric in row
                if not metric.startswith("crash_")
            }
        ),
        cold_figure=_cold_figure,
        contrasts=sorted(verdict["contrasts"], key=lambda row: not answers.decides(verdict, row)),
        decides=lambda row: answers.decides(verdict, row),
        key_figures=_key_figures(verdict, arms),
        titles=_titles(),
        machine=_flat(manifest),
        command=_command(verdict, manifest.get("profile")),
        label=labels.of_contrast,
        yes=lambda true: "yes" if true else "no",
        num=_number,
        span=_span,
        sig=answers.significant,
        ratio=answers.interval,
        covers=answers.covers,
        small=lambda value: "-" if value is None else f"{value:.2g}",
        share=lambda value: "" if value is None else f"{value:.2%}",
        pct=lambda share: f"{share:.0%}",
    )
    path = run_dir / "report.html"
    write_text(path, page)
    return path
