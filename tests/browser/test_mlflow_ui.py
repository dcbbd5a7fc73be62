"""MLflow's own page on a trial: its description, its children, their charts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import mlflow_server
import pytest
from shown_trial import ARMS, FEW, decided, steady, trial

from kvtrial.run import events
from kvtrial.show import report
from kvtrial.tracking import __main__ as command
from kvtrial.tracking.store import MlflowStore

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore")]

SHOWN_S = 120
#: Of the trial's run.
NAME = "K2T, KEEP K1 · m · here"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose store was made from its results."""
    run_dir = tmp_path_factory.mktemp("results") / "tiny-1"
    table = trial(steady(**ARMS))
    for stage, rows in table.groupby("stage"):
        events.write(rows, run_dir / "events" / f"{stage}.parquet")
    (run_dir / "protocol.json").write_text(json.dumps(FEW))
    (run_dir / "manifest.json").write_text('{"model": {"name": "tiny"}, "machine_class": "here"}')
    (run_dir / "verdict.json").write_text(json.dumps(decided()))
    report.write(run_dir, table)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        command.rebuild(run_dir.parent)
    return run_dir


@pytest.fixture(scope="module")
def server(run_dir: Path) -> Iterator[str]:
    """Address of the UI on that store."""
    database = run_dir.parent / "mlflow.db"
    with mlflow_server.running(database, run_dir.parent / "server.log") as address:
        yield address


def shown(browser, *words: str) -> str:
    """The page's text once all words are there; the UI fetches what it shows bit by bit."""
    end = time.monotonic() + SHOWN_S
    while True:
        text = browser.run("return document.body.innerText") or ""
        missing = [word for word in words if word not in text]
        if not missing:
            return text
        assert time.monotonic() < end, f"not shown: {missing}\n{text[:2000]}"
        time.sleep(0.2)


def click(browser, text: str) -> None:
    """Click what says just this, once it is there."""
    find = (
        "return [...document.querySelectorAll('a, button, label, [role=radio], [role=tab], span')]"
        ".filter(e => e.innerText && e.innerText.trim() === arguments[0] && e.offsetParent).pop()"
    )
    end = time.monotonic() + SHOWN_S
    while (found := browser.driver.execute_script(find, text)) is None:
        assert time.monotonic() < end, f"nothing to click says {text!r}"
        time.sleep(0.2)
    found.click()


def test_from_the_first_page_the_verdict_is_three_clicks_away(browser, server):
    """As someone who was told nothing but the address."""
    browser.open(f"{server}/", width=1366, height=768)
    click(browser, "Model training")
    click(browser, "kvtrial")
    click(browser, NAME)
    # The title is the answer; the reason follows.
    text = shown(browser, NAME, "Run K2T (FP16)", "decodes 1.43x as fast as K1", "report.html")
    assert text.index(NAME) < text.index("Run K2T (FP16)")
    title = (
        "return [...document.querySelectorAll('h1, h2, h3, [title], span')]"
        ".filter(e => e.innerText && e.innerText.trim() === arguments[0] && e.offsetParent)"
        ".map(e => e.getBoundingClientRect().bottom)"
    )
    assert min(browser.driver.execute_script(title, NAME)) < 768
    browser.screenshot("mlflow-first-screen", whole=False)
    click(browser, "Artifacts")
    shown(browser, "verdict.json", "protocol.json", "figures")
    browser.screenshot("mlflow-artifacts", whole=False)


def test_the_trial_its_children_and_their_charts_are_shown(browser, server, run_dir, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = MlflowStore(run_dir)
    (parent,) = store.find(level="trial")
    k1 = next(run for run in store.find(level="arm", stage="m2", candidate="K1", context="4096"))
    experiment = f"{server}/#/experiments/{store.experiment_id}"

    browser.open(f"{experiment}/runs/{parent.info.run_id}", width=1400)
    shown(browser, NAME, "Run K2T (FP16)", "Arms: tokens/s by filled positions", "prompts")
    browser.screenshot("mlflow-trial", whole=False)

    browser.open(f"{experiment}/runs/{k1.info.run_id}/model-metrics", width=1400)
    shown(browser, "m2 K1 @4096", "m2/step_ms")
    end = time.monotonic() + SHOWN_S
    drawn = (
        "return document.querySelectorAll('.js-plotly-plot path, .recharts-surface path').length"
    )
    while not browser.run(drawn):
        assert time.monotonic() < end, "no chart was drawn"
        time.sleep(0.2)
    browser.screenshot("mlflow-charts", whole=False)

    browser.open(f"{experiment}/runs", width=1400)
    shown(browser, NAME)
    browser.screenshot("mlflow-runs", whole=False)
