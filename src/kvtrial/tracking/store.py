"""The MLflow store of a results folder, with one trial's parent run in it. The only mlflow import."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import logging
import math
import os
import sqlite3
import time
import urllib.parse
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kvtrial.host import paths
from kvtrial.run import corpus

if TYPE_CHECKING:
    from mlflow.entities import Run

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

log = logging.getLogger(__name__)
EXPERIMENT = "kvtrial"
#: Makes the UI open on the table of runs, not on an overview of prompts and their cost.
KIND = {"mlflow.experimentKind": "custom_model_development"}
REBUILD = "python -m kvtrial.tracking rebuild RESULTS"
MAX_PARAM, MAX_TAG = 6000, 8000
#: Entries of a request at most, and metrics of one that has params too.
_BATCH, _FIRST = 1000, 900
#: Tag of a trial's run: stage → that stage's newest run, as JSON.
RUN_OF = "kvtrial.run_of"
#: What the experiment's page says above its runs.
LEGEND = """Trials of KV caches: one run a trial, named by its answer. Below it is a run for each stage, and below
that one for each arm and cell. In the UI, choose "Model training" at the top left; the table then lists the trials.

| stage | what it measures |
| --- | --- |
| `conformance` | the suite over every arm: passed, failed, gaps |
| `parity` | logits of every arm against the baseline's, and the quality of reduced precision |
| `m1` | one attention region alone |
| `m2` | whole decodes, all arms in rotation: what is decided on |
| `aa` | ratios that are known: one arm registered several times |
| `control` | a general store, measured once |
| `direct_write` | K and V written in place against scratch and append |
| `cold_tier` | spill, restore and crashes of the cold stores |

Arms: K0, A1, A2 scalar; K1 fused SIMD in Cython, K3 and K4 in Rust; K2 FP16, K5 Q8_0, K5T, K6 and K7
panels of 8 or 4 bits. K1T, K2T and K3T: K is transposed within the page.
`tokens_per_s/K1` has the context as its step, so its chart is the scaling curve."""
#: How long another program may hold the database before we go on without it.
LOCKED_S = 5.0


class StoreUnusable(RuntimeError):
    """The local store can't be written to, or belongs elsewhere; the message says what to do."""


def tracking_uri(results: Path) -> str:
    """``MLFLOW_TRACKING_URI``, else SQLite at an absolute path in ``results``.

    A path that is no URI as it stands (``?`` would begin a query) is given as SQLite's own, which is quoted;
    with its driver, as MLflow would make a folder `file:` of it else.
    """
    if elsewhere := os.environ.get("MLFLOW_TRACKING_URI"):
        return elsewhere
    path = str(database(results))
    quoted = urllib.parse.quote(path)
    return f"sqlite:///{path}" if quoted == path else f"sqlite+pysqlite:///file:{quoted}?uri=true"


def database(results: Path) -> Path:
    """The file of the embedded store."""
    return results.resolve() / "mlflow.db"


def refuse_embedded() -> None:
    """`StoreUnusable` where MLflow can't have a database of its own: a library of its reads ``%`` in the
    path that MLflow is installed at."""
    found = importlib.util.find_spec("mlflow")
    if found is not None and "%" in (where := str(found.origin)):
        raise StoreUnusable(
            f"MLflow is installed at {Path(where).parent} and can't make a database from a path with '%': "
            "move the checkout, or set MLFLOW_TRACKING_URI to a server"
        )


class MlflowStore:
    """An open MLflow store with one trial's parent run in it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.results = run_dir.parent
        local = not os.environ.get("MLFLOW_TRACKING_URI")
        if local:
            refuse_embedded()
            _refuse_unwritable(database(self.results))
        from mlflow import MlflowClient

        for name in ("alembic", "mlflow"):  # how a database is made is nobody's concern here
            logging.getLogger(name).setLevel(logging.WARNING)
        self.client = MlflowClient(tracking_uri=tracking_uri(self.results))
        self.experiment_id = self._experiment(local)
        manifest = run_dir / "manifest.json"
        facts = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
        self.machine = str(facts.get("machine_class", "unknown"))
        self.begun = str(facts.get("begun", ""))
        self.commit = str(facts.get("source_commit", ""))
        self.model = str(facts.get("model", {}).get("name", "unknown"))
        self.parent_id = self._parent()

    @classmethod
    @contextlib.contextmanager
    def held(cls, run_dir: Path) -> Iterator[MlflowStore]:
        """The store of a run, to this process alone."""
        with (run_dir.parent / ".mlflow.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield cls(run_dir)

    def _experiment(self, local: bool) -> str:
        location = (self.results.resolve() / "mlartifacts").as_uri() if local else None
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            tags = {**KIND, "mlflow.note.content": LEGEND}
            return str(
                self.client.create_experiment(EXPERIMENT, artifact_location=location, tags=tags)
            )
        if experiment.lifecycle_stage == "deleted":
            log.warning(
                "MLflow's experiment %s was deleted, and is restored to take this. To be rid of it, set "
                "MLFLOW_TRACKING_URI to another store",
                EXPERIMENT,
            )
            self.client.restore_experiment(experiment.experiment_id)
        if local and experiment.artifact_location != location:
            raise StoreUnusable(
                f"{database(self.results)} keeps its artifacts at {experiment.artifact_location}: the "
                f"results were moved. Remove it, and make it again here with: {REBUILD}"
            )
        return str(experiment.experiment_id)

    def find(self, **tags: str) -> list[Any]:
        """Runs of this trial with these ``kvtrial.*`` tags, newest first."""
        wanted = {"run_id": self.run_dir.name, **tags}
        query = " and ".join(f"tags.`kvtrial.{key}` = '{value}'" for key, value in wanted.items())
        runs: list[Any] = []
        token = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id], query, max_results=1000, page_token=token
            )
            runs.extend(page)
            token = page.token
            if not token:
                return runs

    def _parent(self) -> str:
        trials = self.find(level="trial")
        if trials:
            return str(trials[0].info.run_id)
        source = {"mlflow.source.name": "kvtrial", "mlflow.source.type": "PROJECT"}
        if self.commit:
            source["mlflow.source.git.commit"] = self.commit
        # When it was measured: a store that is made anew has it from the run, not from now.
        manifest = self.run_dir / "manifest.json"
        begun = manifest.stat().st_mtime if manifest.is_file() else None
        if self.begun:
            begun = datetime.fromisoformat(self.begun).timestamp()
        run_id = self._create(
            self.run_dir.name, source, begun, level="trial", machine=self.machine, model=self.model
        )
        for name in ("manifest.json", "protocol.json"):
            self.artifact(run_id, self.run_dir / name)
        protocol_file = self.run_dir / "protocol.json"
        if protocol_file.is_file():
            protocol = json.loads(protocol_file.read_text(encoding="utf-8"))
            self.params(run_id, dict(_leaves(protocol)))
        self.client.log_inputs(run_id, datasets=_datasets())
        return run_id

    def stage(self, stage: str, begun: float | None = None, **tags: str) -> str:
        """A new run for an attempt at a stage, begun now or then (seconds since the epoch).

        The parent links to the newest one.
        """
        parent = {"mlflow.parentRunId": self.parent_id}
        run_id = self._create(stage, parent, begun, level="stage", stage=stage, **tags)
        self.link(stage, run_id)
        return run_id

    def link(self, stage: str, run_id: str) -> None:
        """Let the trial's run point at this one as its stage's."""
        linked = {**self.linked(), stage: run_id}
        self.client.set_tag(self.parent_id, RUN_OF, json.dumps(linked, sort_keys=True))

    def linked(self) -> dict[str, str]:
        """Stage → the run that the trial's points at."""
        found = self.client.get_run(self.parent_id).data.tags.get(RUN_OF)
        linked: dict[str, str] = json.loads(found) if found else {}
        return linked

    def arm(self, name: str, parent: Run, **tags: str) -> str:
        """A new run for one candidate in one cell, below its stage's and as old."""
        begun = parent.info.start_time / 1000
        return self._create(
            name, {"mlflow.parentRunId": parent.info.run_id}, begun, level="arm", **tags
        )

    def _create(self, name: str, tags: dict[str, str], begun: float | None, **own: str) -> str:
        run = self.client.create_run(
            self.experiment_id,
            run_name=name,
            start_time=round((begun or time.time()) * 1000),
            tags={
                "kvtrial.run_id": self.run_dir.name,
                **tags,
                **{f"kvtrial.{key}": value[:MAX_TAG] for key, value in own.items()},
            },
        )
        return str(run.info.run_id)

    def params(self, run: str, values: dict[str, str]) -> None:
        """Params, each cut to what MLflow takes."""
        listed = _params(values)
        for start in range(0, len(listed), 100):
            self.client.log_batch(run, params=listed[start : start + 100])

    def tags(self, run: str, values: dict[str, str]) -> None:
        """Tags, each cut to what MLflow takes."""
        from mlflow.entities import RunTag

        listed = [RunTag(k, v[:MAX_TAG]) for k, v in values.items()]
        for start in range(0, len(listed), 100):
            self.client.log_batch(run, tags=listed[start : start + 100])

    def metrics(
        self,
        run: str,
        rows: list[tuple[str, float, int]],
        at: Path | None = None,
        params: dict[str, str] | None = None,
    ) -> None:
        """(name, value, step) rows, dated by the file that they come from, so that the same file
        logged again adds nothing; what is not finite becomes a tag, never a metric. A few params go in
        one request with them: an attempt has dozens of runs."""
        from mlflow.entities import Metric

        when = int(at.stat().st_mtime * 1000) if at is not None else 0
        listed = [Metric(n, value, when, step) for n, value, step in rows if math.isfinite(value)]
        beside = _params(params or {})
        if listed or beside:
            self.client.log_batch(run, metrics=listed[:_FIRST], params=beside)
        for start in range(_FIRST, len(listed), _BATCH):
            self.client.log_batch(run, metrics=listed[start : start + _BATCH])
        odd = {f"not_finite.{n}": str(value) for n, value, _ in rows if not math.isfinite(value)}
        self.tags(run, odd)

    def artifact(self, run: str, path: Path, folder: str | None = None) -> None:
        """A file as an artifact; nothing where it is not there."""
        if path.is_file():
            self.client.log_artifact(run, str(path), folder)

    def end(self, run: str, status: str, why: str = "", ended: float | None = None) -> None:
        """End a run as FINISHED, FAILED or KILLED, now or then (seconds since the epoch), the reason as a tag."""
        if why:
            self.client.set_tag(run, "kvtrial.why", why[:MAX_TAG])
        at = None if ended is None else round(ended * 1000)
        self.client.set_terminated(run, status, end_time=at)


def _refuse_unwritable(database: Path) -> None:
    """Fail at once where MLflow would try again for minutes."""
    try:
        with contextlib.closing(sqlite3.connect(database, timeout=LOCKED_S)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.rollback()
    except sqlite3.Error as error:
        raise StoreUnusable(f"{database}: {error}") from None


def _params(values: dict[str, str]) -> list[Any]:
    from mlflow.entities import Param

    return [Param(key, value[:MAX_PARAM]) for key, value in values.items()]


def _datasets() -> list[Any]:
    """The prompts of the parity check and the text that contexts are filled with."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    prompts_file = paths.config_file("prompts.yaml")
    text_file = paths.config_file(f"workload/{corpus.TEXT_NAME}")
    datasets = []
    for name, path, use in (
        ("prompts", prompts_file, "parity"),
        ("workload-text", text_file, "contexts"),
    ):
        if not path.is_file():
            continue
        raw = path.read_bytes()
        rows = len(yaml.safe_load(raw)["prompts"]) if name == "prompts" else raw.count(b"\n")
        dataset = Dataset(
            name=name,
            digest=hashlib.sha256(raw).hexdigest()[:12],
            source_type="local",
            source=json.dumps({"uri": path.name}),
            schema=json.dumps({"mlflow_colspec": [{"name": "text", "type": "string"}]}),
            profile=json.dumps({"num_rows": rows}),
        )
        datasets.append(DatasetInput(dataset, [InputTag("mlflow.data.context", use)]))
    return datasets


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{index}")
    else:
        yield name, str(value)
