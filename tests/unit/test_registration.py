"""The protocol's types have the keys that its schema has, and its numbers are ones that a run can have."""

from __future__ import annotations

import copy
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from trial_events import REGISTERED as PROTOCOL

from kvtrial import registration
from kvtrial.run.protocol import ProtocolError, check

SCHEMA = yaml.safe_load(
    (Path(__file__).parents[2] / "workflow/schemas/protocol.schema.yaml").read_text(
        encoding="utf-8"
    )
)
#: What a cell has beside its registered keys: m1 names another head shape by it.
ADDED = {registration.Cell: {"shape"}}
#: Registered in every cell, and not in one that a stage makes for itself.
REGISTERED = {registration.Cell: {"role", "profile"}}


def pairs() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name → type and the part of the schema that it is of, from the whole down."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}

    def visit(name: str, kind: Any, part: dict[str, Any]) -> None:
        if typing.is_typeddict(kind):
            found[name] = kind, part
            for key, hint in typing.get_type_hints(kind).items():
                visit(key, hint, part["properties"].get(key, {}))
        elif "items" in part and typing.get_args(kind):
            visit(name, typing.get_args(kind)[0], part["items"])

    visit("protocol", registration.Protocol, SCHEMA)
    return found


PAIRS = pairs()


def test_every_type_is_met():
    kinds = {kind for kind, _ in PAIRS.values()}
    own = {x for x in vars(registration).values() if typing.is_typeddict(x)} - {typing.TypedDict}
    assert kinds == own


@pytest.mark.parametrize("name", PAIRS)
def test_keys_are_those_of_the_schema(name: str):
    kind, part = PAIRS[name]
    registered = REGISTERED.get(kind, set())
    assert kind.__required_keys__ | registered == set(part["required"])
    optional = kind.__optional_keys__ - registered - ADDED.get(kind, set())
    assert optional == set(part["properties"]) - set(part["required"])


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("decision", "adopt_lower_bound", float("nan"), "adopt_lower_bound: nan is no finite"),
        ("rotation", "step_limit_s", float("inf"), "step_limit_s: inf is no finite"),
        ("sampling", "half_width", 2**53 + 1, "half_width: 9007199254740993 is no finite"),
        ("parity", "prompts", 10**18, "prompts: 1000000000000000000 is greater than the maximum"),
    ],
)
def test_a_protocol_s_numbers_are_those_that_a_run_can_have(
    section: str, key: str, value: Any, said: str
) -> None:
    """NaN lies within every bound; a decision makes a set of as many numbers as there are prompts."""
    protocol = copy.deepcopy(PROTOCOL)
    protocol[section][key] = value
    with pytest.raises(ProtocolError, match=said):
        check(protocol)


def test_an_arm_that_decides_is_timed_in_every_profile() -> None:
    with pytest.raises(ProtocolError, match=r"timed_in_full: \['K3'\] is among decision"):
        check({**PROTOCOL, "timed_in_full": ["K3"]})
    with pytest.raises(ProtocolError, match="timed_in_full: 'K9' is not among candidates"):
        check({**PROTOCOL, "timed_in_full": ["K9"]})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"page_tokens": 0}, "page_tokens"),
        ({"surprise": 1}, "surprise"),
        ({"candidates": ["K1"]}, "K3"),
        ({"cells": []}, "cells"),
        (
            {"known_answers": {**PROTOCOL["known_answers"], "candidate": "K9"}},
            "known_answers.candidate: 'K9'",
        ),
        ({"parity": {**PROTOCOL["parity"], "baseline": "K9"}}, "parity.baseline: 'K9'"),
        ({"parity": {**PROTOCOL["parity"], "comparison": "K9"}}, "parity.comparison: 'K9'"),
        ({"parity": {**PROTOCOL["parity"], "slow": ["K9"]}}, "parity.slow: 'K9'"),
        (
            {"hypotheses": [{"id": "X1", "claim": "fast", "from": "K1", "to": "TwoPas"}]},
            "hypotheses.X1: 'TwoPas' is not among candidates",
        ),
        (
            {"sampling": {**PROTOCOL["sampling"], "pairs": [["K3", "K9"]]}},
            "sampling.pairs.0: 'K9'",
        ),
        ({"sampling": {**PROTOCOL["sampling"], "most": 7}}, "blocks 8 and most 7"),
        (
            {"decision": {**PROTOCOL["decision"], "reference": "K2"}},
            "decision.reference: 'K2' is not among incumbents",
        ),
        ({"conformance": {"page_tokens": [16]}}, "conformance.page_tokens: 32 is measured"),
        ({"cells": [{**PROTOCOL["cells"][0], "threads": "all"}]}, "only with role 'extra'"),
    ],
)
def test_a_bad_protocol_is_named(change: dict, names: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ProtocolError, match=names):
        check({**PROTOCOL, **change})


@pytest.mark.parametrize(
    ("version", "by"), [(1, "releases before 2026-11"), (2, "up to commit 17f3a9a")]
)
def test_a_protocol_of_an_older_form_names_who_decides_it(version: int, by: str) -> None:
    with pytest.raises(ProtocolError, match=rf"version {version} .*{by}.*source_commit"):
        check({**PROTOCOL, "version": version}, "protocol.json")
