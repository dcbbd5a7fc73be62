"""The report as a browser shows it: drawn, quiet, alone, and readable on a phone and on paper."""

from __future__ import annotations

import base64
import json

import pytest
from shown_trial import ARMS, REGISTERED, decided, steady, trial

from kvtrial.show import plots, report

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore")]

PHONE = 360


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """Address of a report whose run has something to show in every table."""
    run_dir = tmp_path_factory.mktemp("run")
    steps = steady(24, 0.01, 7, **ARMS)  # enough for a verdict, and for a simulation
    table = trial(steps, registration=REGISTERED, missing={"K0": "pool"})
    verdict = decided(steps, registration=REGISTERED, missing={"K0": "pool"})
    (run_dir / "verdict.json").write_text(json.dumps(verdict))
    (run_dir / "protocol.json").write_text(json.dumps(REGISTERED))
    (run_dir / "manifest.json").write_text(
        json.dumps({"machine_class": "here", "flags": ["avx2"] * 90})
    )
    return report.write(run_dir, table).as_uri()


def test_figures_are_drawn_and_nothing_else_is_asked_for(browser, page):
    browser.requests(), browser.complaints()
    browser.open(page)
    sizes = browser.run(
        "return [...document.querySelectorAll('.plot .wide svg')].map(svg => {"
        " const box = svg.getBoundingClientRect();"
        " return [box.width, box.height, svg.querySelectorAll('path').length]; })"
    )
    drawn = browser.run("return [...document.querySelectorAll('h3[id^=figure]')].map(h => h.id)")
    assert set(drawn) <= {f"figure-{stem}" for stem in plots.FIGURES}
    # The picture of the answer is first, and the forest comes later.
    assert drawn[0] == "figure-arms"
    assert {"figure-forest", "figure-waterfall", "figure-ecdf", "figure-scaling"} <= set(drawn)
    assert "figure-error_rates" in drawn
    assert len(sizes) == len(drawn)
    assert all(width > 500 and height > 100 and paths > 20 for width, height, paths in sizes)
    assert browser.complaints() == []
    assert browser.requests() == [page]


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
def test_the_answer_and_its_picture_are_on_the_first_screen(browser, page, width, height):
    browser.open(page, width=width, height=height)
    browser.screenshot(f"report-{width}", whole=False)
    box = browser.run(
        "return [...document.querySelectorAll('#figure-arms ~ figure svg')]"
        ".map(e => e.getBoundingClientRect()).filter(b => b.height)"
        ".map(b => [b.top, b.right])"
    )
    assert len(box) == 1  # the one for this width
    assert box[0][0] < 0.75 * height and box[0][1] <= width
    said = browser.run("return document.querySelector('.answer').innerText")
    assert "K2T (FP16)" in said and "bytes of cache a token" in said and "blocks)" in said


def test_it_is_ten_screens_long(browser, page):
    browser.open(page, width=1400, height=900)
    assert browser.run("return document.documentElement.scrollHeight") <= 10 * 900


def test_the_answers_and_the_first_table_are_on_the_first_screen(browser, page):
    browser.open(page, width=1400, height=900)
    browser.screenshot("report-first-screen", whole=False)
    tops = browser.run(
        "return ['.answer', '#arms', '#figure-forest']"
        ".map(s => document.querySelector(s).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    assert tops[1] < 900  # the table of arms begins on it
    answers = browser.run(
        "return [...document.querySelectorAll('.verdict dt')].map(e => e.innerText)"
    )
    assert answers == ["What to run", "Which language", "Which cold store"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_down_only_and_can_be_read(browser, page, scheme):
    browser.open(page, width=PHONE, height=740, scheme=scheme)
    browser.screenshot(f"report-phone-{scheme}")
    assert browser.run("return document.documentElement.scrollWidth") == PHONE
    smallest = browser.run(
        "return Math.min(...[...document.querySelectorAll('p, td, th, figcaption, li, pre')]"
        ".filter(e => e.innerText).map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 14
    # The figures are drawn for the width, one panel below the other: nothing scrolls sideways.
    widths = browser.run(
        "return [...document.querySelectorAll('.plot svg')].map(e => e.getBoundingClientRect().width)"
        ".filter(w => w)"
    )
    assert widths and all(300 < width <= PHONE for width in widths)


#: WCAG 2.2's contrast of an element's ink against the first paper below it.
CONTRAST = """
const luminance = text => {
  const [r, g, b] = text.match(/[0-9.]+/g).slice(0, 3).map(Number)
    .map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = e => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
  }
  return 'rgb(255, 255, 255)';
};
return [...document.querySelectorAll('h1, h2, h3, p, td, th, a, strong, code, figcaption')]
  .map(e => [luminance(getComputedStyle(e).color), luminance(paper(e))])
  .map(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
"""


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_both_colour_schemes_can_be_read(browser, page, scheme, dark):
    browser.open(page, scheme=scheme)
    browser.screenshot(f"report-{scheme}")
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(int(n) for n in background[4:-1].split(",")) < 3 * 128) is dark
    assert min(browser.run(CONTRAST)) >= 4.5


def test_it_prints(browser, page):
    browser.open(page, scheme="dark")
    browser.command("Emulation.setEmulatedMedia", media="print")
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    browser.command("Emulation.setEmulatedMedia", media="")
    assert background == "rgb(255, 255, 255)"
    printed = browser.command("Page.printToPDF", preferCSSPageSize=True)
    assert base64.b64decode(printed["data"]).startswith(b"%PDF-")
