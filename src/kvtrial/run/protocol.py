"""The registered protocol: load, validate, hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from kvtrial.run import schemas

SCHEMA_NAME = "protocol.schema.yaml"
#: Of the protocol's form; what it says is named by its hash.
VERSION = 3


class ProtocolError(ValueError):
    """The protocol file is not what its schema allows; the message names key, value and schema."""


def check(protocol: Any, source: str = "protocol") -> dict[str, Any]:
    """The protocol itself, or `ProtocolError` for the first thing that the schema does not allow."""
    if isinstance(protocol, dict) and protocol.get("version") in range(1, VERSION):
        raise ProtocolError(
            f"{source}: version {protocol['version']}; this kvtrial reads version {VERSION}: a finished run "
            "is decided by the kvtrial that made it (source_commit in its manifest.json)"
        )
    if (error := schemas.first_error(protocol, SCHEMA_NAME)) is not None:
        raise ProtocolError(f"{source}: {error}")
    checked: dict[str, Any] = protocol
    listed = checked["candidates"]
    rule = checked["decision"]
    named = [(f"decision.{key}", rule[key]) for key in ("challengers", "incumbents", "profiles")]
    named += [
        ("decision.precision", [rule["precision"]["from"], rule["precision"]["to"]]),
        ("aa.candidate", [checked["aa"]["candidate"]]),
        ("parity.baseline", [checked["parity"]["baseline"]]),
        ("parity.comparison", [checked["parity"]["comparison"]]),
        ("parity.slow", checked["parity"]["slow"]),
        *((f"hypotheses.{h['id']}", [h["from"], h["to"]]) for h in checked["hypotheses"]),
    ]
    for key, names in named:
        for name in names:
            if name not in listed:
                raise ProtocolError(
                    f"{source}: {key}: {name!r} is not among candidates {listed}; add it there or "
                    "take it out here"
                )
    control = checked.get("control", {}).get("candidate")
    if control in listed:
        raise ProtocolError(
            f"{source}: control.candidate: {control!r} is among candidates too; the control takes no "
            "part in the pairs, so take it out there"
        )
    if [c["role"] for c in checked["cells"]].count("primary") != 1:
        raise ProtocolError(f"{source}: cells: exactly one cell has role 'primary'")
    if checked["page_tokens"] not in checked["conformance"]["page_tokens"]:
        raise ProtocolError(
            f"{source}: conformance.page_tokens: {checked['page_tokens']} is measured and not among "
            f"{checked['conformance']['page_tokens']}; what is timed has passed at its own page size"
        )
    for index, cell in enumerate(checked["cells"]):
        if cell["threads"] == "all" and (cell["role"] != "extra" or "max_blocks" in cell):
            raise ProtocolError(
                f"{source}: cells.{index}: threads 'all' is another number on another machine; "
                "allowed only with role 'extra' and without max_blocks: give a number"
            )
        if "max_blocks" in cell and not 2 <= cell["blocks"] <= cell["max_blocks"]:
            raise ProtocolError(
                f"{source}: cells.{index}: blocks {cell['blocks']} and max_blocks "
                f"{cell['max_blocks']}; allowed: 2 <= blocks <= max_blocks"
            )
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


def sha256(values: Any) -> str:
    """Hash of a protocol's values, or of others in YAML: key order, comments and spacing do not
    count."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def entrants(protocol: dict[str, Any]) -> list[str]:
    """Everyone who is tried and described: the candidates, then the control where there is one."""
    control = protocol.get("control")
    return [*protocol["candidates"], *([control["candidate"]] if control else [])]


def cells(protocol: dict[str, Any], profile: str) -> list[dict[str, Any]]:
    """The cells that a run profile measures: ``full`` includes those of ``default``."""
    wanted = {"default"} if profile == "default" else {"default", "full"}
    return [cell for cell in protocol["cells"] if cell["profile"] in wanted]
