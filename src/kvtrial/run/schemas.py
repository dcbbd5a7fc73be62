"""The schemas of protocol, models and verdict. Read once, from the checkout or the package."""

from __future__ import annotations

import functools
from typing import Any

import yaml

from kvtrial.host import paths


@functools.cache
def _load(name: str) -> dict[str, Any]:
    path = paths.schema_dir() / name
    schema: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return schema


def first_error(value: Any, name: str) -> str | None:
    """What is wrong with ``value`` by the schema ``name``: key, message and schema; None if nothing."""
    import jsonschema  # takes longer to load than most measured processes need it

    validator = jsonschema.Draft202012Validator(_load(name))
    # Of alternatives, such as a model's sources, the one that was meant.
    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is None:
        return None
    key = ".".join(str(part) for part in error.absolute_path) or "(top level)"
    return f"{key}: {error.message}; see workflow/schemas/{name}"
