"""deploy/kubernetes by the cluster's own schema, as the pinned client has it: no field that it does not know,
no value that it refuses, nothing that it asks for left out. It needs no cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.cluster

MANIFESTS = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
#: apiVersion's group → the client's prefix of its models.
GROUPS = {"v1": "V1", "batch/v1": "V1", "rbac.authorization.k8s.io/v1": "V1"}


def checked(value: Any, kind: str, at: str) -> Any:
    """``value`` as the client's model ``kind``; an assertion names the field that is none."""
    from kubernetes.client import models

    if inner := re.fullmatch(r"list\[(.+)\]", kind):
        assert isinstance(value, list), at
        return [checked(v, inner[1], f"{at}[{i}]") for i, v in enumerate(value)]
    if inner := re.fullmatch(r"dict\(str, (.+)\)", kind):
        return {key: checked(v, inner[1], f"{at}.{key}") for key, v in value.items()}
    model = getattr(models, kind, None)
    if model is None:
        plain = {"str": str, "int": int, "bool": bool, "object": object}[kind]
        assert isinstance(value, plain), f"{at} is {value!r}, not of {kind}"
        return value
    fields = {spelt: name for name, spelt in model.attribute_map.items()}
    assert isinstance(value, dict) and set(value) <= set(fields), (
        f"{at}: {set(value) - set(fields)}"
    )
    return model(
        **{
            fields[k]: checked(v, model.openapi_types[fields[k]], f"{at}.{k}")
            for k, v in value.items()
        }
    )  # ValueError: a field that is asked for is missing, or has a value that is not allowed


def objects() -> list[dict[str, Any]]:
    files = sorted(MANIFESTS.glob("*.yaml"))
    return [o for f in files for o in yaml.safe_load_all(f.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("given", objects(), ids=lambda o: o["kind"])
def test_an_object_is_of_its_schema(given: dict[str, Any]):
    checked(given, GROUPS[given["apiVersion"]] + given["kind"], given["kind"])


def test_a_field_that_is_none_is_noticed():
    job = next(o for o in objects() if o["kind"] == "Job")
    job["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(AssertionError, match=r"containers\[0\]: \{'resource'\}"):
        checked(job, "V1Job", "Job")
    del job["spec"]["template"]["spec"]["containers"]
    with pytest.raises(ValueError, match="containers"):
        checked(job, "V1Job", "Job")
