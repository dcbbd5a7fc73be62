"""A run: its name, and where each of its files lies below ``results/``.

The name is made of what must not be mixed: model, registered protocol, machine class and build.
Everything here is known before anything is measured, so the pipeline asks for it while it parses.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvtrial.contract import CANDIDATE_NAME
from kvtrial.contract.arguments import shown
from kvtrial.host import build, machine, paths
from kvtrial.host.files import is_file
from kvtrial.registration import Protocol
from kvtrial.run import models, protocol

#: The model of config/config.yaml, and of the commands that are not told another.
DEFAULT_MODEL = "smollm2-135m-instruct-q4_1"
PROFILES = ("default", "full")
#: Whose events the verdict reads, in the order in which they run.
STAGES = (
    "run",
    "conformance",
    "parity",
    "m1",
    "control",
    "direct_write",
    "cold_tier",
    "aa",
    "m2",
)


#: Inherited by every process of a pipeline.
_STARTED = "KVTRIAL_PIPELINE_STARTED"


class ConfigError(ValueError):
    """The configuration asks for something that is not there; the message lists what is."""


def prepare_environment() -> None:
    """Switch telemetry off, let ``python`` in a rule be this interpreter, note when this began.

    To be called before mlflow or huggingface_hub is imported; child processes inherit it.
    """
    os.environ.setdefault(_STARTED, repr(time.time()))
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    folder = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != folder:
        os.environ["PATH"] = os.pathsep.join([folder, path])


def pipeline_start() -> float:
    """When the pipeline that this process belongs to began, in seconds since the epoch."""
    return float(os.environ.get(_STARTED) or time.time())


@dataclass(frozen=True)
class Run:
    """Names and places of one run.

    Attributes
    ----------
    results : Path
        The folder that holds all runs.
    model : str
        A name of config/models.yaml.
    profile : str
        ``default`` or ``full``: which of the protocol's cells are measured.
    protocol : dict
        The registered protocol, checked.
    build_id : str
        12 hex digits of `kvtrial.host.build.identity`.
    strangers : str
        8 hex digits of `strangers`; empty where every candidate is ours.
    """

    results: Path
    model: str
    profile: str
    protocol: Protocol
    build_id: str
    strangers: str = ""

    @property
    def run_id(self) -> str:
        """``<model>-<protocol 8>-<machine 8>-<build 12>``; ``-<strangers 8>`` where candidates of
        other packages compete, ``-full`` in that profile."""
        digest = hashlib.sha256(machine.machine_class().encode()).hexdigest()
        parts = [self.model, protocol.sha256(self.protocol)[:8], digest[:8], self.build_id]
        if self.strangers:
            parts.append(self.strangers)
        if self.profile != "default":
            parts.append(self.profile)
        return "-".join(parts)

    @property
    def dir(self) -> Path:
        """The run's own folder."""
        return self.results / self.run_id

    @property
    def build(self) -> Path:
        """Facts of the build, shared by the runs that use it."""
        return self.results / "builds" / f"{self.build_id}.json"

    @property
    def gguf(self) -> Path:
        """The model's file, shared by all runs."""
        return self.results / "models" / f"{self.model}.gguf"

    @property
    def manifest(self) -> Path:
        """Machine, versions, flags and hashes."""
        return self.dir / "manifest.json"

    @property
    def protocol_json(self) -> Path:
        """The protocol as it is run."""
        return self.dir / "protocol.json"

    @property
    def estimate(self) -> Path:
        """How long each stage was said to take."""
        return self.dir / "estimate.json"

    @property
    def workload(self) -> Path:
        """Which snapshots the run loads, by content."""
        return self.dir / "workload.json"

    @property
    def verdict(self) -> Path:
        """What was decided and why."""
        return self.dir / "verdict.json"

    @property
    def peers(self) -> Path:
        """The optional comparison with other engines."""
        return self.dir / "peers.json"

    @property
    def report(self) -> Path:
        """The page for people."""
        return self.dir / "report.html"

    @property
    def entrants(self) -> list[str]:
        """Names of all who go through conformance: the candidates and the control."""
        return protocol.entrants(self.protocol)

    def events(self, stage: str) -> Path:
        """Raw events of one stage."""
        return self.dir / "events" / f"{stage}.parquet"

    def conformance(self, candidate: str) -> Path:
        """What one candidate passed, failed and lacks."""
        return self.dir / "conformance" / f"{candidate}.json"

    def log(self, stage: str) -> Path:
        """Log of one stage."""
        return self.dir / "logs" / f"{stage}.log"


def registered_candidates() -> list[str]:
    """Names in the entry-point group ``kvtrial.candidates``, without loading any."""
    names = {point.name for point in entry_points(group="kvtrial.candidates")}
    return sorted(name for name in names if CANDIDATE_NAME.fullmatch(name))


def strangers(names: list[str]) -> str:
    """8 hex digits over the other packages that ``names`` come from; empty where all are ours.

    The build's identity says nothing of them: without this, a changed kernel in another package would
    go on with the blocks of the old one. An installed package lists each of its files with a hash.
    """
    installed = {
        point.dist.name: point.dist.read_text("RECORD") or point.dist.version
        for point in entry_points(group="kvtrial.candidates")
        if point.name in names and point.dist is not None and point.dist.name != "kvtrial"
    }
    return (
        hashlib.sha256(repr(sorted(installed.items())).encode()).hexdigest()[:8]
        if installed
        else ""
    )


def plan(config: dict[str, Any], results: Path | None = None) -> Run:
    """The run that a configuration asks for.

    Parameters
    ----------
    config : dict
        ``model`` (a name of config/models.yaml, or the path of a file that ends in .gguf), ``protocol`` (a
        path) and ``profile``, as in config/config.yaml.
    results : Path, optional
        By default `kvtrial.host.paths.results_dir`.

    Raises
    ------
    UnknownModel, ModelNotFetched
        No such entry in config/models.yaml, or no such file.
    ConfigError
        An unknown profile or candidate, or no such protocol file.
    ProtocolError
        The protocol is not what its schema allows.
    """
    for key in ("model", "protocol"):
        if not isinstance(config[key], str | Path):
            raise ConfigError(f"{key} is {shown(config[key])}; give a name or a path, as a text")
    model, profile, path = str(config["model"]), config["profile"], Path(config["protocol"])
    if model.endswith(".gguf"):
        model = models.register(model)
    models.entry(model)
    if profile not in PROFILES:
        raise ConfigError(f"profile: no profile {shown(profile)}; known: {', '.join(PROFILES)}")
    if not is_file(path):
        raise ConfigError(
            f"protocol: no file {shown(str(path))}; the default is config/protocol.yaml"
        )
    registered = protocol.load(path)
    known = registered_candidates()
    for name in protocol.entrants(registered):
        if name not in known:
            key = "candidates" if name in registered["candidates"] else "control"
            raise ConfigError(
                f"{path.name}: {key}: no candidate {name!r}; registered: "
                f"{', '.join(known) or 'none (run `make build`)'}"
            )
    return Run(
        results=results or paths.results_dir(),
        model=model,
        profile=profile,
        protocol=registered,
        build_id=build.current_identity(),
        strangers=strangers(protocol.entrants(registered)),
    )
