"""The registered protocol: load, validate, hash."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from kvtrial import paths

SCHEMA_NAME = "protocol.schema.yaml"


class ProtocolError(ValueError):
    """The protocol file is not what its schema allows; the message names key, value and schema."""


@functools.cache
def _schema() -> dict[str, Any]:
    folder = paths.PACKAGE / "schemas"
    root = paths.checkout()
    if root is not None:
        folder = root / "workflow" / "schemas"
    schema: dict[str, Any] = yaml.safe_load((folder / SCHEMA_NAME).read_text(encoding="utf-8"))
    return schema


def check(protocol: Any, source: str = "protocol") -> dict[str, Any]:
    """The protocol itself, or `ProtocolError` for the first thing that the schema does not allow."""
    validator = jsonschema.Draft202012Validator(_schema())
    for error in sorted(validator.iter_errors(protocol), key=lambda e: list(map(str, e.path))):
        key = ".".join(str(p) for p in error.path) or "(top level)"
        raise ProtocolError(f"{source}: {key}: {error.message}; see workflow/schemas/{SCHEMA_NAME}")
    checked: dict[str, Any] = protocol
    listed = checked["candidates"]
    rule = checked["decision"]
    for key in ("challengers", "incumbents", "profiles"):
        for name in rule[key]:
            if name not in listed:
                raise ProtocolError(
                    f"{source}: decision.{key}: {name!r} is not among candidates {listed}; add it "
                    "there or take it out here"
                )
    if [c["role"] for c in checked["cells"]].count("primary") != 1:
        raise ProtocolError(f"{source}: cells: exactly one cell has role 'primary'")
    return checked


def load(path: Path) -> dict[str, Any]:
    """Read and check a protocol file (YAML, or JSON where its name ends so)."""
    text = path.read_text(encoding="utf-8")
    try:
        # JSON is not quite YAML 1.1: 1e-09 without a point would be a string there.
        parsed = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ProtocolError(f"{path.name}: cannot be read: {error}") from None
    return check(parsed, path.name)


def sha256(protocol: dict[str, Any]) -> str:
    """Hash of the protocol's values: key order, comments and spacing do not count."""
    canonical = json.dumps(protocol, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def cells(protocol: dict[str, Any], profile: str) -> list[dict[str, Any]]:
    """The cells that a run profile measures: ``full`` includes those of ``default``."""
    wanted = {"default"} if profile == "default" else {"default", "full"}
    return [cell for cell in protocol["cells"] if cell["profile"] in wanted]
