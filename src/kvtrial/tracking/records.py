"""What is logged of an attempt at a stage, and of a verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from kvtrial.show import answers, summary
from kvtrial.tracking.store import MAX_TAG, MlflowStore

#: An arm that has nothing else in a cell has no run there.
_NO_RUN = {"not_run", "m2/allocations"}


def log_attempt(
    store: MlflowStore,
    stage_run: str,
    stage: str,
    rows: pd.DataFrame,
    table: Path | None,
    ended: float | None = None,
) -> None:
    """A child run for each candidate and cell of one attempt; they end now or then (seconds since the epoch)."""
    if table is not None:
        store.artifact(stage_run, table)
    store.metrics(stage_run, summary.machine_metrics(rows), table)
    parent = store.client.get_run(stage_run)
    cell = ["candidate", "context", "sessions", "threads", "shape"]
    for (name, context, sessions, threads, shape), own in rows[
        rows["candidate"] != "machine"
    ].groupby(cell):
        if set(own["metric"]) <= _NO_RUN:
            continue
        title = f"{stage} {name}" + (f" @{context}" if context else "")
        if sessions > 1 or threads > 1:
            title += f" {sessions}s{threads}t"
        title += f" {shape}" if shape else ""
        of = {
            "stage": stage,
            "candidate": str(name),
            "context": str(context),
            "sessions": str(sessions),
            "threads": str(threads),
            "shape": str(shape),
        }
        run_id = store.arm(
            title,
            parent,
            **{key: value for key, value in of.items() if value},
            protocol_sha256=str(own["protocol_sha256"].iloc[0]),
            machine=store.machine,
        )
        # Tags are searched, params are compared: the charts offer both as axes.
        params = {key: value for key, value in of.items() if value} | {"model": store.model}
        store.metrics(run_id, summary.arm_metrics(own, int(sessions)), table, params)
        if stage == "conformance":
            store.artifact(run_id, store.run_dir / "conformance" / f"{name}.json")
        why = own.loc[own["metric"].isin(["failed", "not_run"]), "text"]
        failed = (own["metric"] == "failed").any()
        status = "FAILED" if failed else "FINISHED"
        store.end(run_id, status, "; ".join(sorted(set(why))), ended)
    # Last: an attempt without it is not all there, and is logged again by a rebuild.
    store.client.set_tag(stage_run, "kvtrial.attempt", str(int(rows["attempt"].max())))


def log_peers(store: MlflowStore, run: str) -> None:
    """Each program's best setting in peers.json as metrics and tags; table and figure as artifacts."""
    path = store.run_dir / "peers.json"
    metrics: list[tuple[str, float, int]] = []
    settings: dict[str, str] = {}
    for row in json.loads(path.read_text(encoding="utf-8")):
        if not row["best"]:
            continue
        package = row["peer_setting"].partition(" ")[0]
        name = f"{row['metric']}.{package}.{row['context']}_{row['threads']}t"
        low, high = row["ci95"]
        values = {"ours": row["ours"], "peer": row["peer"], "ratio": row["ratio"]}
        values |= {"ratio.low": low, "ratio.high": high}
        metrics += [(f"{name}.{key}", value, 0) for key, value in values.items()]
        settings[f"setting.{name}"] = f"{row['our_arm']} against {row['peer_setting']}"
    store.metrics(run, metrics, path)
    store.tags(run, settings)
    store.artifact(run, path)
    store.artifact(run, store.run_dir / "peers.parquet")
    for figure in sorted((store.run_dir / "figures").glob("peers.*")):
        store.artifact(run, figure, "figures")


def log_verdict(store: MlflowStore) -> None:
    """The verdict into the trial's run: description, tags, metrics, figures and tables."""
    file = store.run_dir / "verdict.json"
    verdict = json.loads(file.read_text(encoding="utf-8"))
    run = store.parent_id
    # The newest run of each stage, or that of the attempt which decided where another came later.
    run_of = store.linked()
    decided = {stage: str(attempt["decided_by"]) for stage, attempt in verdict["attempts"].items()}
    for made in reversed(store.find(level="stage")):
        stage = made.data.tags["kvtrial.stage"]
        if stage in decided and made.data.tags.get("kvtrial.attempt") == decided[stage]:
            run_of[stage] = made.info.run_id
    links = {
        stage: f"#/experiments/{store.experiment_id}/runs/{run_id}"
        for stage, run_id in run_of.items()
    }
    eligible = {
        name: "; ".join(answers.sentences(own)) or "yes"
        for name, own in verdict["eligibility"].items()
    }
    store.tags(
        run,
        {
            "mlflow.note.content": summary.markdown(verdict, links),
            # The three answers, in their order.
            "kvtrial.store": verdict["run"]["store"] or "undecided",
            "kvtrial.language": answers.outcome(verdict),
            "kvtrial.cold_store": verdict["cold"]["adopted"] or "undecided",
            "kvtrial.protocol_sha256": verdict["protocol_sha256"],
        },
    )
    # The page's first line is the answer.
    store.client.update_run(run, name=summary.run_name(verdict))
    for arm in store.find(level="arm"):
        why = eligible.get(arm.data.tags["kvtrial.candidate"])
        if why is not None and arm.data.tags.get("kvtrial.eligible") != why[:MAX_TAG]:
            store.tags(arm.info.run_id, {"kvtrial.eligible": why})
    store.metrics(run, summary.verdict_metrics(verdict), file)
    for name in ("verdict.json", "report.html"):
        store.artifact(run, store.run_dir / name)
    for figure in sorted((store.run_dir / "figures").glob("*")):
        store.artifact(run, figure, "figures")
    for name, table in summary.tables(verdict).items():
        store.client.log_text(run, table.to_csv(index=False), f"tables/{name}.csv")
    store.end(run, "FINISHED", ended=file.stat().st_mtime)
