"""The protocol's types have the keys that its schema has, required and optional alike."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtrial import registration

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
