"""MLflow: where people browse a trial.

Nothing is decided from what is stored here, and nothing here may cost a verdict: what stages call
catches whatever MLflow raises and says so in one warning. The store can be made again from
``results/`` (``python -m kvtrial.tracking rebuild RESULTS``).

One parent run per ``run_id``; a child per attempt at a stage, and below it a child per candidate and
cell. Parents are found by tag. Processes take turns at the store, so that none meets a half-made or
locked database. A stage that fails is FAILED, one that is ended or interrupted KILLED; one whose
process died without a word is marked KILLED by the next that starts. The trial is RUNNING while a stage
is, SCHEDULED between two stages.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

import psutil

from kvtrial.run import events
from kvtrial.tracking import records
from kvtrial.tracking.store import REBUILD, MlflowStore, tracking_uri

if TYPE_CHECKING:
    from mlflow.entities import Run

log = logging.getLogger(__name__)
#: Stages beside the trial: what becomes of them is not what becomes of it.
BESIDE = frozenset({"peers"})
P = ParamSpec("P")


def _never_costs_a_verdict(function: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # whatever a remote or a locked database raises
            log.warning(
                "MLflow did not take this (%s: %s). The verdict does not need it; make the store again "
                "with: %s",
                type(error).__name__,
                str(error).splitlines()[0] if str(error) else "",
                REBUILD,
            )

    return guarded


@_never_costs_a_verdict
def begin_stage(run_dir: Path, stage: str) -> None:
    """Open the stage's run as RUNNING; runs whose process died are marked KILLED."""
    with MlflowStore.held(run_dir) as store:
        _end_dead_stages(store)
        store.stage(stage, process=_this_process())
        if stage not in BESIDE:
            store.client.update_run(store.parent_id, status="RUNNING")


@_never_costs_a_verdict
def end_dead(run_dir: Path) -> None:
    """End what a killed process left RUNNING: its stage, and the trial where no other stage is at work."""
    with MlflowStore.held(run_dir) as store:
        if _end_dead_stages(store) and not any(map(_is_at_work, store.find(level="stage"))):
            store.end(store.parent_id, "KILLED", "its process died")


def _end_dead_stages(store: MlflowStore) -> bool:
    """Whether there was one."""
    stages = store.find(level="stage")
    dead = [run for run in stages if run.info.status == "RUNNING" and not is_alive(run)]
    for run in dead:
        store.end(run.info.run_id, "KILLED", "its process died")
    return bool(dead)


@_never_costs_a_verdict
def stop_stage(run_dir: Path, stage: str, status: str, why: str) -> None:
    """End this process's run of the stage, and the trial's, as FAILED or KILLED, with the reason as a tag."""
    with MlflowStore.held(run_dir) as store:
        for run_id in _own_runs(store, stage):
            store.end(run_id, status, why)
        if stage not in BESIDE:
            store.end(store.parent_id, status)


@_never_costs_a_verdict
def finish_stage(run_dir: Path, stage: str) -> None:
    """Log the stage's newest attempt as child runs and end its run as FINISHED."""
    with MlflowStore.held(run_dir) as store:
        run_id = next(iter(_own_runs(store, stage)), None) or store.stage(stage)
        table = run_dir / "events" / f"{stage}.parquet"
        if stage == "peers":  # it has a comparison of its own and no attempts
            records.log_peers(store, run_id)
        elif table.is_file():
            rows = events.read(table)
            newest = rows[rows["attempt"] == rows["attempt"].max()]
            records.log_attempt(store, run_id, stage, newest, table)
        store.end(run_id, "FINISHED")
        _leave_trial(store)


@_never_costs_a_verdict
def leave_stage(run_dir: Path, stage: str, why: str) -> None:
    """End this process's run of a stage that another process has done: FINISHED, with the reason as a tag
    and without figures. The trial links to the other's run again."""
    with MlflowStore.held(run_dir) as store:
        own = _own_runs(store, stage)
        for run_id in own:
            store.end(run_id, "FINISHED", why)
        others = [run.info.run_id for run in store.find(level="stage", stage=stage)]
        if left := [run_id for run_id in others if run_id not in own]:
            store.link(stage, left[0])
        _leave_trial(store)


def _leave_trial(store: MlflowStore) -> None:
    """A trial that has its verdict is finished again when the stage that was forced is. Any other waits for its
    next stage, and nothing says so later if that never comes: it is SCHEDULED, not RUNNING."""
    if (store.run_dir / "verdict.json").is_file():
        store.end(store.parent_id, "FINISHED")
        return
    if any(_is_at_work(run) for run in store.find(level="stage")):
        return
    if store.client.get_run(store.parent_id).info.status == "RUNNING":
        store.client.update_run(store.parent_id, status="SCHEDULED")


def _is_at_work(run: Run) -> bool:
    return run.info.status == "RUNNING" and is_alive(run)


@_never_costs_a_verdict
def stop_trial(run_dir: Path, why: str) -> None:
    """End the trial's run as FAILED: its verdict could not be made."""
    with MlflowStore.held(run_dir) as store:
        store.end(store.parent_id, "FAILED", why)


@_never_costs_a_verdict
def log_verdict(run_dir: Path) -> None:
    """Write the verdict into the trial's run: description, tags, metrics, figures and tables."""
    with MlflowStore.held(run_dir) as store:
        records.log_verdict(store)


def _own_runs(store: MlflowStore, stage: str) -> list[str]:
    """Runs of the stage that this process has begun and not ended. Another pipeline on the trial may have
    begun one too."""
    runs = store.find(level="stage", stage=stage, process=_this_process())
    return [run.info.run_id for run in runs if run.info.status == "RUNNING"]


def _this_process() -> str:
    """Host, number and start of this process: a number alone is soon another's."""
    return f"{socket.gethostname()} {os.getpid()} {psutil.Process().create_time():.2f}"


def is_alive(run: Run) -> bool:
    """Whether the process of a stage's run goes on; of another host's nothing is known, so it counts as
    alive."""
    process = run.data.tags.get("kvtrial.process", "")
    host, _, rest = process.partition(" ")
    if host != socket.gethostname():
        return bool(host)
    number, _, started = rest.partition(" ")
    try:
        return f"{psutil.Process(int(number)).create_time():.2f}" == started
    except (ValueError, psutil.NoSuchProcess):
        return False


__all__ = [
    "begin_stage",
    "end_dead",
    "finish_stage",
    "is_alive",
    "leave_stage",
    "log_verdict",
    "stop_stage",
    "stop_trial",
    "tracking_uri",
]
