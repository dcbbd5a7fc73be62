"""Stage ``manifest``: what this run is of, written before anything is measured.

``manifest.json`` is for people: machine, versions, flags and hashes. ``begun.json`` holds what may not
change while a run goes on, and when and where it was begun; it is no output of the rule, since
Snakemake removes those before it makes them anew. ``protocol.json`` is the protocol as it is run.
``events/run.parquet`` holds what the decision rule has to know about run and candidates.

``python -m kvtrial.stages.manifest --run-dir DIR --protocol FILE --model NAME
--gguf FILE --profile default``
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import entry_points, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from kvtrial import candidates
from kvtrial.contract import Candidate
from kvtrial.decision.facts import MEASURED
from kvtrial.engine.config import ModelConfig
from kvtrial.engine.gguf import read_gguf
from kvtrial.host import build, machine, shapes
from kvtrial.host.files import write_text
from kvtrial.run import events, models, protocol
from kvtrial.run.journal import Row
from kvtrial.stages import workload
from kvtrial.stages.common import refuse_another_model


def versions() -> dict[str, str]:
    """Versions of kvtrial and of the packages that it depends on, as installed."""
    found = {"kvtrial": version("kvtrial")}
    for line in requires("kvtrial") or []:
        wanted = Requirement(line)
        # Extras that nobody asked for are left out.
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            found[wanted.name] = version(wanted.name)
    return found


def source_commit() -> str:
    """The checkout's commit, with ``-dirty`` where files differ from it; empty outside of git."""
    if not build.has_sources():  # an environment may lie inside of another project's checkout
        return ""
    command = ["git", "-C", str(build.ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe(name: str, candidate: Candidate) -> dict[str, str | list[str]]:
    """One candidate as the manifest lists it."""
    (point,) = entry_points(group=candidates.GROUP, name=name)
    return {
        "title": candidate.title,
        "role": candidate.role,
        "profile": candidate.profile.name,
        "language": candidate.language,
        "owner": candidate.owner,
        "layout": candidate.layout,
        "missing": list(candidate.missing_capabilities),
        "not_built": candidate.not_built or "",
        "from": f"{point.dist.name} {point.dist.version}" if point.dist else point.value,
    }


def begin(run_dir: Path, gguf: Path) -> dict[str, Any]:
    """What the run was begun with: the model's hash, the CPUs that could be used, when, where and of what.

    Raises
    ------
    StageError
        The model's file is another one now.
    """
    path = run_dir / "begun.json"
    if not path.is_file():
        begun = {
            "model": {"sha256": models.sha256(gguf)},
            "usable_cpus": machine.usable_cpus(),
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": source_commit(),
            "host": platform.node(),
            "kernel": f"{platform.system()} {platform.release()}",
        }
        write_text(path, json.dumps(begun, indent=2) + "\n")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    refuse_another_model(run_dir, found["model"]["sha256"], gguf)
    return found


def run_events(manifest: dict[str, Any]) -> list[Row]:
    """The rows of stage ``run``: facts of the run, then of each candidate, all as text."""
    common = {
        "stage": "run",
        "protocol_sha256": manifest["protocol_sha256"],
        "build_id": manifest["build"]["build_id"],
    }
    facts = {
        "run_id": manifest["run_id"],
        "model": manifest["model"]["name"],
        "machine": manifest["machine_class"],
        "shape": manifest["model"]["shape"],
        "context_length": str(manifest["model"]["context_length"]),
        "synthetic": "true" if manifest["model"]["synthetic"] else "",
        "profile": manifest["profile"],
        "usable_cpus": str(manifest["usable_cpus"]),
        **{key: manifest[key] for key in MEASURED},
    }
    rows = [events.event(f"run/{key}", text=text, **common) for key, text in facts.items()]
    for name, facts in manifest["candidates"].items():
        texts = {
            "profile": facts["profile"],
            "role": facts["role"],
            "layout": facts["layout"],
            "missing": ", ".join(facts["missing"]),
            "not_built": facts["not_built"],
        }
        rows += [
            events.event(f"candidate/{key}", candidate=name, text=text, **common)
            for key, text in texts.items()
        ]
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line of the stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--protocol", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--profile", required=True)
    args = parser.parse_args(argv)

    registered = protocol.load(args.protocol)
    models.check_sha256(args.gguf, models.entry(args.model).get("sha256"))
    begun = begin(args.run_dir, args.gguf)
    manifest = {
        "run_id": args.run_dir.name,
        "profile": args.profile,
        "protocol_sha256": protocol.sha256(registered),
        "machine_class": machine.machine_class(),
        "usable_cpus": begun["usable_cpus"],
        # A run that was begun by an earlier release does not say.
        **{key: begun.get(key, "") for key in MEASURED},
        "source_commit": begun.get("commit") or source_commit(),
        "build": build.facts(),
        "versions": versions(),
        "machine": machine.record(),
        "model": {
            "name": args.model,
            "sha256": begun["model"]["sha256"],
            "bytes": args.gguf.stat().st_size,
            "shape": shapes.name_of(workload.shape_of_file(args.gguf)),
            "context_length": ModelConfig.from_gguf(read_gguf(args.gguf)).context_length,
            "synthetic": models.is_synthetic(args.model),
        },
        "candidates": {
            name: describe(name, candidates.get(name)) for name in protocol.entrants(registered)
        },
    }
    events.write(events.to_frame(run_events(manifest)), args.run_dir / "events" / "run.parquet")
    write_text(args.run_dir / "protocol.json", json.dumps(registered, indent=2) + "\n")
    write_text(args.run_dir / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    from kvtrial.run.exits import exit_with

    exit_with(main)
