"""A trial through a real Slurm: munged, slurmctld and slurmd of this machine, started for the test.

`make test-slurm` runs it. Nothing outside the test's folder is read or written, and the daemons run as
whoever runs the test.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
CPUS = os.cpu_count() or 1

SLURM_CONF = """
ClusterName=kvtrial
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
MinJobAge=3600
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory_mb} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until(what: str, ready, folder: Path, seconds: float = 60) -> None:
    """Poll ``ready``; a failure shows the ends of the daemons' logs."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            logs = "\n".join(
                f"{p.name}: {p.read_text(errors='replace')[-2000:]}" for p in folder.glob("*.log")
            )
            pytest.fail(f"{what} did not come up in {seconds:g} s\n{logs}")
        time.sleep(0.2)


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands talk to a cluster of this machine alone."""
    missing = [n for n in ("munged", "slurmctld", "slurmd", "sbatch") if not _which(n)]
    if missing:
        pytest.fail(f"{', '.join(missing)} not found; Debian: apt install slurm-wlm munge")
    # Not pytest's folder: a socket's path has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="kvtrial-slurm-"))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 * 9 // 10
    (folder / "slurm.conf").write_text(
        SLURM_CONF.format(
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            folder=folder,
            ports=free_ports(2),
            cpus=CPUS,
            memory_mb=memory_mb,
        ),
        encoding="utf-8",
    )
    # A node has its configuration in a fixed place; ours is told by a `srun` in front of the real one.
    (folder / "bin").mkdir()
    srun = folder / "bin" / "srun"
    srun.write_text(
        f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {_which("srun")} "$@"\n', encoding="utf-8"
    )
    srun.chmod(0o755)
    environment = {
        **os.environ,
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    daemons: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        with (folder / f"{name}.out.log").open("wb") as out:
            daemons.append(
                subprocess.Popen(
                    [_which(name), *arguments],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )

    def answers(*command: str) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    try:
        start(
            "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        wait_until("munged", (folder / "munge.socket").exists, folder)
        start("slurmctld", "-D")
        start("slurmd", "-D")
        wait_until("the node", lambda: "idle" in answers("sinfo", "-h", "-o", "%t"), folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def _which(name: str) -> str:
    """Path of a program, also where only an administrator's PATH has it."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


def test_a_trial_runs_on_a_node_of_its_own(slurm: dict[str, str], tmp_path: Path):
    fleet = tmp_path / "fleet.yaml"
    machine = {"checkout": str(ROOT), "cpus": CPUS, "target": "smoke", "slurm_partition": "all"}
    fleet.write_text(
        yaml.safe_dump({"results": "results/fleet", "machines": {"here": machine}}),
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "snakemake", "--profile", str(ROOT / "profiles" / "slurm"),
            "--snakefile", str(ROOT / "workflow" / "fleet.smk"), "--directory", str(tmp_path),
            "--configfile", str(fleet),
            "--default-resources", "slurm_extra='--exclusive'", "mem_mb=1000", "runtime=60",
            # A cluster without accounting, and without patience.
            "--slurm-no-account", "--slurm-status-command", "squeue",
            "--slurm-init-seconds-before-status-checks", "5", "--latency-wait", "10",
        ],
        cwd=ROOT,
        env=slurm,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + "".join(
        f"\n{log}:\n{log.read_text(errors='replace')}" for log in tmp_path.rglob("*.log")
    )

    verdict = json.loads((tmp_path / "results" / "fleet" / "here.json").read_text(encoding="utf-8"))
    assert verdict["model"] == "tiny-llama"
    assert {arm["candidate"] for arm in verdict["arms"]} >= {"K0", "A1", "A2", "K1"}
    (kept,) = (tmp_path / "results" / "fleet" / "here").glob("*/verdict.json")
    assert json.loads(kept.read_text(encoding="utf-8")) == verdict

    jobs = subprocess.run(
        ["scontrol", "--oneliner", "show", "jobs"],
        env=slurm, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert len(jobs) == 1, jobs
    facts = dict(word.split("=", 1) for word in jobs[0].split() if "=" in word)
    assert facts["JobState"] == "COMPLETED"
    assert facts["OverSubscribe"] == "NO"  # exclusive
    assert facts["Partition"] == "all" and int(facts["NumCPUs"]) == CPUS
