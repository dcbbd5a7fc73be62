"""JSON documents as frozen dataclasses: the door through which one comes in.

Behind it everything uses attributes, so that mypy sees a misspelt name; in front of it `read` names the key.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from kvtrial.contract.arguments import shown

R = TypeVar("R")


class RecordInvalid(ValueError):
    """A document is not the record that it is read as; the message names the key, its value and what is allowed."""


def read(kind: type[R], document: object, name: str) -> R:
    """The record that a parsed document is, ``name`` in messages.

    ``kind`` is a dataclass of JSON's own kinds: None, bool, int, float, str, ``Literal``, ``Any``, lists, tuples of
    one kind, dicts by str, ``TypedDict``, further dataclasses, and unions of these. A float may be written as an
    int. A field with a default may be left out.

    Raises
    ------
    RecordInvalid
        A key is missing, unknown, or of another kind.
    """
    record: R = _value(kind, document, name)
    return record


def plain(record: Any) -> dict[str, Any]:
    """The record as JSON writes it: what `read` takes.

    A field that is as by default is left out, so that a build that does not know it yet reads the others.
    """
    document = dataclasses.asdict(record)
    for field in dataclasses.fields(record):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if getattr(record, field.name) == default:
            del document[field.name]
    return document


@functools.cache
def _fields(kind: type) -> tuple[dict[str, Any], frozenset[str]]:
    """Kinds by key, and the keys that may not be left out."""
    if not dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)  # of a TypedDict, without Required and NotRequired
        return hints, frozenset(kind.__required_keys__)  # type: ignore[attr-defined]
    given = (dataclasses.MISSING, dataclasses.MISSING)
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    needed = frozenset(f.name for f in fields if (f.default, f.default_factory) == given)
    return {f.name: hints[f.name] for f in fields}, needed


def _value(kind: Any, value: Any, name: str) -> Any:
    """``value`` as that kind."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or (origin is Literal and value in inner):
        return value
    if origin in (Union, types.UnionType):
        for one in inner:
            try:
                return _value(one, value, name)
            except RecordInvalid:
                if one is inner[-1]:
                    raise
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        return origin(_value(inner[0], one, f"{name}[{i}]") for i, one in enumerate(value))
    if origin is dict and isinstance(value, Mapping) and {str}.issuperset(map(type, value)):
        return {key: _value(inner[1], one, f"{name}.{key}") for key, one in value.items()}
    record = dataclasses.is_dataclass(kind)
    if (record or typing.is_typeddict(kind)) and isinstance(value, Mapping):
        kinds, needed = _fields(kind)
        if missing := sorted(needed - value.keys()):
            raise RecordInvalid(f"{name} has no {missing[0]}; needed: {', '.join(sorted(needed))}")
        if unknown := [key for key in value if key not in kinds]:
            raise RecordInvalid(
                f"{name} has {shown(unknown[0])}; allowed: {', '.join(sorted(kinds))}"
            )
        found = {key: _value(kinds[key], one, f"{name}.{key}") for key, one in value.items()}
        return kind(**found) if record else found
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is kind:
        return value
    raise RecordInvalid(f"{name} is {shown(value)}; allowed: {getattr(kind, '__name__', kind)}")
