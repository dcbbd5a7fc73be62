"""Tracking against a real MLflow store in SQLite."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from shown_trial import ARMS, FEW, STEPS, decided, steady, trial
from trial_events import row, with_rows

from kvtrial import tracking
from kvtrial.run import events
from kvtrial.run.journal import Journal
from kvtrial.show import report
from kvtrial.stages import common
from kvtrial.tracking import __main__ as command
from kvtrial.tracking import store as stores

# MLflow's own imports warn about what other packages deprecate; that is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

TABLE = trial(steady(**ARMS), missing={"K0": "pool"})
#: Arms that MLflow is told of, in three contexts: a run takes it a tenth of a second.
TOLD = ("K0", "K1", "K2T")
EVENTS = TABLE[~TABLE["candidate"].isin(ARMS.keys() - set(TOLD))]
RUNS_OF_A_STAGE = len(TOLD) * 3


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's tables, made once: that takes it seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def run_dir(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PATH", "DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(
            name, os.environ.get(name, "")
        )  # stages set them; others want theirs back
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "tiny-11111111-22222222-333333333333"
    for stage, rows in EVENTS.groupby("stage"):
        events.write(rows, folder / "events" / f"{stage}.parquet")
    shutil.copy(empty_database, folder.parent)
    (folder / "protocol.json").write_text(json.dumps(FEW))
    (folder / "manifest.json").write_text('{"model": {"name": "tiny"}, "machine_class": "here"}')
    (folder / "verdict.json").write_text(json.dumps(decided(missing={"K0": "pool"})))
    return folder


def _runs(run_dir: Path, **tags: str) -> list:  # type: ignore[type-arg]
    return stores.MlflowStore(run_dir).find(**tags)


def _python(code: str, *arguments: object, **more) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)


def test_a_stage_is_a_child_of_the_trial_and_an_arm_a_child_of_the_stage(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    (parent,) = _runs(run_dir, level="trial")
    (stage,) = _runs(run_dir, level="stage", stage="m2")
    arms = _runs(run_dir, level="arm", stage="m2")
    assert stage.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert json.loads(parent.data.tags["kvtrial.run_of"]) == {"m2": stage.info.run_id}
    assert stage.info.status == "FINISHED"
    assert {a.data.tags["mlflow.parentRunId"] for a in arms} == {stage.info.run_id}
    assert len(arms) == RUNS_OF_A_STAGE
    k1 = next(
        a
        for a in arms
        if (a.data.tags["kvtrial.candidate"], a.data.tags["kvtrial.context"]) == ("K1", "4096")
    )
    assert k1.data.params == {
        "stage": "m2",
        "candidate": "K1",
        "context": "4096",
        "sessions": "1",
        "threads": "1",
        "model": "tiny",
    }
    assert k1.data.metrics["m2/step_ms"] == pytest.approx(20.0, rel=0.01)
    assert k1.data.metrics["m2/tokens_per_s"] == pytest.approx(1000 / 20.0, rel=0.01)
    assert parent.data.params["decision.adopt_lower_bound"] == "0.1"
    client = stores.MlflowStore(run_dir).client
    history = client.get_metric_history(k1.info.run_id, "m2/step_ms")
    assert [point.step for point in history] == list(range(4 * STEPS))
    datasets = {
        i.dataset.name: i.dataset for i in client.get_run(parent.info.run_id).inputs.dataset_inputs
    }
    assert set(datasets) == {"prompts", "workload-text"}
    assert json.loads(datasets["prompts"].profile) == {"num_rows": 24}
    # The first 12 hex digits of the registered text's sha256.
    assert datasets["workload-text"].digest == "4e7f2ffe899b"


def test_a_trial_began_when_it_was_measured_and_the_ui_says_where_it_is(run_dir: Path) -> None:
    """A store that is made anew has the time from the run; MLflow's first page is about other things."""
    facts = {"model": {"name": "tiny"}, "machine_class": "here", "source_commit": "c" * 40}
    begun = {"begun": "2026-11-30T08:00:00+00:00"}
    (run_dir / "manifest.json").write_text(json.dumps(facts | begun))
    tracking.begin_stage(run_dir, "m2")
    (parent,) = _runs(run_dir, level="trial")
    assert parent.info.start_time == 1_796_025_600_000  # 20,787 days and 8 hours after the epoch
    assert parent.data.tags["mlflow.source.git.commit"] == "c" * 40
    store = stores.MlflowStore(run_dir)
    at = f"http://127.0.0.1:7000/#/experiments/{store.experiment_id}"
    address = command._address(["--port", "7000"])
    lines = command.pages(stores.tracking_uri(run_dir.parent), address)
    assert lines == [
        f"All trials: {at}/runs?workflowType=machine_learning&searchFilter="
        "tags.%60kvtrial.level%60%20%3D%20%27trial%27",
        f"Over time: {at}/runs?workflowType=machine_learning&searchFilter="
        "tags.%60kvtrial.level%60%20%3D%20%27trial%27&compareRunsMode=CHART",
        f"{run_dir.name}: {at}/runs/{parent.info.run_id}",
    ]


def test_the_verdict_heads_the_trial_with_its_figures_and_tables(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    report.write(run_dir, TABLE)
    tracking.log_verdict(run_dir)
    (parent,) = _runs(run_dir, level="trial")
    (stage,) = _runs(run_dir, level="stage")
    note = parent.data.tags["mlflow.note.content"]
    assert note.splitlines()[0].startswith("**Run K2T (FP16)**")
    assert f"/runs/{stage.info.run_id})" in note
    assert parent.info.status == "FINISHED"
    answered = ("store", "language", "cold_store")
    assert [parent.data.tags[f"kvtrial.{key}"] for key in answered] == [
        "K2T", "KEEP (ruled out)", "undecided",
    ]  # fmt: skip
    # Few tags, since they push the description down; the page's title is the answer.
    assert sum(tag.startswith("kvtrial.") for tag in parent.data.tags) <= 9
    assert parent.info.run_name == "K2T, KEEP K1 · m · here"
    experiment = stores.MlflowStore(run_dir).client.get_experiment(parent.info.experiment_id)
    assert "| `m2` | whole decodes" in experiment.tags["mlflow.note.content"]
    arms = _runs(run_dir, level="arm", candidate="K0")
    assert {arm.data.tags["kvtrial.eligible"] for arm in arms} == {"lacks: pool"}
    client = stores.MlflowStore(run_dir).client

    def artifacts(folder: str | None = None) -> set[str]:
        return {entry.path for entry in client.list_artifacts(parent.info.run_id, folder)}

    assert artifacts() >= {"manifest.json", "protocol.json", "verdict.json", "report.html"}
    assert artifacts("figures") >= {"figures/arms.svg", "figures/arms.png", "figures/forest.svg"}
    assert artifacts("tables") == {
        f"tables/{name}.csv"
        for name in ("profiles", "arms", "contrasts", "hypotheses", "eligibility")
    }


def test_the_same_verdict_twice_adds_no_point_to_a_series(run_dir: Path) -> None:
    tracking.log_verdict(run_dir)
    tracking.log_verdict(run_dir)
    (parent,) = _runs(run_dir, level="trial")
    client = stores.MlflowStore(run_dir).client
    # One point a context: the chart of one metric is its scaling.
    points = client.get_metric_history(parent.info.run_id, "tokens_per_s/K1")
    assert sorted(point.step for point in points) == [512, 4096, 16384]


def test_the_store_lies_in_results_whatever_the_working_directory(run_dir, monkeypatch) -> None:
    """Cases E9 and E10: one database, by an absolute path; nothing stray where one stands."""
    tracking.begin_stage(run_dir, "m2")
    elsewhere = run_dir.parents[1] / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    tracking.begin_stage(Path("../results") / run_dir.name, "m1")
    assert len(_runs(run_dir, level="stage")) == 2
    assert (run_dir.parent / "mlflow.db").is_file()
    assert list(elsewhere.iterdir()) == []
    assert sorted(p.name for p in run_dir.parents[1].iterdir()) == ["elsewhere", "results"]


def test_a_failed_stage_shows_as_failed_and_a_resumed_one_goes_on(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m1")
    tracking.stop_stage(run_dir, "m1", "FAILED", "disk full")
    (failed,) = _runs(run_dir, level="stage", stage="m1")
    assert (failed.info.status, failed.data.tags["kvtrial.why"]) == ("FAILED", "disk full")
    assert _runs(run_dir, level="trial")[0].info.status == "FAILED"
    tracking.begin_stage(run_dir, "m1")
    assert _runs(run_dir, level="trial")[0].info.status == "RUNNING"
    states = sorted(r.info.status for r in _runs(run_dir, level="stage", stage="m1"))
    assert states == ["FAILED", "RUNNING"]


@pytest.mark.parametrize(
    ("signalled", "status", "why"),
    [
        (None, "FAILED", "ValueError: no such thing"),
        (signal.SIGTERM, "KILLED", "Terminated"),
        (signal.SIGINT, "KILLED", "KeyboardInterrupt"),
    ],
)
def test_how_a_stage_ended_is_what_its_run_says(
    run_dir, monkeypatch, signalled, status, why
) -> None:
    """Case E13."""

    def main() -> int:
        if signalled is None:
            raise ValueError("no such thing")
        os.kill(os.getpid(), signalled)
        return 0

    monkeypatch.setattr(sys, "argv", ["m2", "--run-dir", str(run_dir)])
    before = signal.getsignal(signal.SIGTERM)
    # A shell starts what runs in its background with SIGINT ignored, the tests among it.
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(ValueError if signalled is None else SystemExit) as ended:
            common.exit_tracked("m2", main)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    (run,) = _runs(run_dir, level="stage", stage="m2")
    assert (run.info.status, run.data.tags["kvtrial.why"]) == (status, why)
    if signalled is not None:
        assert ended.value.code == 130


def test_a_stage_that_died_without_a_word_is_marked_by_the_next(run_dir: Path) -> None:
    """Case E13, kill -9."""
    code = "import os, sys, pathlib; from kvtrial import tracking\n"
    code += "tracking.begin_stage(pathlib.Path(sys.argv[1]), 'm2'); os.kill(os.getpid(), 9)"
    killed = _python(code, run_dir)
    killed.communicate()
    assert killed.returncode == -9
    (left,) = _runs(run_dir, level="stage", stage="m2")
    assert left.info.status == "RUNNING"
    tracking.begin_stage(run_dir, "m2")
    states = sorted(r.info.status for r in _runs(run_dir, level="stage", stage="m2"))
    assert states == ["KILLED", "RUNNING"]
    # This process lives: its run stays, whoever starts next.
    tracking.begin_stage(run_dir, "m1")
    states = sorted(r.info.status for r in _runs(run_dir, level="stage"))
    assert states == ["KILLED", "RUNNING", "RUNNING"]


def test_what_another_pipeline_did_is_its_run_and_ours_is_no_longer_running(
    run_dir, monkeypatch, capsys
) -> None:
    """Both have begun; the first finishes the stage, the second finds it done."""

    def as_process(name: str) -> None:
        monkeypatch.setattr(tracking, "_this_process", lambda: f"{name} 1 1.00")

    for name in ("first", "second"):
        as_process(name)
        tracking.begin_stage(run_dir, "m2")
    as_process("first")
    tracking.finish_stage(run_dir, "m2")

    def main() -> int:
        raise common.DoneElsewhere("another process has finished m2")

    as_process("second")
    monkeypatch.setattr(common.tracking, "begin_stage", lambda *a: None)  # it has
    monkeypatch.setattr(sys, "argv", ["m2", "--run-dir", str(run_dir)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            common.exit_tracked("m2", main)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "m2: another process has finished m2" in capsys.readouterr().err
    runs = {r.data.tags["kvtrial.process"]: r for r in _runs(run_dir, level="stage", stage="m2")}
    first, second = runs["first 1 1.00"], runs["second 1 1.00"]
    assert (first.info.status, second.info.status) == ("FINISHED", "FINISHED")
    assert second.data.tags["kvtrial.why"] == "another process has finished m2"
    arms = _runs(run_dir, level="arm", stage="m2")
    assert {a.data.tags["mlflow.parentRunId"] for a in arms} == {first.info.run_id}
    (parent,) = _runs(run_dir, level="trial")
    assert json.loads(parent.data.tags["kvtrial.run_of"])["m2"] == first.info.run_id


def test_a_process_number_used_again_is_another_process() -> None:
    def is_alive(process: str) -> bool:
        tags = {"kvtrial.process": process}
        return tracking.is_alive(SimpleNamespace(data=SimpleNamespace(tags=tags)))  # type: ignore[arg-type]

    mine = tracking._this_process()
    host, number, started = mine.split()
    assert is_alive(mine)
    assert not is_alive(f"{host} {number} {float(started) - 1:.2f}")
    assert is_alive(f"other-host {number} {started}")
    assert not is_alive("")


@pytest.mark.slow
def test_eight_processes_at_once_on_an_empty_store_lose_nothing(run_dir: Path) -> None:
    """Case E11."""
    (run_dir.parent / "mlflow.db").unlink()
    code = "import sys, pathlib; from kvtrial import tracking; run = pathlib.Path(sys.argv[1])\n"
    code += "tracking.begin_stage(run, sys.argv[2]); tracking.finish_stage(run, sys.argv[2])"
    m2 = run_dir / "events" / "m2.parquet"
    stages = [f"stage{i}" for i in range(8)]
    for stage in stages:
        shutil.copy(m2, run_dir / "events" / f"{stage}.parquet")
    started = [_python(code, run_dir, stage) for stage in stages]
    said = [process.communicate()[1] for process in started]
    assert said == [""] * 8
    assert len(_runs(run_dir, level="trial")) == 1
    finished = _runs(run_dir, level="stage")
    assert sorted(run.data.tags["kvtrial.stage"] for run in finished) == stages
    assert {run.info.status for run in finished} == {"FINISHED"}
    for stage in stages:
        assert len(_runs(run_dir, level="arm", stage=stage)) == RUNS_OF_A_STAGE


PEER_ROW = {
    "model": "tiny", "metric": "m2/tokens_per_s/fp32", "context": 4096, "threads": 2, "ours": 60.0,
    "peer": 20.0, "ratio": 3.0, "ci95": [2.5, 3.6], "n_blocks": 6, "our_arm": "K1",
    "peer_setting": "llama-cpp-python 0.3.36, KV F16, flash attention off", "best": True,
    "bytes_a_token": 23040.0,
}  # fmt: skip


def test_the_peers_are_a_child_of_the_trial_with_their_ratios(run_dir: Path) -> None:
    slower = {**PEER_ROW, "ratio": 4.0, "best": False}  # stays in the table
    (run_dir / "peers.json").write_text(json.dumps([PEER_ROW, slower]))
    tracking.begin_stage(run_dir, "peers")
    tracking.finish_stage(run_dir, "peers")
    (parent,) = _runs(run_dir, level="trial")
    (run,) = _runs(run_dir, level="stage", stage="peers")
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    name = "m2/tokens_per_s/fp32.llama-cpp-python.4096_2t"
    assert run.data.metrics == {
        f"{name}.ours": 60.0,
        f"{name}.peer": 20.0,
        f"{name}.ratio": 3.0,
        f"{name}.ratio.low": 2.5,
        f"{name}.ratio.high": 3.6,
    }
    assert run.data.tags[f"setting.{name}"].startswith("K1 against llama-cpp-python 0.3.36, KV F16")
    artifacts = stores.MlflowStore(run_dir).client.list_artifacts(run.info.run_id)
    assert "peers.json" in {a.path for a in artifacts}


def test_what_becomes_of_the_peers_is_not_what_becomes_of_the_trial(run_dir: Path) -> None:
    tracking.log_verdict(run_dir)
    tracking.begin_stage(run_dir, "peers")
    assert _runs(run_dir, level="trial")[0].info.status == "FINISHED"
    tracking.stop_stage(run_dir, "peers", "FAILED", "no peer is installed")
    assert _runs(run_dir, level="trial")[0].info.status == "FINISHED"
    assert _runs(run_dir, level="stage", stage="peers")[0].info.status == "FAILED"


def test_a_verdict_that_can_not_be_made_ends_the_trial_as_failed(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    tracking.stop_trial(run_dir, "MixedProtocol: two")
    (parent,) = _runs(run_dir, level="trial")
    assert (parent.info.status, parent.data.tags["kvtrial.why"]) == ("FAILED", "MixedProtocol: two")


def test_an_attempt_that_was_logged_in_part_is_logged_again_by_a_rebuild(
    run_dir: Path, monkeypatch
) -> None:
    def away(*args: object) -> None:
        raise ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(stores.MlflowStore, "metrics", away)
        tracking.finish_stage(run_dir, "m2")
    assert len(_runs(run_dir, level="arm", stage="m2")) < RUNS_OF_A_STAGE
    command.rebuild(run_dir.parent)
    (whole,) = [
        run for run in _runs(run_dir, level="stage", stage="m2") if run.info.status == "FINISHED"
    ]
    arms = [
        run
        for run in _runs(run_dir, level="arm", stage="m2")
        if run.data.tags["mlflow.parentRunId"] == whole.info.run_id
    ]
    assert len(arms) == RUNS_OF_A_STAGE


def test_a_run_without_a_verdict_is_rebuilt_as_stopped(run_dir: Path) -> None:
    (run_dir / "verdict.json").unlink()
    command.rebuild(run_dir.parent)
    assert _runs(run_dir, level="trial")[0].info.status == "KILLED"


def test_a_server_that_is_away_costs_a_warning_only(run_dir, monkeypatch, caplog) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, logger="kvtrial.tracking"):
        tracking.finish_stage(run_dir, "m2")
    assert "The verdict does not need it" in caplog.text


@pytest.mark.parametrize("fault", ["locked", "no database", "not installed"])
def test_a_store_that_can_not_be_used_costs_a_warning_only(
    run_dir, monkeypatch, caplog, fault
) -> None:
    """Cases E10 and I15: at once, where MLflow itself would try again for minutes."""
    database = run_dir.parent / "mlflow.db"
    monkeypatch.setattr(stores, "LOCKED_S", 0.05)
    holder = None
    if fault == "locked":
        holder = sqlite3.connect(database)
        holder.execute("BEGIN EXCLUSIVE")
    elif fault == "no database":
        database.unlink()
        database.mkdir()
    else:
        monkeypatch.setitem(sys.modules, "mlflow", None)
    with caplog.at_level(logging.WARNING, logger="kvtrial.tracking"):
        tracking.log_verdict(run_dir)
    said = {
        "locked": f"StoreUnusable: {database}: database is locked",
        "no database": f"StoreUnusable: {database}: unable to open database file",
        "not installed": "ModuleNotFoundError: import of mlflow halted",
    }
    assert said[fault] in caplog.text
    if holder is not None:
        holder.close()


def test_what_is_not_finite_becomes_a_tag_never_a_metric(run_dir: Path) -> None:
    """Case E12."""
    store = stores.MlflowStore(run_dir)
    run = store.stage("x")
    store.metrics(run, [("a", float("nan"), 0), ("b", float("inf"), 0), ("c", 1e300, 0)])
    read = store.client.get_run(run)
    assert read.data.metrics == {"c": 1e300}
    assert read.data.tags["not_finite.a"] == "nan"
    assert read.data.tags["not_finite.b"] == "inf"


def test_the_store_can_be_made_again_from_results_alone(run_dir: Path) -> None:
    (run_dir / "peers.json").write_text(json.dumps([PEER_ROW]))
    command.rebuild(run_dir.parent)
    command.rebuild(run_dir.parent)
    assert len(_runs(run_dir, level="stage", stage="peers")) == 1
    assert len(_runs(run_dir, level="stage", stage="m2")) == 1
    assert len(_runs(run_dir, level="arm", stage="m2")) == RUNS_OF_A_STAGE
    (parent,) = _runs(run_dir, level="trial")
    assert parent.data.tags["kvtrial.store"] == "K2T"


def test_every_attempt_is_rebuilt_in_its_state(run_dir: Path) -> None:
    forced = EVENTS[EVENTS["stage"] == "m2"].assign(attempt=2)
    both = events.to_frame(
        [*EVENTS[EVENTS["stage"] == "m2"].to_dict("records"), *forced.to_dict("records")]
    )
    events.write(both, run_dir / "events" / "m2.parquet")
    (run_dir / "events" / "m1.parquet").unlink()
    left = Journal(run_dir, "m1").attempt()
    left.put("4096x1x1-block00-trial0", forced.head(3).drop(columns="attempt").to_dict("records"))
    command.rebuild(run_dir.parent)
    of_m2 = _runs(run_dir, level="stage", stage="m2")
    assert {(r.data.tags["kvtrial.attempt"], r.info.status) for r in of_m2} == {
        ("1", "FINISHED"),
        ("2", "FINISHED"),
    }
    (unfinished,) = _runs(run_dir, level="stage", stage="m1")
    assert unfinished.info.status == "KILLED"


@pytest.mark.slow
def test_results_that_moved_are_still_a_report_and_a_new_store(run_dir, caplog) -> None:
    """Case E14: MLflow keeps absolute paths, the results do not."""
    tracking.log_verdict(run_dir)
    moved = run_dir.parents[1] / "moved"
    run_dir.parent.rename(moved)
    there = moved / run_dir.name
    assert report.write(there, TABLE).is_file()
    with caplog.at_level(logging.WARNING, logger="kvtrial.tracking"):
        tracking.log_verdict(there)
    assert "the results were moved. Remove it" in caplog.text
    (moved / "mlflow.db").unlink()
    # In a process of its own: MLflow keeps a database open that this one has used.
    again = [sys.executable, "-W", "ignore", "-m", "kvtrial.tracking", "rebuild", str(moved)]
    assert subprocess.run(again, check=True, capture_output=True, text=True).stdout.strip() == (
        f"MLflow store: sqlite:///{moved.resolve() / 'mlflow.db'}"
    )
    with contextlib.closing(sqlite3.connect(moved / "mlflow.db")) as made:
        uris = [uri for (uri,) in made.execute("SELECT artifact_uri FROM runs")]
    assert uris and all(uri.startswith((moved / "mlartifacts").as_uri()) for uri in uris)


def test_the_ui_opens_on_the_store_of_the_results(run_dir, monkeypatch, capsys) -> None:
    started = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.append(arguments))
    monkeypatch.setenv("KVTRIAL_RESULTS", str(run_dir.parent))
    (run_dir.parent / "mlflow.db").unlink()
    with pytest.raises(
        command.ConfigError, match=r"no MLflow store in .*results yet; run `make smoke`"
    ):
        command.main(["ui"])
    (run_dir.parent / "mlflow.db").touch()
    command.main(["ui", "--port", "5999"])
    (arguments,) = started
    assert f"sqlite:///{run_dir.parent.resolve() / 'mlflow.db'}" in arguments
    assert arguments[-2:] == ["--port", "5999"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    command.main(["ui"])
    assert "http://127.0.0.1:9" in capsys.readouterr().out
    assert len(started) == 1


def test_between_two_stages_a_trial_waits(run_dir: Path) -> None:
    """A pipeline that was ended there left it RUNNING with nobody at work."""
    (run_dir / "verdict.json").unlink()

    def status() -> str:
        return str(_runs(run_dir, level="trial")[0].info.status)

    tracking.begin_stage(run_dir, "m1")
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m1")
    assert status() == "RUNNING"
    tracking.finish_stage(run_dir, "m2")
    assert status() == "SCHEDULED"
    tracking.begin_stage(run_dir, "aa")
    assert status() == "RUNNING"
    tracking.stop_stage(run_dir, "aa", "KILLED", "Terminated")
    tracking.begin_stage(run_dir, "peers")
    tracking.leave_stage(run_dir, "peers", "done elsewhere")
    assert status() == "KILLED"


def test_a_deleted_experiment_is_restored_with_a_word(run_dir: Path, caplog) -> None:
    """Each stage warned from then on, and a rebuild ended in a traceback."""
    store = stores.MlflowStore(run_dir)
    store.client.delete_experiment(store.experiment_id)
    with caplog.at_level(logging.WARNING, logger="kvtrial.tracking"):
        tracking.begin_stage(run_dir, "m2")
        tracking.leave_stage(run_dir, "m2", "done elsewhere")
    assert [record.getMessage() for record in caplog.records] == [
        "MLflow's experiment kvtrial was deleted, and is restored to take this. To be rid of it, set "
        "MLFLOW_TRACKING_URI to another store"
    ]
    assert store.client.get_experiment(store.experiment_id).lifecycle_stage == "active"
    (parent,) = _runs(run_dir, level="trial")
    assert parent.info.run_id == store.parent_id


@pytest.mark.parametrize("name", ["a?b", "50%41#é 日"])
def test_the_store_lies_in_results_whatever_their_path(run_dir: Path, name: str) -> None:
    """A store of `a?b` was made in `a`, beside it."""
    odd = run_dir.parents[1] / name / "results"
    odd.parent.mkdir()
    run_dir.parent.rename(odd)
    tracking.begin_stage(odd / run_dir.name, "m2")
    store = stores.MlflowStore(odd / run_dir.name)
    assert len(store.find(level="stage")) == 1
    store.artifact(store.parent_id, odd / run_dir.name / "verdict.json")
    assert "verdict.json" in [a.path for a in store.client.list_artifacts(store.parent_id)]
    with contextlib.closing(sqlite3.connect(odd / "mlflow.db")) as made:
        assert made.execute("SELECT count(*) FROM runs").fetchone() == (2,)
    assert [p.name for p in odd.parents[1].iterdir()] == [name]


def test_a_plain_path_is_named_plainly(run_dir: Path) -> None:
    plain, odd = Path("/srv/results"), Path("/srv/a?b/results")
    assert stores.tracking_uri(plain) == "sqlite:////srv/results/mlflow.db"
    assert (
        stores.tracking_uri(odd) == "sqlite+pysqlite:///file:/srv/a%3Fb/results/mlflow.db?uri=true"
    )


def test_mlflow_at_a_path_with_a_percent_sign_is_refused_by_name(
    run_dir, monkeypatch, caplog
) -> None:
    """Its migrations read the path of its own package as a format; each command ended in their words."""
    where = SimpleNamespace(origin="/srv/50%41/.venv/mlflow/__init__.py")
    monkeypatch.setattr(stores.importlib.util, "find_spec", lambda name: where)
    monkeypatch.setenv("KVTRIAL_RESULTS", str(run_dir.parent))
    with caplog.at_level(logging.WARNING, logger="kvtrial.tracking"):
        tracking.log_verdict(run_dir)
    assert "StoreUnusable: MLflow is installed at /srv/50%41/.venv/mlflow and" in caplog.text
    for arguments in (["ui"], ["rebuild", str(run_dir.parent)]):
        with pytest.raises(stores.StoreUnusable, match="move the checkout, or set MLFLOW_TRACKING"):
            command.main(arguments)


def test_an_arm_that_did_not_run_has_no_run_and_probes_are_system_metrics(run_dir: Path) -> None:
    at = {"candidate": "K1C", "text": "no compiler"}
    added = [row("m2", "not_run", FEW, **at)]
    added += [row("m2", "m2/allocations", FEW, candidate="K1", value=3.0)]
    added += [row("m2", "probe/spin_ms", FEW, candidate="machine", value=v) for v in (5.0, 7.0)]
    path = run_dir / "events" / "m2.parquet"
    events.write(with_rows(events.read(path), added), path)
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    arms = _runs(run_dir, level="arm", stage="m2")
    assert len(arms) == RUNS_OF_A_STAGE
    assert not [arm for arm in arms if arm.data.tags["kvtrial.candidate"] == "K1C"]
    (stage,) = _runs(run_dir, level="stage")
    client = stores.MlflowStore(run_dir).client
    spins = client.get_metric_history(stage.info.run_id, "system/spin_ms")
    assert sorted((point.step, point.value) for point in spins) == [(0, 5.0), (1, 7.0)]
    assert {arm.info.start_time for arm in arms} == {stage.info.start_time}


def test_a_rebuilt_stage_ended_when_its_table_was_written_and_took_what_its_blocks_took(
    run_dir: Path,
) -> None:
    path = run_dir / "events" / "m2.parquet"
    added = [
        row("m2", "block/taken_s", FEW, candidate="machine", block=b, value=30.0) for b in (0, 1)
    ]
    events.write(with_rows(events.read(path), added), path)
    os.utime(path, (2_000_000, 2_000_000))
    os.utime(run_dir / "verdict.json", (2_000_100, 2_000_100))
    command.rebuild(run_dir.parent)
    (stage,) = _runs(run_dir, level="stage", stage="m2")
    assert (stage.info.start_time, stage.info.end_time) == (1_999_940_000, 2_000_000_000)
    (parent,) = _runs(run_dir, level="trial")
    assert parent.info.end_time == 2_000_100_000


def test_a_killed_trial_is_not_running_once_somebody_looks(run_dir: Path) -> None:
    (run_dir / "verdict.json").unlink()
    tracking.begin_stage(run_dir, "m2")
    tracking.end_dead(run_dir)
    (parent,) = _runs(run_dir, level="trial")
    assert parent.info.status == "RUNNING"  # its process is this one
    (stage,) = _runs(run_dir, level="stage")
    dead = f"{socket.gethostname()} 999999999 1.00"
    stores.MlflowStore(run_dir).tags(stage.info.run_id, {"kvtrial.process": dead})
    tracking.end_dead(run_dir)
    (parent,) = _runs(run_dir, level="trial")
    assert (parent.info.status, parent.data.tags["kvtrial.why"]) == ("KILLED", "its process died")
