"""The schemas of protocol, models and verdict. Read once, from the checkout or the package."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import yaml

from kvtrial.contract.arguments import shown
from kvtrial.host import paths


@functools.cache
def _load(name: str) -> dict[str, Any]:
    path = paths.schema_dir() / name
    schema: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return schema


#: Whole numbers up to it are the same in any reader of JSON.
_LARGEST = 2**53


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a document, with its key."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{key}{name}.")
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from _numbers(part, f"{key}{place}.")
    elif isinstance(value, (int, float)):
        yield key.rstrip("."), value


def first_error(value: Any, name: str) -> str | None:
    """What is wrong with ``value`` by the schema ``name``: key, message and schema; None if nothing."""
    import jsonschema  # takes longer to load than most measured processes need it

    validator = jsonschema.Draft202012Validator(_load(name))
    # Of alternatives, such as a model's sources, the one that was meant.
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is None:
        # Within every bound of a schema lies NaN, for it compares with nothing; and so may infinity.
        for key, number in _numbers(value):
            if not math.isfinite(number) if isinstance(number, float) else abs(number) > _LARGEST:
                return f"{key}: {shown(number)} is no finite number up to 2**53; see workflow/schemas/{name}"
        return None
    key = ".".join(str(part) for part in error.absolute_path) or "(top level)"
    return f"{key}: {error.message}; see workflow/schemas/{name}"
