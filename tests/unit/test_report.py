"""The report: one page, nothing fetched, what the verdict says is on it."""

from __future__ import annotations

import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from shown_trial import ARMS, FEW, REGISTERED, decided, steady, trial
from trial_events import row, with_rows

from kvtrial import candidates
from kvtrial.run import events as tables
from kvtrial.show import report
from kvtrial.show.plots import FIGURES, arms, ecdf, error_rates, forest, quality, restore, style


def write(folder: Path, verdict: dict[str, Any], events: pd.DataFrame) -> str:
    (folder / "verdict.json").write_text(json.dumps(verdict))
    (folder / "protocol.json").write_text(json.dumps(FEW))
    (folder / "manifest.json").write_text(json.dumps({"machine_class": "<here & now>"}))
    return report.write(folder, events).read_text()


@pytest.fixture(scope="module")
def verdict() -> dict[str, Any]:
    return decided(missing={"K0": "pool"})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, verdict: dict[str, Any]) -> Path:
    """A run's folder with its page: figures take seconds to draw."""
    folder = tmp_path_factory.mktemp("run")
    seconds = [row("m2", "attempt/estimated_s", value=1200.0)]
    at = {"context": 4096}
    seconds += [row("m2", "block/taken_s", block=b, value=500.0 + b, **at) for b in range(3)]
    write(folder, verdict, with_rows(trial(steady(**ARMS)), seconds))
    return folder


@pytest.fixture
def run_dir(written: Path, tmp_path: Path) -> Path:
    """A copy of it for a test to write to."""
    return shutil.copytree(written, tmp_path / "run")


@pytest.fixture
def words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without figures, for tests of its text."""
    monkeypatch.setattr(report, "draw_figures", lambda verdict, events, folder: {})


def text_of(page: str) -> str:
    """What the page says, without markup and with single spaces."""
    body = re.sub(r"<svg.*?</svg>", "", page[page.index("<body>") :], flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


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
    said = text_of(page)
    run, language, cold = (
        said.index(question) for question in ("What to run", "Which language", "Which cold store")
    )
    # The picture comes right behind the first answer, so that a phone's first screen has both.
    assert run < said.index("How fast each arm decodes") < language < cold < said.index("The arms")
    assert said[run:].startswith(
        "What to run K2T (FP16) 1.43x K1's speed at 4,096 (1.42 to 1.44, 4 blocks) 71.3 tokens/s at 4,096 "
        "positions 23,040 bytes of cache a token K2T (fp16) decodes 1.43x as fast as K1"
    )
    assert said[language:].startswith("Which language KEEP (ruled out): K1 K3 runs at 1.000x")
    assert said[cold:].startswith("Which cold store undecided stage cold_tier has no complete")
    assert "K2T (FP16) Paged, fused SIMD, FP16 rows, K transposed 71.3 71.3 71.3 1.429 [1.4" in said
    assert " to to " not in said  # an empty interval is a dash
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
    verdict = decided(steady(K1=22.0), registration=REGISTERED)
    assert report._command({**verdict, **changes}, profile) == command


def test_ids_are_unique_over_the_page_and_references_resolve(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:xlink:href|href)="#([^"]+)"', page))
    used |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert used
    assert used <= set(ids)


def test_each_figure_is_drawn_and_the_same_events_give_the_same_bytes(
    run_dir: Path, verdict: dict[str, Any]
) -> None:
    names = {p.stem for p in (run_dir / "figures").glob("*.svg")}
    assert names == {"arms", "scaling", "quality", "forest", "waterfall", "ecdf"}
    before = {name: (run_dir / "figures" / f"{name}.svg").read_bytes() for name in names}
    write(run_dir, verdict, trial(steady(**ARMS)))
    for name, text in before.items():
        assert (run_dir / "figures" / f"{name}.svg").read_bytes() == text, name


def test_the_first_picture_is_of_the_arms_without_those_many_times_slower(
    verdict: dict[str, Any],
) -> None:
    assert next(iter(FIGURES)) == "arms"
    drawn = arms.draw(verdict, tables.to_frame([]))
    assert drawn is not None
    # The fastest on top; the chosen one is said.
    rows = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert rows[::-1] == ["K2T, run this", "K5", "K1", "K3", "K1T"]
    assert [axis.get_title() for axis in drawn.axes] == [
        "512 positions (n = 4)",
        "4,096 positions, decides (n = 4)",
        "16,384 positions (n = 4)",
    ]
    for axis in drawn.axes:
        assert axis.get_xlim()[0] > 40  # 5 tokens/s of K0 would squeeze the rest
        assert len(axis.patches) == 1  # the band of the chosen one
    (slow,) = [text.get_text() for text in [drawn._supxlabel] if text is not None]
    assert slow == "not drawn, in tokens/s at 4,096: A2 14.3, A1 12.5, K0 4.99"
    sizes = [text.get_text() for text in drawn.axes[-1].texts]
    assert sizes == ["46,080", "46,080", "46,080", "12,240", "23,040", "bytes a token"]


def test_a_profiles_mark_has_the_speed_of_the_primary_cell(verdict: dict[str, Any]) -> None:
    """Keys of verdict.json are sorted as words, so that 16384 comes first."""
    told = json.loads(json.dumps(verdict, sort_keys=True))
    for profile in told["run"]["profiles"]:
        profile["tokens_per_s"] = {"16384": 16.25, "4096": 42.5, "512": 85.0}
    drawn = quality.draw(told, tables.to_frame([]))
    assert drawn is not None
    said = [text.get_text() for text in drawn.axes[0].texts]
    assert sorted(said) == ["K2T (n=64)\n42.5 tokens/s", "K5 (n=64)\n42.5 tokens/s"]


def test_the_interval_of_an_arm_is_drawn_where_it_is(verdict: dict[str, Any]) -> None:
    drawn = arms.draw(verdict, tables.to_frame([]))
    assert drawn is not None
    (own,) = [a for a in verdict["arms"] if (a["candidate"], a["context"]) == ("K1", 4096)]
    bars = [
        line.get_xdata() for line in drawn.axes[1].get_lines() if list(line.get_ydata()) == [2, 2]
    ]
    assert [list(bar) for bar in bars] == [own["tokens_per_s_ci95"]]


def test_the_forest_has_the_pairs_that_decide_and_none_that_is_far_off(
    verdict: dict[str, Any],
) -> None:
    told = {**verdict, "decision": FEW["decision"]}
    drawn = forest.draw(told, tables.to_frame([]))
    assert drawn is not None
    rows = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    # Profiles over the FP32 arm first; K3 over K0, A1 and A2 is 3.5 to 10.
    assert rows[::-1] == [
        "K5 / K1",
        "K2T / K1 (layouts differ)",
        "K3 / K1",
        "K3 / K1T (layouts differ)",
    ]
    dashed = [
        [line.get_xdata()[0] for line in axis.get_lines() if line.get_linestyle() == "--"]
        for axis in drawn.axes
    ]
    assert dashed == [[1.1, 1.05], [], []]  # of the language, of what to run; in the primary cell


def test_the_pairs_of_the_forest_have_the_intervals_of_their_rules(
    verdict: dict[str, Any],
) -> None:
    found = {(row["top"], row["bottom"]): row["by_context"][4096] for row in forest.pairs(verdict)}
    profile = next(r for r in verdict["run"]["profiles"] if r["candidate"] == "K2T")
    against = next(r for r in verdict["language"]["against"] if r["incumbent"] == "K1")
    assert found["K2T", "K1"] == profile["against_fp32"]["4096"]
    assert found["K3", "K1"]["ci95"] == against["ci95"]


@pytest.mark.usefixtures("words_alone")
def test_both_arrangements_of_the_error_rates_are_drawn_and_in_the_table(
    tmp_path: Path, verdict: dict[str, Any]
) -> None:
    own = {"adopt_probability": [0.0, 0.012, 0.97], "standard_error": [0.0, 0.001, 0.002]}
    equal = {**own, "adopt_probability": [0.0, 0.003, 0.81]}
    rates = {
        "challenger": "K3",
        "true_improvement": [0.0, 0.1, 0.13],
        "arrangements": {"as_measured": own, "all_equal": equal},
        "simulations": 10_000, "adopt_at": 0.1, "claim": 0.025, "claim_holds": True,
    }  # fmt: skip
    simulated = {**verdict, "error_rates": rates}
    drawn = error_rates.draw(simulated, tables.to_frame([]))
    assert drawn is not None
    curves = {
        text.get_text(): bar.lines[0].get_ydata().tolist()
        for bar, text in zip(drawn.axes[0].containers, drawn.axes[0].get_legend().get_texts())
    }
    assert curves == {
        "incumbents as measured": own["adopt_probability"],
        "all incumbents equal": equal["adopt_probability"],
    }
    said = text_of(write(tmp_path, simulated, trial(steady(**ARMS))))
    assert "13.0% 97.00% ± 0.20% 81.00% ± 0.20%" in said
    assert error_rates.draw(verdict, tables.to_frame([])) is None  # four blocks


@pytest.mark.usefixtures("words_alone")
def test_a_known_answer_that_was_missed_is_said(tmp_path: Path) -> None:
    missed = decided(planted=1.3)
    assert missed["run"]["store"] is None
    said = text_of(write(tmp_path, missed, trial(steady(**ARMS))))
    assert "What to run undecided a known answer was missed: K1 first over planted is 1.12" in said
    (planted,) = re.findall(r"first / planted 1\.12 (\S+) .*? NO, and at 99\.9% neither", said)
    assert float(planted) == pytest.approx(1.3, rel=0.01)


@pytest.mark.usefixtures("words_alone")
def test_a_tail_is_named_with_the_median_of_the_rounds(
    tmp_path: Path, verdict: dict[str, Any]
) -> None:
    contrasts = [dict(c) for c in verdict["contrasts"]]
    for c in contrasts:
        c |= {"tail": None}
    (slow,) = [
        c
        for c in contrasts
        if (c["challenger"], c["incumbent"], c["context"]) == ("K3", "K1", 4096)
    ]
    slow |= {"tail": "K3", "median_ratio": 1.0421}
    said = text_of(write(tmp_path, {**verdict, "contrasts": contrasts}, trial(steady(**ARMS))))
    assert re.search(r"K3 / K1 4,096 1 1 primary \S+ \S+ to \S+ 1\.042 K3 ", said)
    assert not re.search(r"K3 / A1 4,096 1 1 primary \S+ \S+ to \S+ \S+ K3 ", said)


def test_an_arm_of_another_package_looks_like_none_of_ours() -> None:
    ours = [style.look(name)["marker"] for name in candidates.candidates()]
    for name in ("TwoPass", "Wrapped", "X1"):
        assert style.look(name)["marker"] not in ours
        assert style.line(name)["linestyle"] == "--" != style.line("K1")["linestyle"]


def test_only_the_pairs_steps_are_drawn_and_an_arm_of_one_context_has_its_label() -> None:
    steps = {**steady(K0=100.0, K1=22.0), "K3": {4096: [11.0] * 4}}
    beside = [row("control", "m2/step_ms", candidate="C0", context=4096, block=0, value=50.0)]
    drawn = ecdf.draw({}, with_rows(trial(steps), beside))
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
    drawn = restore.draw({}, with_rows(trial(steady(K1=22.0)), rows))
    assert drawn is not None
    dots = [line.get_ydata().tolist() for line in drawn.axes[0].get_lines()]
    assert dots == [[], [51.0, 51.0], [51.0, 51.0]]


def test_the_pairs_that_decide_stand_apart_from_the_others(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    deciding = text_of(
        "<body>" + page[page.index("caption-deciding") : page.index("All other pairs")]
    )
    assert re.findall(r"K3 / (\S+?) (?:\(layouts differ\) )?4,096", deciding) == [
        "K0", "A1", "A2", "K1", "K1T"
    ]  # fmt: skip
    assert "K4 /" not in deciding  # not tested


def test_each_table_has_a_caption_and_names_its_columns_and_rows(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    tables = re.findall(r"<table>.*?</table>", page, flags=re.DOTALL)
    assert len(tables) > 8
    for own in tables:
        assert own.count("<caption") == 1
        body = own[own.index("<tbody>") :]
        assert body.count('scope="row"') == body.count("<tr")
        assert re.findall(r"<th(?! scope)", own.replace("<thead", "")) == []


@pytest.mark.usefixtures("words_alone")
def test_a_crash_is_counted_in_words_and_not_as_a_median_of_flags(
    tmp_path: Path, verdict: dict[str, Any]
) -> None:
    """Two of three rounds of Z1 kept what they had promised; all of Z2's did."""
    outcomes = {"Z1": [1.0, 0.0, 1.0], "Z2": [1.0, 1.0]}
    rows = [
        row("cold_tier", "cold/crash_recovered", candidate=name, index=i, value=value, text="kill")
        for name, values in outcomes.items()
        for i, value in enumerate(values)
    ]
    figures = {"Z1": {"crash_recovered": 1.0, "restore_warm_ms": 3.14159}}
    told = {**verdict, "cold": {**verdict["cold"], "figures": figures}}
    said = text_of(write(tmp_path, told, with_rows(trial(steady(**ARMS)), rows)))
    assert (
        "Z1: all acknowledged pages were there after 2 of 3 crash rounds; "
        "Z2: all acknowledged pages were there after 2 of 2 crash rounds." in said
    )
    assert "restore warm, ms 3.14" in said and "crash_" not in said


def _luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, by WCAG 2.2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def test_marks_have_the_contrast_that_graphics_need_and_none_is_told_by_hue_alone() -> None:
    for colour in style.PALETTE:
        assert 1.05 / (_luminance(colour) + 0.05) >= 3.0, colour
    looks = [style.look(name) for name in candidates.candidates() if name != "C0"]
    markers = [look["marker"] for look in looks]
    assert len(set(markers)) == len(markers)


def test_a_phone_has_one_panel_below_the_other_and_the_deciding_one_first(
    verdict: dict[str, Any],
) -> None:
    with style.stacked():
        drawn = arms.draw(verdict, tables.to_frame([]))
    assert drawn is not None
    titles = [axis.get_title().partition(",")[0] for axis in drawn.axes]
    assert titles[0] == "4" and len(titles) == 3
    assert "decides" in drawn.axes[0].get_title()
    boxes = [axis.get_subplotspec().rowspan.start for axis in drawn.axes]
    assert boxes == [0, 1, 2]
    for axis in drawn.axes:  # each has the names
        assert axis.get_yticklabels()[-1].get_text() == "K2T, run this"


def test_other_engines_are_shown_where_they_were_measured(run_dir: Path) -> None:
    assert "Compared with other engines" not in (run_dir / "report.html").read_text()
    row = {
        "model": "m",
        "metric": "m1/attention_ms/fp32",
        "context": 4096,
        "threads": 1,
        "ours": 0.5,
    }
    row |= {"peer": 1.5, "ratio": 3.0, "ci95": [2.5, 3.6], "n_blocks": 6, "our_arm": "K1"}
    row |= {"peer_setting": "torch 2.15.0, scaled_dot_product_attention with GQA, FP32"}
    row |= {"best": True, "bytes_a_token": 46080.0}
    slower = {**row, "peer_setting": "torch 2.15.0, slower", "best": False}
    (run_dir / "peers.json").write_text(json.dumps([row, slower]))
    report.write(run_dir, trial(steady(**ARMS)))
    page = (run_dir / "report.html").read_text()
    assert page.count(">Compared with other engines</h") == 2  # the figure and the table
    assert "3.00 [2.50, 3.60]" in page and "<b>torch 2.15.0, scaled_dot" in page
    assert ">torch 2.15.0, slower</td>" in page and "46,080" in page
    assert (run_dir / "figures" / "peers.svg").is_file()
