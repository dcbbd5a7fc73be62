"""The report: one page, nothing fetched, what the verdict says is on it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from trial_events import REGISTERED, block_rows, flat, row, trial, with_rows

from kvtrial import candidates
from kvtrial.decision.verdict import decide
from kvtrial.show import report
from kvtrial.show.plots import ecdf, forest, restore, style


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    events = trial(
        flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=11.0), missing={"K0": "pool"}
    )
    seconds = [row("m2", "attempt/estimated_s", value=1200.0)]
    at = {"context": 4096}
    seconds += [row("m2", "block/taken_s", block=b, value=500.0 + b, **at) for b in range(3)]
    events = with_rows(events, seconds)
    (tmp_path / "verdict.json").write_text(decide(events, REGISTERED).to_json())
    (tmp_path / "protocol.json").write_text(json.dumps(REGISTERED))
    (tmp_path / "manifest.json").write_text(json.dumps({"machine_class": "<here & now>"}))
    report.write(tmp_path, events)
    return tmp_path


class _Outside(HTMLParser):
    """Collects what a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            inside = ("#", "data:")
            if name in ("src", "href", "xlink:href") and value and not value.startswith(inside):
                self.fetched.append(f"{tag} {name}={value}")


def test_the_page_fetches_nothing_and_says_the_verdict(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    outside = _Outside()
    outside.feed(page)
    assert outside.fetched == []
    assert "ADOPT: K3" in page
    assert "&lt;here &amp; now&gt;" in page  # what a machine calls itself is escaped
    assert "m2 1,503 (1,200)" in page  # seconds taken, and estimated


@pytest.mark.parametrize(
    ("changes", "profile", "command"),
    [
        ({}, "default", "make verdict MODEL=m"),
        ({"model": "smollm2-135m-instruct-q4_1"}, "full", "make full"),
        ({"protocol_sha256": "0" * 64}, None, "make verdict MODEL=m PROTOCOL=protocol.json"),
        ({"protocol": "kvtrial-smoke", "protocol_sha256": "0" * 64}, "default", "make smoke"),
    ],
)
def test_the_command_that_makes_the_trial_again(
    changes: dict[str, str], profile: str | None, command: str
) -> None:
    verdict = decide(trial(flat(K0=100.0, K1=22.0, K3=11.0)), REGISTERED).data
    assert report._command({**verdict, **changes}, profile) == command


def test_ids_are_unique_over_the_page_and_references_resolve(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:xlink:href|href)="#([^"]+)"', page))
    used |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(ids)


def test_each_figure_is_drawn_and_the_same_events_give_the_same_bytes(run_dir: Path) -> None:
    names = {p.stem for p in (run_dir / "figures").glob("*.svg")}
    assert {"forest", "waterfall", "ecdf", "scaling"} <= names
    before = (run_dir / "figures" / "forest.svg").read_bytes()
    events = trial(
        flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K2=15.0, K3=11.0), missing={"K0": "pool"}
    )
    report.write(run_dir, events)
    assert (run_dir / "figures" / "forest.svg").read_bytes() == before


def test_a_forest_row_whose_ratio_is_outside_the_panel_is_a_number_there() -> None:
    """Case: a ratio of 1.7 [1.5, 1.9] was a cut line without a dot or a number."""
    arms = flat(K0=100.0, A1=80.0, A2=70.0, K1=17.0, K3=10.0)
    arms["K1"][4096] = [12.0, 24.0] * 6
    verdict = decide(trial(arms), REGISTERED).data
    (row,) = [
        c
        for c in verdict["hot"]["contrasts"]
        if (c["challenger"], c["incumbent"], c["context"]) == ("K3", "K1", 4096)
    ]
    assert row["ratio"] == pytest.approx(288**0.5 / 10) and row["ci95"][0] < 1.4
    drawn = forest.draw(verdict, trial(arms))
    assert drawn is not None
    assert any("1.7" in text.get_text() for text in drawn.axes[0].texts)


def test_what_adopts_stands_in_the_primary_panel_where_the_protocol_says() -> None:
    arms = flat(K0=100.0, A1=80.0, A2=70.0, K1=22.0, K3=20.0)
    verdict = decide(trial(arms), REGISTERED).data
    verdict["characteristics"]["adopt_at"] = 0.25
    drawn = forest.draw(verdict, trial(arms))
    assert drawn is not None
    dashed = [
        [line.get_xdata()[0] for line in axis.get_lines() if line.get_linestyle() == "--"]
        for axis in drawn.axes
    ]
    assert dashed == [[1.25], [], []]


def test_an_arm_of_another_package_looks_like_none_of_ours() -> None:
    ours = [style.look(name)["marker"] for name in candidates.candidates()]
    for name in ("TwoPass", "Wrapped", "X1"):
        assert style.look(name)["marker"] not in ours
        assert style.line(name)["linestyle"] == "--" != style.line("K1")["linestyle"]


def test_only_the_pairs_steps_are_drawn_and_an_arm_of_one_context_has_its_label() -> None:
    arms = {**flat(K0=100.0, K1=22.0), "K3": {4096: [11.0] * 12}}
    beside = block_rows("aa", "m2/step_ms", {"first": [22.0] * 3}, context=4096)
    beside += block_rows("control", "m2/step_ms", {"C0": [50.0]}, context=4096)
    drawn = ecdf.draw({}, with_rows(trial(arms), beside))
    assert drawn is not None
    curves = {line.get_label() for axis in drawn.axes for line in axis.get_lines()}
    assert curves == {"K0", "K1", "K3"}
    assert {text.get_text() for text in drawn.legends[0].get_texts()} == curves


def test_the_registered_prefix_alone_is_in_the_figure_of_restores_one_dot_a_block() -> None:
    rows = [
        row(
            "cold_tier", f"cold/{metric}", candidate=name, context=context, block=block, index=index,
            value=value + index,
        )
        for name, metric in (("Z2", "restore_warm_ms"), ("plain", "plain_read_warm_ms"))
        for context, value in ((512, 1.0), (4096, 50.0))
        for block in (0, 1)
        for index in (0, 1, 2)
    ]  # fmt: skip
    drawn = restore.draw({}, with_rows(trial(flat(K1=22.0)), rows))
    assert drawn is not None
    dots = [line.get_ydata().tolist() for line in drawn.axes[0].get_lines()]
    assert dots == [[], [51.0, 51.0], [51.0, 51.0]]


def test_other_engines_are_shown_where_they_were_measured(run_dir: Path) -> None:
    assert "Beside other engines" not in (run_dir / "report.html").read_text()
    row = {"model": "m", "metric": "m1/attention_ms", "context": 4096, "threads": 1, "ours": 0.5}
    row |= {"peer": 1.5, "ratio": 3.0, "ci95": [2.5, 3.6], "n_blocks": 6, "our_arm": "K1"}
    row |= {"peer_setting": "torch 2.15.0, scaled_dot_product_attention with GQA, FP32"}
    (run_dir / "peers.json").write_text(json.dumps([row]))
    report.write(run_dir, trial(flat(K0=100.0, K1=22.0, K3=11.0)))
    page = (run_dir / "report.html").read_text()
    assert page.count(">Beside other engines</h") == 2  # the figure and the table
    assert "3.00 [2.50, 3.60]" in page and "torch 2.15.0, scaled_dot" in page
    assert (run_dir / "figures" / "peers.svg").is_file()
