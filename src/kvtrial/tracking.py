"""MLflow: where people browse a trial. The only module that imports mlflow.

Nothing is decided from what is stored here, and nothing here may cost a verdict: every public function
catches what MLflow raises and says so in one warning. The store can be made again from ``results/``
(`rebuild`).

One parent run per ``run_id``; a child per stage, and below a measuring stage a child per candidate and
cell. Parents are found by tag. A stage that fails is FAILED; one whose process died is marked KILLED by
the next that starts.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec

import pandas as pd

from kvtrial import events as event_table

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

log = logging.getLogger(__name__)

EXPERIMENT = "kvtrial"
MAX_PARAM, MAX_TAG = 6000, 8000
_BATCH = 1000
P = ParamSpec("P")


def tracking_uri(results: Path) -> str:
    """``MLFLOW_TRACKING_URI``, else SQLite at an absolute path in ``results``."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{results.resolve() / 'mlflow.db'}"


def _never_costs_a_verdict(function: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:  # whatever a remote or a locked database raises
            log.warning(
                "MLflow did not take this (%s: %s). The verdict does not need it; make the store again "
                "with: python -m kvtrial.tracking rebuild RESULTS",
                type(error).__name__,
                str(error).splitlines()[0] if str(error) else "",
            )

    return guarded


class _Store:
    """An open MLflow store with one trial's parent run in it."""

    def __init__(self, run_dir: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        logging.getLogger("alembic").setLevel(logging.WARNING)
        self.run_dir = run_dir
        self.results = run_dir.parent
        uri = tracking_uri(self.results)
        self.client = MlflowClient(tracking_uri=uri)
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            location = (
                (self.results.resolve() / "mlartifacts").as_uri() if "sqlite" in uri else None
            )
            try:
                experiment_id = self.client.create_experiment(
                    EXPERIMENT, artifact_location=location
                )
            except MlflowException:  # another process was first
                experiment = self.client.get_experiment_by_name(EXPERIMENT)
                if experiment is None:
                    raise
                experiment_id = experiment.experiment_id
        else:
            experiment_id = experiment.experiment_id
        self.experiment_id: str = experiment_id
        manifest = run_dir / "manifest.json"
        facts = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
        self.machine = str(facts.get("machine_class", "unknown"))
        self.parent_id = self._parent()

    def find(self, **tags: str) -> list[Any]:
        """Runs of this trial with these ``kvtrial.*`` tags."""
        wanted = {"kvtrial.run_id": self.run_dir.name} | {
            f"kvtrial.{k}": v for k, v in tags.items()
        }
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in wanted.items())
        found: list[Any] = []
        token = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id], query, max_results=1000, page_token=token
            )
            found.extend(page)
            token = page.token
            if not token:
                return found

    def _parent(self) -> str:
        found = self.find(level="trial")
        if found:
            return str(found[0].info.run_id)
        run = self.client.create_run(
            self.experiment_id,
            run_name=self.run_dir.name,
            tags={"kvtrial.run_id": self.run_dir.name, "kvtrial.level": "trial"},
        )
        for name in ("manifest.json", "protocol.json"):
            self.artifact(run.info.run_id, self.run_dir / name)
        protocol_file = self.run_dir / "protocol.json"
        if protocol_file.is_file():
            protocol = json.loads(protocol_file.read_text(encoding="utf-8"))
            self.params(run.info.run_id, dict(_leaves(protocol)))
        return str(run.info.run_id)

    def child(self, name: str, parent: str | None = None, **tags: str) -> str:
        """A new run below ``parent`` (the trial by default)."""
        run = self.client.create_run(
            self.experiment_id,
            run_name=name,
            tags={
                "mlflow.parentRunId": parent or self.parent_id,
                "kvtrial.run_id": self.run_dir.name,
                **{f"kvtrial.{k}": v[:MAX_TAG] for k, v in tags.items()},
            },
        )
        return str(run.info.run_id)

    def params(self, run: str, values: dict[str, str]) -> None:
        from mlflow.entities import Param

        listed = [Param(k, v[:MAX_PARAM]) for k, v in values.items()]
        for start in range(0, len(listed), 100):
            self.client.log_batch(run, params=listed[start : start + 100])

    def metrics(self, run: str, rows: list[tuple[str, float, int]]) -> None:
        """(name, value, step) rows; what is not finite becomes a tag, never a metric."""
        from mlflow.entities import Metric

        listed = []
        for name, value, step in rows:
            if math.isfinite(value):
                listed.append(Metric(name, value, step, step))
            else:
                self.client.set_tag(run, f"not_finite.{name}", str(value))
        for start in range(0, len(listed), _BATCH):
            self.client.log_batch(run, metrics=listed[start : start + _BATCH])

    def artifact(self, run: str, path: Path, folder: str | None = None) -> None:
        if path.is_file():
            self.client.log_artifact(run, str(path), folder)

    def end(self, run: str, status: str) -> None:
        self.client.set_terminated(run, status)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{index}")
    else:
        yield name, str(value)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


# --------------------------------------------------------------------------------------------------
# What stages call


@_never_costs_a_verdict
def begin_stage(run_dir: Path, stage: str) -> None:
    """Open the stage's run as RUNNING; runs whose process died are marked KILLED."""
    store = _Store(run_dir)
    for run in store.find(level="stage"):
        if run.info.status == "RUNNING" and not _alive(run.data.tags.get("kvtrial.pid", "")):
            store.end(run.info.run_id, "KILLED")
    store.child(stage, level="stage", stage=stage, pid=str(os.getpid()))


@_never_costs_a_verdict
def fail_stage(run_dir: Path, stage: str, why: str) -> None:
    """Mark the stage's open run as FAILED, with the reason as a tag."""
    store = _Store(run_dir)
    for run in store.find(level="stage", stage=stage):
        if run.info.status == "RUNNING":
            store.client.set_tag(run.info.run_id, "kvtrial.why", why[:MAX_TAG])
            store.end(run.info.run_id, "FAILED")


@_never_costs_a_verdict
def finish_stage(run_dir: Path, stage: str) -> None:
    """Log the stage's events as child runs and end its run as FINISHED; of ``peers``, its comparison."""
    if stage == "peers":
        _log_peers(_Store(run_dir))
    else:
        _log_stage(_Store(run_dir), stage)


@_never_costs_a_verdict
def log_verdict(run_dir: Path) -> None:
    """Write the verdict into the trial's run: description, tags, metrics, figures and tables."""
    _log_verdict(_Store(run_dir))


def rebuild(results: Path) -> None:
    """Log every run below ``results`` again; what the store already holds is left alone."""
    for manifest in sorted(results.glob("*/manifest.json")):
        store = _Store(manifest.parent)
        for table in sorted((manifest.parent / "events").glob("*.parquet")):
            if not _is_finished(store, table.stem):
                _log_stage(store, table.stem)
        if (manifest.parent / "peers.json").is_file() and not _is_finished(store, "peers"):
            _log_peers(store)
        if (manifest.parent / "verdict.json").is_file():
            _log_verdict(store)


# --------------------------------------------------------------------------------------------------


def _is_finished(store: _Store, stage: str) -> bool:
    return any(r.info.status == "FINISHED" for r in store.find(level="stage", stage=stage))


def _stage_run(store: _Store, stage: str) -> str:
    """The stage's open run, or a new one."""
    for run in store.find(level="stage", stage=stage):
        if run.info.status == "RUNNING":
            return str(run.info.run_id)
    return store.child(stage, level="stage", stage=stage)


def _log_peers(store: _Store) -> None:
    """Each row of peers.json as metrics, its settings as tags; table and figure as artifacts."""
    run = _stage_run(store, "peers")
    path = store.run_dir / "peers.json"
    metrics: list[tuple[str, float, int]] = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        package = row["peer_setting"].partition(" ")[0]
        name = f"{row['metric']}.{package}.{row['context']}_{row['threads']}t"
        low, high = row["ci95"]
        values = {"ours": row["ours"], "peer": row["peer"], "ratio": row["ratio"]}
        values |= {"ratio.low": low, "ratio.high": high}
        metrics += [(f"{name}.{key}", value, 0) for key, value in values.items()]
        setting = f"{row['our_arm']} against {row['peer_setting']}"
        store.client.set_tag(run, f"setting.{name}", setting[:MAX_TAG])
    store.metrics(run, metrics)
    store.artifact(run, path)
    store.artifact(run, store.run_dir / "peers.parquet")
    for figure in sorted((store.run_dir / "figures").glob("peers.*")):
        store.artifact(run, figure, "figures")
    store.end(run, "FINISHED")


def _log_stage(store: _Store, stage: str) -> None:
    stage_run = _stage_run(store, stage)
    table = store.run_dir / "events" / f"{stage}.parquet"
    if table.is_file():
        frame = pd.read_parquet(table)
        store.artifact(stage_run, table)
        newest = frame[frame["attempt"] == frame["attempt"].max()]
        store.client.set_tag(stage_run, "kvtrial.attempt", str(int(newest["attempt"].max())))
        keys = ["candidate", "context", "sessions", "threads", "shape"]
        for (name, context, sessions, threads, shape), rows in newest.groupby(keys):
            if name == "machine":
                continue
            title = f"{stage} {name}" + (f" @{context}" if context else "")
            if sessions > 1 or threads > 1:
                title += f" {sessions}s{threads}t"
            if shape:
                title += f" {shape}"
            child = store.child(
                title,
                stage_run,
                level="arm",
                stage=stage,
                candidate=str(name),
                context=str(context),
                sessions=str(sessions),
                threads=str(threads),
                shape=str(shape),
                protocol_sha256=str(rows["protocol_sha256"].iloc[0]),
                machine=store.machine,
            )
            store.metrics(child, _series(rows))
            for text in rows.loc[rows["metric"].isin(["failed", "not_run"]), "text"]:
                store.client.set_tag(child, "kvtrial.why", str(text)[:MAX_TAG])
            store.end(child, "FAILED" if (rows["metric"] == "failed").any() else "FINISHED")
    store.end(stage_run, "FINISHED")


def _series(rows: pd.DataFrame) -> list[tuple[str, float, int]]:
    """Every metric of an arm as a series over its values, plus its median where there are many."""
    found: list[tuple[str, float, int]] = []
    numbers = rows[rows["value"].notna()].sort_values(["block", "trial", "index"])
    for metric, own in numbers.groupby("metric"):
        name = _metric_name(str(metric))
        values = own["value"].tolist()
        found.extend((name, value, step) for step, value in enumerate(values))
        if len(values) > 1:
            found.append((f"{name}.median", float(own["value"].median()), 0))
    steps = numbers[numbers["metric"] == "m2/step_ms"]
    if len(steps):
        rate = len(steps) * int(rows["sessions"].iloc[0]) / (steps["value"].sum() / 1000.0)
        found.append(("m2/tokens_per_s", rate, 0))
    return found


def _metric_name(metric: str) -> str:
    return event_table.METRIC_CHARACTERS.sub("_", metric)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _log_verdict(store: _Store) -> None:
    verdict = json.loads((store.run_dir / "verdict.json").read_text(encoding="utf-8"))
    hot, cold = verdict["hot"], verdict["cold"]
    lines = [
        f"**{hot['outcome']}: {hot['adopted'] or 'undecided'}** on `{verdict['machine']}` with "
        f"`{verdict['model']}`" + (" (synthetic weights)" if verdict["synthetic"] else ""),
        "",
        hot["reason"],
        "",
        f"Cold: **{cold['adopted'] or 'undecided'}**. {cold['reason']}",
        "",
        "| arm | context | tokens/s | p50 ms | p95 ms | blocks |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm in hot["arms"]:
        lines.append(
            f"| {arm['candidate']} | {arm['context']} | {_shown(arm['tokens_per_s'])} | "
            f"{_shown(arm['step_ms_p50'])} | {_shown(arm['step_ms_p95'])} | {arm['n_blocks']} |"
        )
    run = store.parent_id
    tags = {
        "mlflow.note.content": "\n".join(lines)[:MAX_TAG],
        "kvtrial.outcome": hot["outcome"],
        "kvtrial.adopted": str(hot["adopted"]),
        "kvtrial.cold_adopted": str(cold["adopted"]),
        "kvtrial.model": verdict["model"],
        "kvtrial.machine": verdict["machine"],
        "kvtrial.protocol_sha256": verdict["protocol_sha256"],
    }
    for key, value in tags.items():
        store.client.set_tag(run, key, value)
    for name, reasons in verdict["eligibility"].items():
        store.client.set_tag(
            run, f"eligibility.{name}", ("; ".join(reasons) or "eligible")[:MAX_TAG]
        )
    rows: list[tuple[str, float, int]] = []
    for contrast in hot["contrasts"]:
        if contrast["ratio"] is None:
            continue
        name = (
            f"contrast/{contrast['challenger']}_over_{contrast['incumbent']}_{contrast['context']}"
        )
        low, high = contrast["ci95"]
        rows += [(name, contrast["ratio"], 0), (f"{name}.low", low, 0), (f"{name}.high", high, 0)]
    for arm in hot["arms"]:
        at = f"{arm['candidate']}_{arm['context']}_{arm['sessions']}s_{arm['threads']}t"
        if arm["tokens_per_s"] is not None:
            rows += [(f"m2/tokens_per_s.{at}", arm["tokens_per_s"], 0)]
    found = verdict["characteristics"]
    for improvement, chance in zip(
        found.get("true_improvement", []), found["adopt_probability"] or []
    ):
        rows += [(f"characteristics/adopt_probability_at_{improvement:.3f}", chance, 0)]
    if verdict["aa"]["ratio"] is not None:
        low, high = verdict["aa"]["ci95"]
        rows += [("aa/ratio", verdict["aa"]["ratio"], 0), ("aa/ratio.low", low, 0)]
        rows += [("aa/ratio.high", high, 0), ("aa/covers_1", float(verdict["aa"]["covers_1"]), 0)]
    store.metrics(run, rows)
    for name in ("verdict.json", "report.html", "manifest.json", "protocol.json"):
        store.artifact(run, store.run_dir / name)
    for figure in sorted((store.run_dir / "figures").glob("*.svg")):
        store.artifact(run, figure, "figures")
    for figure in sorted((store.run_dir / "figures").glob("*.png")):
        store.artifact(run, figure, "figures")
    store.end(run, "FINISHED")


def main(argv: list[str] | None = None) -> int:
    """``python -m kvtrial.tracking rebuild RESULTS``: make the store again from the results."""
    parser = argparse.ArgumentParser(prog="kvtrial.tracking", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    again = commands.add_parser("rebuild", help="log every run below RESULTS again")
    again.add_argument("results", type=Path)
    args = parser.parse_args(argv)
    rebuild(args.results)
    print(f"MLflow store: {tracking_uri(args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
