"""deploy/ agrees with itself and with what the checkout has; `tests/cluster` has the cluster's own schema."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile with its arguments, on one line."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(word, rest) for word, rest in lines]


def manifests() -> dict[str, dict[str, Any]]:
    """Every object of deploy/kubernetes, by its kind."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    found = [o for f in files for o in yaml.safe_load_all(f.read_text(encoding="utf-8"))]
    by_kind = {o["kind"]: o for o in found}
    assert len(by_kind) == len(found)
    return by_kind


def pod() -> dict[str, Any]:
    return manifests()["Job"]["spec"]["template"]["spec"]


def test_what_the_image_runs_is_in_the_checkout():
    given = instructions()
    words = [shlex.split(rest) for word, rest in given if word in ("RUN", "CMD")]
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    flat = [w.strip('[",]') for line in words for w in line]
    targets = [flat[i + 1] for i, w in enumerate(flat) if w == "make" and flat[i + 1] in made]
    assert targets == ["setup", "verdict"]
    files = [w for w in flat if w.endswith(".txt")]
    assert files == ["requirements/cluster.txt"] and (ROOT / files[0]).is_file()
    copied = [rest.split()[-2:] for word, rest in given if word == "COPY"]
    assert copied == [[".", "."]]


def test_the_image_does_not_run_as_root_and_agrees_with_the_job():
    given = instructions()
    (uid,) = re.findall(r"--uid (\d+)", " ".join(rest for _, rest in given))
    assert ("USER", "kvtrial") in given
    order = [word for word, _ in given]
    assert order.index("USER") < order.index("COPY")
    security = pod()["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"] == int(uid)
    (container,) = pod()["containers"]
    (folder,) = [rest for word, rest in given if word == "WORKDIR"]
    assert container["command"] == ["make", "-C", folder, "verdict"]


def test_a_pod_owns_whole_cpus():
    """Guaranteed, with an integer: what the static CPU manager asks for, and no quota below the cores."""
    (container,) = pod()["containers"]
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert re.fullmatch(r"[1-9]\d*", resources["limits"]["cpu"])


def test_volumes_and_accounts_are_those_that_are_made():
    made = manifests()
    claim = made["PersistentVolumeClaim"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    name = claim["metadata"]["name"]
    volumes = {v["name"]: v for v in pod()["volumes"]}
    assert volumes["results"]["persistentVolumeClaim"]["claimName"] == name
    (container,) = pod()["containers"]
    mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert set(mounted) == set(volumes)
    named = {e["name"]: e["value"] for e in container["env"]}
    assert named["KVTRIAL_RESULTS"].startswith(mounted["results"] + "/")
    assert named["KVTRIAL_SCRATCH"] == mounted["scratch"]
    profile = yaml.safe_load(
        (ROOT / "profiles" / "kubernetes" / "config.yaml").read_text(encoding="utf-8")
    )
    assert profile["kubernetes-persistent-volumes"] == [f"{name}:{mounted['results']}"]
    binding = made["RoleBinding"]
    assert binding["roleRef"]["name"] == made["Role"]["metadata"]["name"]
    assert binding["subjects"][0]["name"] == made["ServiceAccount"]["metadata"]["name"]
