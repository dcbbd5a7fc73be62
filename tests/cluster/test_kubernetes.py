"""What profiles/kubernetes would send: a dry run, which needs no cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]


def test_one_trial_a_machine_class_is_planned(tmp_path: Path):
    fleet = tmp_path / "fleet.yaml"
    machines: dict[str, dict] = {
        "epyc": {"checkout": "/opt/kvtrial", "cpus": 64, "machine_type": "c2d-standard-112"},
        "graviton": {
            "checkout": "/opt/kvtrial",
            "cpus": 32,
            "machine_type": "m7g.8xlarge",
            "scratch": "$TMPDIR/cold",
        },
    }
    fleet.write_text(yaml.safe_dump({"machines": machines}), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "snakemake", "--profile", str(ROOT / "profiles" / "kubernetes"),
            "--snakefile", str(ROOT / "workflow" / "fleet.smk"), "--directory", str(tmp_path),
            "--configfile", str(fleet), "--container-image", "kvtrial:test",
            "--default-storage-prefix", str(tmp_path / "volume"),
            "--dry-run", "--printshellcmds",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    for name, machine in machines.items():
        assert f"wildcards: machine={name}" in done.stdout
        assert f"machine_type={machine['machine_type']}" in done.stdout
        assert f"/kvtrial/results/{name}" in done.stdout
    assert done.stdout.count("make -C /opt/kvtrial verdict") == len(machines)
    for scratch in ("$TMPDIR/cold", "${KVTRIAL_SCRATCH:-}"):
        assert done.stdout.count(f'KVTRIAL_SCRATCH="{scratch}"') == 1
