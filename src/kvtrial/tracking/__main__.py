"""``python -m kvtrial.tracking rebuild RESULTS``: make the store again from the results alone.

``python -m kvtrial.tracking ui [OPTIONS]``: browse it; the options are those of ``mlflow ui``.
"""

from __future__ import annotations

import argparse
import os
import sys
import urllib.parse
from pathlib import Path

from kvtrial.host import paths
from kvtrial.run import events
from kvtrial.run.journal import Journal
from kvtrial.run.layout import ConfigError
from kvtrial.tracking import end_dead, is_alive, records
from kvtrial.tracking.store import (
    EXPERIMENT,
    REBUILD,
    MlflowStore,
    database,
    refuse_embedded,
    tracking_uri,
)

#: Trials that are linked by name, the newest.
_NEWEST = 5


def rebuild(results: Path) -> None:
    """Log every run below ``results`` again; attempts that the store already holds are left alone.

    Raises
    ------
    ConfigError
        There is no run in that folder.
    StoreUnusable, mlflow.exceptions.MlflowException
        The store does not take it.
    """
    manifests = sorted(results.glob("*/manifest.json"))
    if not manifests:
        raise ConfigError(f"no run under {results}; give the folder that holds the runs")
    for manifest in manifests:
        with MlflowStore.held(manifest.parent) as store:
            for table in sorted((manifest.parent / "events").glob("*.parquet")):
                if table.stem != "run":  # facts of the run; they are in the manifest
                    _rebuild_stage(store, table.stem, table)
            for journal in sorted((manifest.parent / "journal").glob("*")):
                _rebuild_unfinished(store, journal.name)
            if (manifest.parent / "peers.json").is_file() and not any(
                run.info.status == "FINISHED" for run in store.find(level="stage", stage="peers")
            ):
                run_id = store.stage("peers")
                records.log_peers(store, run_id)
                store.end(run_id, "FINISHED")
            if (manifest.parent / "verdict.json").is_file():
                records.log_verdict(store)
            elif not _running(store):
                store.end(store.parent_id, "KILLED", "no verdict yet")


def _running(store: MlflowStore, **of: str) -> bool:
    """Whether a stage is at work now; what it does it logs itself when it is done."""
    runs = store.find(level="stage", **of)
    return any(run.info.status == "RUNNING" and is_alive(run) for run in runs)


def _logged_attempts(store: MlflowStore, stage: str, *statuses: str) -> set[str]:
    runs = store.find(level="stage", stage=stage)
    return {run.data.tags.get("kvtrial.attempt", "") for run in runs if run.info.status in statuses}


def _rebuild_stage(store: MlflowStore, stage: str, table: Path) -> None:
    for number, rows in events.read(table).groupby("attempt"):
        complete = (rows["metric"] == "attempt/complete").any()
        status = "FINISHED" if complete else "KILLED"
        if str(number) not in _logged_attempts(store, stage, status):
            # Events have no time of day: an attempt ended when its table was written, and took its blocks' time.
            ended = table.stat().st_mtime
            taken = float(rows.loc[rows["metric"] == "block/taken_s", "value"].sum())
            run_id = store.stage(stage, ended - taken)
            records.log_attempt(store, run_id, stage, rows, table, ended)
            store.end(run_id, status, ended=ended)


def _rebuild_unfinished(store: MlflowStore, stage: str) -> None:
    """An attempt that has blocks and no table: its stage was stopped, and has not gone on."""
    if _running(store, stage=stage):
        return
    logged = _logged_attempts(store, stage, "KILLED", "FAILED", "FINISHED")
    for attempt in Journal(store.run_dir, stage).attempts():
        if not attempt.published and str(attempt.number) not in logged:
            run_id = store.stage(stage)
            records.log_attempt(store, run_id, stage, events.to_frame(attempt.rows()), None)
            store.end(run_id, "KILLED", "not finished; the same command goes on from here")


def _browse(results: Path, arguments: list[str]) -> None:
    """Turn this process into MLflow's UI on the store."""
    uri = tracking_uri(results)
    if not uri.startswith("sqlite"):
        print(f"MLFLOW_TRACKING_URI is set, so the runs are there: {uri}")
        return
    refuse_embedded()
    if not os.environ.get("MLFLOW_TRACKING_URI") and not database(results).is_file():
        raise ConfigError(
            f"no MLflow store in {results} yet; run `{paths.how_to()}`, or, where there are results: {REBUILD}"
        )
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        for manifest in sorted(results.glob("*/manifest.json")):
            end_dead(manifest.parent)
    for line in pages(uri, _address(arguments)):
        print(line, flush=True)
    command = [sys.executable, "-m", "mlflow", "ui", "--workers", "1", "--backend-store-uri", uri]
    os.execv(sys.executable, [*command, *arguments])


def _address(arguments: list[str]) -> str:
    """Where MLflow's UI answers, by the options that it is given."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--host", "-h", default="127.0.0.1")
    parser.add_argument("--port", "-p", default="5000")
    given, _ = parser.parse_known_args(arguments)
    return f"http://{given.host}:{given.port}"


def pages(uri: str, address: str) -> list[str]:
    """Lines that say where the trials are: the UI's first page is about other things.

    Parameters
    ----------
    uri : str
        Of the store.
    address : str
        Where its UI answers.
    """
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    if experiment is None:
        return []
    found = f"{address}/#/experiments/{experiment.experiment_id}"
    trials = client.search_runs(
        [experiment.experiment_id], "tags.`kvtrial.level` = 'trial'", max_results=_NEWEST
    )
    only = urllib.parse.quote("tags.`kvtrial.level` = 'trial'")
    table = f"{found}/runs?workflowType=machine_learning&searchFilter={only}"
    return [
        f"All trials: {table}",
        f"Over time: {table}&compareRunsMode=CHART",
        *(f"{run.info.run_name}: {found}/runs/{run.info.run_id}" for run in trials),
    ]


def main(argv: list[str] | None = None) -> int:
    """Command line of the store."""
    parser = argparse.ArgumentParser(prog="python -m kvtrial.tracking", description="MLflow store.")
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("rebuild", help="log every run below RESULTS again")
    again.add_argument("results", type=Path)
    commands.add_parser("ui", help="browse the store of results/", add_help=False)
    args, rest = parser.parse_known_args(argv)
    if args.command == "ui":
        _browse(paths.results_dir(), rest)
        return 0
    rebuild(args.results)
    print(f"MLflow store: {tracking_uri(args.results)}")
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
