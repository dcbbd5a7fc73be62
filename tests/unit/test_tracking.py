"""What MLflow is told of stages, arms and the verdict, in a real store in SQLite."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from shown_trial import FEW, STEPS
from tracked import PEER_ROW, RUNS_OF_A_STAGE, TABLE, python, runs, tracked_run
from trial_events import row, with_rows

from kvtrial import tracking
from kvtrial.run import events
from kvtrial.show import report
from kvtrial.stages import common
from kvtrial.tracking import __main__ as command
from kvtrial.tracking import store as stores

# MLflow's own imports warn about what other packages deprecate; that is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run_dir(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tracked_run(empty_database, tmp_path, monkeypatch)


def test_a_stage_is_a_child_of_the_trial_and_an_arm_a_child_of_the_stage(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    (parent,) = runs(run_dir, level="trial")
    (stage,) = runs(run_dir, level="stage", stage="m2")
    arms = runs(run_dir, level="arm", stage="m2")
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
    (parent,) = runs(run_dir, level="trial")
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
    (parent,) = runs(run_dir, level="trial")
    (stage,) = runs(run_dir, level="stage")
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
    arms = runs(run_dir, level="arm", candidate="K0")
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
    (parent,) = runs(run_dir, level="trial")
    client = stores.MlflowStore(run_dir).client
    # One point a context: the chart of one metric is its scaling.
    points = client.get_metric_history(parent.info.run_id, "tokens_per_s/K1")
    assert sorted(point.step for point in points) == [512, 4096, 16384]


def test_a_failed_stage_shows_as_failed_and_a_resumed_one_goes_on(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m1")
    tracking.stop_stage(run_dir, "m1", "FAILED", "disk full")
    (failed,) = runs(run_dir, level="stage", stage="m1")
    assert (failed.info.status, failed.data.tags["kvtrial.why"]) == ("FAILED", "disk full")
    assert runs(run_dir, level="trial")[0].info.status == "FAILED"
    tracking.begin_stage(run_dir, "m1")
    assert runs(run_dir, level="trial")[0].info.status == "RUNNING"
    states = sorted(r.info.status for r in runs(run_dir, level="stage", stage="m1"))
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
    (run,) = runs(run_dir, level="stage", stage="m2")
    assert (run.info.status, run.data.tags["kvtrial.why"]) == (status, why)
    if signalled is not None:
        assert ended.value.code == 130


def test_a_stage_that_died_without_a_word_is_marked_by_the_next(run_dir: Path) -> None:
    """Case E13, kill -9."""
    code = "import os, sys, pathlib; from kvtrial import tracking\n"
    code += "tracking.begin_stage(pathlib.Path(sys.argv[1]), 'm2'); os.kill(os.getpid(), 9)"
    killed = python(code, run_dir)
    killed.communicate()
    assert killed.returncode == -9
    (left,) = runs(run_dir, level="stage", stage="m2")
    assert left.info.status == "RUNNING"
    tracking.begin_stage(run_dir, "m2")
    states = sorted(r.info.status for r in runs(run_dir, level="stage", stage="m2"))
    assert states == ["KILLED", "RUNNING"]
    # This process lives: its run stays, whoever starts next.
    tracking.begin_stage(run_dir, "m1")
    states = sorted(r.info.status for r in runs(run_dir, level="stage"))
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
    by = {r.data.tags["kvtrial.process"]: r for r in runs(run_dir, level="stage", stage="m2")}
    first, second = by["first 1 1.00"], by["second 1 1.00"]
    assert (first.info.status, second.info.status) == ("FINISHED", "FINISHED")
    assert second.data.tags["kvtrial.why"] == "another process has finished m2"
    arms = runs(run_dir, level="arm", stage="m2")
    assert {a.data.tags["mlflow.parentRunId"] for a in arms} == {first.info.run_id}
    (parent,) = runs(run_dir, level="trial")
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


def test_the_peers_are_a_child_of_the_trial_with_their_ratios(run_dir: Path) -> None:
    slower = {**PEER_ROW, "ratio": 4.0, "best": False}  # stays in the table
    (run_dir / "peers.json").write_text(json.dumps([PEER_ROW, slower]))
    tracking.begin_stage(run_dir, "peers")
    tracking.finish_stage(run_dir, "peers")
    (parent,) = runs(run_dir, level="trial")
    (run,) = runs(run_dir, level="stage", stage="peers")
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
    assert runs(run_dir, level="trial")[0].info.status == "FINISHED"
    tracking.stop_stage(run_dir, "peers", "FAILED", "no peer is installed")
    assert runs(run_dir, level="trial")[0].info.status == "FINISHED"
    assert runs(run_dir, level="stage", stage="peers")[0].info.status == "FAILED"


def test_a_verdict_that_can_not_be_made_ends_the_trial_as_failed(run_dir: Path) -> None:
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    tracking.stop_trial(run_dir, "MixedProtocol: two")
    (parent,) = runs(run_dir, level="trial")
    assert (parent.info.status, parent.data.tags["kvtrial.why"]) == ("FAILED", "MixedProtocol: two")


def test_between_two_stages_a_trial_waits(run_dir: Path) -> None:
    """A pipeline that was ended there left it RUNNING with nobody at work."""
    (run_dir / "verdict.json").unlink()

    def status() -> str:
        return str(runs(run_dir, level="trial")[0].info.status)

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


def test_an_arm_that_did_not_run_has_no_run_and_probes_are_system_metrics(run_dir: Path) -> None:
    at = {"candidate": "K1C", "text": "no compiler"}
    added = [row("m2", "not_run", FEW, **at)]
    added += [row("m2", "m2/allocations", FEW, candidate="K1", value=3.0)]
    added += [row("m2", "probe/spin_ms", FEW, candidate="machine", value=v) for v in (5.0, 7.0)]
    path = run_dir / "events" / "m2.parquet"
    events.write(with_rows(events.read(path), added), path)
    tracking.begin_stage(run_dir, "m2")
    tracking.finish_stage(run_dir, "m2")
    arms = runs(run_dir, level="arm", stage="m2")
    assert len(arms) == RUNS_OF_A_STAGE
    assert not [arm for arm in arms if arm.data.tags["kvtrial.candidate"] == "K1C"]
    (stage,) = runs(run_dir, level="stage")
    client = stores.MlflowStore(run_dir).client
    spins = client.get_metric_history(stage.info.run_id, "system/spin_ms")
    assert sorted((point.step, point.value) for point in spins) == [(0, 5.0), (1, 7.0)]
    assert {arm.info.start_time for arm in arms} == {stage.info.start_time}


def test_a_killed_trial_is_not_running_once_somebody_looks(run_dir: Path) -> None:
    (run_dir / "verdict.json").unlink()
    tracking.begin_stage(run_dir, "m2")
    tracking.end_dead(run_dir)
    (parent,) = runs(run_dir, level="trial")
    assert parent.info.status == "RUNNING"  # its process is this one
    (stage,) = runs(run_dir, level="stage")
    dead = f"{socket.gethostname()} 999999999 1.00"
    stores.MlflowStore(run_dir).tags(stage.info.run_id, {"kvtrial.process": dead})
    tracking.end_dead(run_dir)
    (parent,) = runs(run_dir, level="trial")
    assert (parent.info.status, parent.data.tags["kvtrial.why"]) == ("KILLED", "its process died")
