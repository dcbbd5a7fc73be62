"""One self-contained HTML page from a run's verdict and events; nothing is fetched to read it."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from kvtrial.decision import labels
from kvtrial.host import paths
from kvtrial.host.files import write_text
from kvtrial.run import protocol
from kvtrial.run.layout import DEFAULT_MODEL
from kvtrial.show import answers, plots


def deciding(verdict: dict[str, Any], events: pd.DataFrame) -> pd.DataFrame:
    """Rows of the attempts that decided; all rows of a stage that the verdict does not know."""
    numbers = {stage: attempt["decided_by"] for stage, attempt in verdict["attempts"].items()}
    decided = events["stage"].map(numbers)
    return events[decided.isna() | (events["attempt"] == decided)]


def draw_figures(verdict: dict[str, Any], events: pd.DataFrame, folder: Path) -> dict[str, str]:
    """Draw every figure as SVG and PNG below ``folder``; returns file stem → SVG text."""
    events = deciding(verdict, events)
    drawn: dict[str, str] = {}
    for stem, module in plots.FIGURES.items():
        figure = module.draw(verdict, events)
        if figure is not None:
            drawn[stem] = save_figure(figure, stem, folder)
    return drawn


def save_figure(figure: Figure, stem: str, folder: Path) -> str:
    """Write a figure as ``stem.svg`` and ``stem.png`` below ``folder``; returns the SVG text."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    # No date and a fixed salt: the same events give the same bytes.
    with plt.rc_context({"svg.hashsalt": stem, "svg.fonttype": "path"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")  # it is laid out: once takes long enough
    figure.savefig(folder / f"{stem}.png", dpi=144)
    plt.close(figure)
    (folder / f"{stem}.svg").write_text(text.getvalue(), encoding="utf-8")
    return text.getvalue()


def _inline(svg: str, stem: str) -> str:
    """The svg element alone, its ids made unique so that figures on one page don't share them."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r'\bid="([^"]+)"', rf'id="{stem}-\1"', body)
    body = re.sub(r'(xlink:href|href)="#([^"]+)"', rf'\1="#{stem}-\2"', body)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{stem}-\1)", body)


def _number(value: float | None, places: int = 2) -> str:
    return "" if value is None else f"{value:,.{places}f}"


def _span(bounds: list[float | None] | None) -> str:
    """Bounds behind their estimate, or nothing where there are too few blocks for them."""
    return "" if bounds is None else f" [{', '.join(map(answers.significant, bounds))}]"


def _conformance(events: pd.DataFrame) -> dict[str, Any]:
    """Test@P → candidate → passed, failed or gap."""
    rows = events[events["metric"] == "conformance/outcome"]
    table: dict[str, dict[str, str]] = {}
    for test, name, value in zip(rows["text"], rows["candidate"], rows["value"]):
        word = "gap" if value != value else "passed" if value == 1 else "FAILED"
        table.setdefault(str(test), {})[str(name)] = word
    return {"names": sorted(set(rows["candidate"])), "rows": dict(sorted(table.items()))}


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


def _command(verdict: dict[str, Any], profile: str | None) -> str:
    """What makes the whole trial again, as the page says it."""
    if verdict["protocol"] == "kvtrial-smoke":
        return "make smoke"
    words = ["make", "full" if profile == "full" else "verdict"]
    if verdict["model"] != DEFAULT_MODEL:
        words.append(f"MODEL={verdict['model']}")
    default = protocol.load(paths.config_file("protocol.yaml"))
    if verdict["protocol_sha256"] != protocol.sha256(default):
        words.append("PROTOCOL=protocol.json")
    return " ".join(words)


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, dict):
            flat |= _flat(inner, f"{name}.")
        else:
            flat[name] = inner
    return flat


def write(run_dir: Path, events: pd.DataFrame) -> Path:
    """Write ``report.html`` and ``figures/`` into a run's folder; returns the page's path."""
    verdict = json.loads((run_dir / "verdict.json").read_text(encoding="utf-8"))
    as_run = json.loads((run_dir / "protocol.json").read_text(encoding="utf-8"))
    manifest = json.loads((run_dir / "manifest.json").read_text(encoding="utf-8"))
    peers = _peers(run_dir)
    # Figures are told what the verdict does not hold: the rules' limits, and other engines.
    told = {**verdict, "peers": peers, "decision": as_run["decision"]}
    drawn = draw_figures(told, events, run_dir / "figures")
    arms = answers.arms(verdict)
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
        primary=answers.primary_context(verdict),
        figures=[
            {
                "stem": stem,
                "section": getattr(plots.FIGURES[stem], "SECTION", plots.RESULTS),
                "title": plots.FIGURES[stem].TITLE,
                "caption": plots.FIGURES[stem].CAPTION,
                "svg": _inline(svg, stem),
            }
            for stem, svg in drawn.items()
        ],
        peers=peers,
        conformance=_conformance(events),
        times=_times(deciding(verdict, events)),
        cold_metrics=sorted({m for row in verdict["cold"]["figures"].values() for m in row}),
        machine=_flat(manifest),
        command=_command(verdict, manifest.get("profile")),
        label=labels.of_contrast,
        yes=lambda true: "yes" if true else "no",
        num=_number,
        span=_span,
        sig=answers.significant,
        ratio=answers.interval,
        covers=answers.covers,
        small=lambda value: "" if value is None else f"{value:.3g}",
        share=lambda value: "" if value is None else f"{value:.2%}",
        pct=lambda share: f"{share:.0%}",
    )
    path = run_dir / "report.html"
    write_text(path, page)
    return path
