"""The registered protocol: load, validate, hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from kvtrial.host.files import NotText, parsed_json, parsed_yaml
from kvtrial.registration import Cell, Protocol
from kvtrial.run import schemas

SCHEMA_NAME = "protocol.schema.yaml"
#: Name of the protocol that shows that every stage runs, and decides nothing.
SMOKE = "kvtrial-smoke"
#: Of the protocol's form; what it says is named by its hash.
VERSION = 3
#: Version → what decides a run of it.
DECIDED_BY = {1: "the releases before 2026-11", 2: "kvtrial up to commit 17f3a9a"}


class ProtocolError(ValueError):
    """The protocol file is not what its schema allows; the message names key, value and schema."""


def check(protocol: Any, source: str = "protocol") -> Protocol:
    """The protocol itself, or `ProtocolError` for the first thing that the schema does not allow."""
    version = protocol.get("version") if isinstance(protocol, dict) else None
    if type(version) is int and version > VERSION:
        raise ProtocolError(
            f"{source}: version {version}; this kvtrial reads version {VERSION}. A newer kvtrial has written "
            "it: give it to that one"
        )
    if type(version) is int and version in DECIDED_BY:
        raise ProtocolError(
            f"{source}: version {version}; this kvtrial reads version {VERSION}. A run of version "
            f"{version} is decided by {DECIDED_BY[version]}: check that out beside this "
            "one and give it the same command (the run's manifest.json names its own source_commit)"
        )
    if (error := schemas.first_error(protocol, SCHEMA_NAME)) is not None:
        raise ProtocolError(f"{source}: {error}")
    checked: Protocol = protocol
    _names(checked, source)
    _cells(checked, source)
    return checked


def _names(checked: Protocol, source: str) -> None:
    """Every arm that the protocol speaks of is a candidate of it."""
    listed, rule = checked["candidates"], checked["decision"]
    named = [(f"decision.{key}", rule[key]) for key in ("challengers", "incumbents", "profiles")]
    named += [
        ("timed_in_full", checked["timed_in_full"]),
        ("decision.reference", [rule["reference"]]),
        ("known_answers.candidate", [checked["known_answers"]["candidate"]]),
        ("parity.baseline", [checked["parity"]["baseline"]]),
        ("parity.comparison", [checked["parity"]["comparison"]]),
        ("parity.slow", checked["parity"]["slow"]),
        *((f"sampling.pairs.{i}", pair) for i, pair in enumerate(checked["sampling"]["pairs"])),
        *((f"hypotheses.{h['id']}", [h["from"], h["to"]]) for h in checked["hypotheses"]),
    ]
    for key, names in named:
        for name in names:
            if name not in listed:
                raise ProtocolError(
                    f"{source}: {key}: {name!r} is not among candidates {listed}; add it there or "
                    "take it out here"
                )
    for key, names in named:
        needed = {*names} & {*checked["timed_in_full"]}
        if needed and key.startswith(
            ("decision.challengers", "decision.incumbents", "known", "sampling")
        ):
            raise ProtocolError(
                f"{source}: timed_in_full: {sorted(needed)} is among {key}, which every profile times; take it "
                "out in one of the two"
            )
    if rule["reference"] not in rule["incumbents"]:
        raise ProtocolError(
            f"{source}: decision.reference: {rule['reference']!r} is not among incumbents "
            f"{rule['incumbents']}; the reference is one of the arms that a challenger has to beat"
        )
    control = checked.get("control", {}).get("candidate")
    if control in listed:
        raise ProtocolError(
            f"{source}: control.candidate: {control!r} is among candidates too; the control takes no "
            "part in the pairs, so take it out there"
        )


def _cells(checked: Protocol, source: str) -> None:
    """One primary cell, no deciding cell of unknown threads, page sizes that passed, counts in order."""
    if [c["role"] for c in checked["cells"]].count("primary") != 1:
        raise ProtocolError(f"{source}: cells: exactly one cell has role 'primary'")
    if checked["page_tokens"] not in checked["conformance"]["page_tokens"]:
        raise ProtocolError(
            f"{source}: conformance.page_tokens: {checked['page_tokens']} is measured and not among "
            f"{checked['conformance']['page_tokens']}; what is timed has passed at its own page size"
        )
    for index, cell in enumerate(checked["cells"]):
        if cell["threads"] == "all" and cell["role"] != "extra":
            raise ProtocolError(
                f"{source}: cells.{index}: threads 'all' is another number on another machine; "
                "allowed only with role 'extra': give a number"
            )
    sampling = checked["sampling"]
    if sampling["most"] < sampling["blocks"]:
        raise ProtocolError(
            f"{source}: sampling: blocks {sampling['blocks']} and most {sampling['most']}; allowed: "
            "blocks <= most"
        )


def load(path: Path) -> Protocol:
    """Read and check a protocol file (YAML, or JSON where its name ends so)."""
    text = path.read_bytes()
    try:
        # JSON is not quite YAML 1.1: 1e-09 without a point would be a string there.
        parsed = parsed_json(text) if path.suffix == ".json" else parsed_yaml(text)
    except NotText as error:
        raise ProtocolError(f"{path}: cannot be read: {error}") from None
    return check(parsed, str(path))


def sha256(values: Any) -> str:
    """Hash of a protocol's values, or of others in YAML: key order, comments and spacing do not
    count."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def entrants(protocol: Protocol) -> list[str]:
    """Everyone who is tried and described: the candidates, then the control where there is one."""
    control = protocol.get("control")
    return [*protocol["candidates"], *([control["candidate"]] if control else [])]


def untimed(protocol: Protocol, profile: str) -> list[str]:
    """The candidates that a run profile does not time; ``full`` times them all."""
    return [] if profile == "full" else protocol["timed_in_full"]


def cells(protocol: Protocol, profile: str) -> list[Cell]:
    """The cells that a run profile measures: ``full`` includes those of ``default``."""
    wanted = {"default"} if profile == "default" else {"default", "full"}
    return [cell for cell in protocol["cells"] if cell["profile"] in wanted]
