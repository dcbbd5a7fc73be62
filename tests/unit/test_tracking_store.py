"""The MLflow store of a results folder: where it lies, what is wrong with it, and how it is made again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from shown_trial import FEW
from tracked import EVENTS, PEER_ROW, RUNS_OF_A_STAGE, TABLE, python, runs, tracked_run
from trial_events import row, with_rows

from kvtrial import tracking
from kvtrial.run import events
from kvtrial.run.journal import Journal
from kvtrial.show import report
from kvtrial.tracking import __main__ as command
from kvtrial.tracking import store as stores

# MLflow's own imports warn about what other packages deprecate; that is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run_dir(empty_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return tracked_run(empty_database, tmp_path, monkeypatch)


def test_the_store_lies_in_results_whatever_the_working_directory(run_dir, monkeypatch) -> None:
    """Cases E9 and E10: one database, by an absolute path; nothing stray where one stands."""
    tracking.begin_stage(run_dir, "m2")
    elsewhere = run_dir.parents[1] / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    tracking.begin_stage(Path("../results") / run_dir.name, "m1")
    assert len(runs(run_dir, level="stage")) == 2
    assert (run_dir.parent / "mlflow.db").is_file()
    assert list(elsewhere.iterdir()) == []
    assert sorted(p.name for p in run_dir.parents[1].iterdir()) == ["elsewhere", "results"]


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
    started = [python(code, run_dir, stage) for stage in stages]
    said = [process.communicate()[1] for process in started]
    assert said == [""] * 8
    assert len(runs(run_dir, level="trial")) == 1
    finished = runs(run_dir, level="stage")
    assert sorted(run.data.tags["kvtrial.stage"] for run in finished) == stages
    assert {run.info.status for run in finished} == {"FINISHED"}
    for stage in stages:
        assert len(runs(run_dir, level="arm", stage=stage)) == RUNS_OF_A_STAGE


def test_an_attempt_that_was_logged_in_part_is_logged_again_by_a_rebuild(
    run_dir: Path, monkeypatch
) -> None:
    def away(*args: object) -> None:
        raise ConnectionError("away")

    with monkeypatch.context() as patch:
        patch.setattr(stores.MlflowStore, "metrics", away)
        tracking.finish_stage(run_dir, "m2")
    assert len(runs(run_dir, level="arm", stage="m2")) < RUNS_OF_A_STAGE
    command.rebuild(run_dir.parent)
    (whole,) = [
        run for run in runs(run_dir, level="stage", stage="m2") if run.info.status == "FINISHED"
    ]
    arms = [
        run
        for run in runs(run_dir, level="arm", stage="m2")
        if run.data.tags["mlflow.parentRunId"] == whole.info.run_id
    ]
    assert len(arms) == RUNS_OF_A_STAGE


def test_a_run_without_a_verdict_is_rebuilt_as_stopped(run_dir: Path) -> None:
    (run_dir / "verdict.json").unlink()
    command.rebuild(run_dir.parent)
    assert runs(run_dir, level="trial")[0].info.status == "KILLED"


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
    assert len(runs(run_dir, level="stage", stage="peers")) == 1
    assert len(runs(run_dir, level="stage", stage="m2")) == 1
    assert len(runs(run_dir, level="arm", stage="m2")) == RUNS_OF_A_STAGE
    (parent,) = runs(run_dir, level="trial")
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
    of_m2 = runs(run_dir, level="stage", stage="m2")
    assert {(r.data.tags["kvtrial.attempt"], r.info.status) for r in of_m2} == {
        ("1", "FINISHED"),
        ("2", "FINISHED"),
    }
    (unfinished,) = runs(run_dir, level="stage", stage="m1")
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
        command.ConfigError, match=r"no MLflow store in .*results yet; run `make verdict`"
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
    (parent,) = runs(run_dir, level="trial")
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
    (stage,) = runs(run_dir, level="stage", stage="m2")
    assert (stage.info.start_time, stage.info.end_time) == (1_999_940_000, 2_000_000_000)
    (parent,) = runs(run_dir, level="trial")
    assert parent.info.end_time == 2_000_100_000
